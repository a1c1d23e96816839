"""Embedding layers for flax nnx, whose tables are sharded and trained with sparse gradients.

A layer (`embedding.py`) looks up by one equation, `engine_lookup`, which carries the layer's step
counter. `program.py` traces the user's function, finds those equations by the counter, and runs the
function with a tap at each of them. `gradients.py` passes the gradients of the taps to the engine
of the layer. `placing.py` places the batches of all layers of a model in one call.

Beside the layers stands the attention of models over jagged histories (`attention.py`).

Input: ids, in the `__call__` of a model.
Output: activations; after a training step, the new tables of the layers.
"""

from tpu_embed.nn.attention import jagged_attention, on_each_replica
from tpu_embed.nn.embedding import Embed, EmbeddingBag
from tpu_embed.nn.gradients import (
    TableGradients,
    apply_table_gradients,
    fused_value_and_grad,
    sparse_value_and_grad,
)
from tpu_embed.nn.placing import ModelPlacer, admit, place
from tpu_embed.nn.program import ActivationGradient
from tpu_embed.nn.variables import Counter, MapVersion, Slot, Table

__all__ = [
    "ActivationGradient",
    "Counter",
    "Embed",
    "EmbeddingBag",
    "MapVersion",
    "ModelPlacer",
    "Slot",
    "Table",
    "TableGradients",
    "admit",
    "apply_table_gradients",
    "fused_value_and_grad",
    "jagged_attention",
    "on_each_replica",
    "place",
    "sparse_value_and_grad",
]

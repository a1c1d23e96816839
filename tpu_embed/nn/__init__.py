"""Embedding layers for flax nnx, whose tables are sharded and trained by sparse gradients.

Enters: ids, in a model's `__call__`. Leaves: activations; after a step, the layers' new tables.

A layer (`embedding.py`) looks up by one equation, `engine_lookup` (core), which carries the layer's
step counter. `program.py` traces the user's function, finds those equations by the counter and
runs it with a tap at each; `gradients.py` gives the taps' gradients to the layer's engine.
"""

from tpu_embed.nn.embedding import Embed, EmbeddingBag
from tpu_embed.nn.gradients import (
    TableGradients,
    apply_table_gradients,
    fused_value_and_grad,
    sparse_value_and_grad,
)
from tpu_embed.nn.program import ActivationGradient
from tpu_embed.nn.variables import Counter, Slot, Table

__all__ = [
    "ActivationGradient",
    "Counter",
    "Embed",
    "EmbeddingBag",
    "Slot",
    "Table",
    "TableGradients",
    "apply_table_gradients",
    "fused_value_and_grad",
    "sparse_value_and_grad",
]

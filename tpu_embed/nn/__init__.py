"""Embedding layers for flax nnx, whose tables are sharded and trained with sparse gradients.

`Embeddings` (`embedding.py`) has all tables of a model in one engine, the other layers have one
each. During a training step a layer adds a tap to the activations of each of its lookups
(`layer.py`). `gradients.py` differentiates the user's function by these taps, and passes the
gradients to the layer's engine.

Beside the layers stands the attention of models over jagged histories (`attention.py`).

Input: ids, in the `__call__` of a model.
Output: activations; after a training step, the new tables of the layers.
"""

from tpu_embed.nn.attention import jagged_attention, on_each_replica
from tpu_embed.nn.embedding import Embed, EmbeddingBag, Embeddings, admit, place
from tpu_embed.nn.gradients import (
    ActivationGradient,
    TableGradients,
    apply_table_gradients,
    fused_value_and_grad,
    sparse_value_and_grad,
)
from tpu_embed.nn.layer import Activations, Counter, MapVersion, Slot, Table

__all__ = [
    "ActivationGradient",
    "Activations",
    "Counter",
    "Embed",
    "EmbeddingBag",
    "Embeddings",
    "MapVersion",
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

"""Embedding layers for flax nnx, whose tables are sharded and trained by sparse gradients.

Enters: ids, in a model's `__call__`. Leaves: activations; after a step, the layers' new tables.
"""

from tpu_embed.nn.embedding import Embed, EmbeddingBag
from tpu_embed.nn.gradients import (
    TableGradients,
    apply_table_gradients,
    fused_value_and_grad,
    sparse_value_and_grad,
)
from tpu_embed.nn.variables import Counter, Slot, Table

__all__ = [
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

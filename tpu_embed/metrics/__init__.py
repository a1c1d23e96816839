"""Statistics to watch during training: of the ids in a batch, of the tables, and event counters.

They are computed on request, outside of a jit; training itself does not pay for them. They are
nested dicts of plain Python numbers, which `write_scalars` writes for TensorBoard.
"""

from tpu_embed.metrics.batches import batch_statistics
from tpu_embed.metrics.events import counters
from tpu_embed.metrics.keys import vocabulary_scalars, vocabulary_statistics
from tpu_embed.metrics.scalars import write_scalars
from tpu_embed.metrics.tables import table_statistics

__all__ = [
    "batch_statistics",
    "counters",
    "table_statistics",
    "vocabulary_scalars",
    "vocabulary_statistics",
    "write_scalars",
]

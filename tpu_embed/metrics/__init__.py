"""Statistics to watch during training, and measures of how well a model ranks.

Statistics of the ids in a batch, of the tables and of events are computed on request, outside of a
jit; training itself does not pay for them. They are nested dicts of plain Python numbers, which
`write_scalars` writes for TensorBoard. The measures (AUC, normalized entropy, recall and NDCG) are
functions of arrays, for a jit or outside of it.
"""

from tpu_embed.metrics.ranking import auc, ndcg_at_k, normalized_entropy, recall_at_k
from tpu_embed.metrics.statistics import (
    batch_statistics,
    counters,
    table_statistics,
    vocabulary_scalars,
    vocabulary_statistics,
    write_scalars,
)

__all__ = [
    "auc",
    "batch_statistics",
    "counters",
    "ndcg_at_k",
    "normalized_entropy",
    "recall_at_k",
    "table_statistics",
    "vocabulary_scalars",
    "vocabulary_statistics",
    "write_scalars",
]

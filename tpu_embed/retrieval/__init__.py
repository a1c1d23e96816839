"""Retrieval: the best rows of a sharded table for given vectors, and losses that train such tables.

`top_k` finds the rows with the largest inner products where they lie, without a copy of the table.
`in_batch_softmax` and `sampled_softmax` are the losses of two-tower and next-item models; the
`log_q` functions give them the probabilities with which samplers draw items.
"""

from tpu_embed.retrieval.scores import counted_log_q, log_uniform_log_q
from tpu_embed.retrieval.search import TopK, keyed_rows, keys_of, top_k
from tpu_embed.retrieval.softmax import in_batch_softmax, sampled_softmax

__all__ = [
    "TopK",
    "counted_log_q",
    "in_batch_softmax",
    "keyed_rows",
    "keys_of",
    "log_uniform_log_q",
    "sampled_softmax",
    "top_k",
]

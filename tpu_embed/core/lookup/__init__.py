"""Ids in, activations out: fetch rows from their shards and combine the rows of each bag."""

from tpu_embed.core.lookup import segments
from tpu_embed.core.lookup.jagged import (
    ARRAYS,
    Jagged,
    extent_of,
    flatten_arrays,
    put_part,
    split_activations,
    take_part,
)
from tpu_embed.core.lookup.sharded import (
    activations_read,
    by_feature,
    combine,
    lookup,
    not_differentiable,
    record_read,
    row_splits,
    sum_gradients,
)

__all__ = [
    "ARRAYS",
    "Jagged",
    "activations_read",
    "by_feature",
    "combine",
    "extent_of",
    "flatten_arrays",
    "lookup",
    "not_differentiable",
    "put_part",
    "record_read",
    "row_splits",
    "segments",
    "split_activations",
    "sum_gradients",
    "take_part",
]

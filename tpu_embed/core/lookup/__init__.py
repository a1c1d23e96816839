"""Ids in, activations out: fetch rows from their shards and combine the rows of each bag."""

from tpu_embed.core.lookup import segments
from tpu_embed.core.lookup.combine import (
    combine,
    quantize,
    sum_gradients,
)
from tpu_embed.core.lookup.jagged import (
    ARRAYS,
    Jagged,
    extent_of,
    flatten_arrays,
    put_part,
    split_activations,
    take_part,
)
from tpu_embed.core.lookup.reads import activations_read, record_lookup, record_read
from tpu_embed.core.lookup.sharded import (
    by_feature,
    lookup,
    not_differentiable,
    row_splits,
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
    "quantize",
    "record_lookup",
    "record_read",
    "row_splits",
    "segments",
    "split_activations",
    "sum_gradients",
    "take_part",
]

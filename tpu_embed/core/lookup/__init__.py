"""Ids in, activations out: fetch rows from their shards and combine the rows of each bag."""

from tpu_embed.core.lookup import segments
from tpu_embed.core.lookup.combine import (
    BagEntries,
    activations_of,
    bag_entries,
    by_place,
    combine,
    in_bags,
    join_gradients,
    optional_weights,
    quantize,
    sum_gradients,
)
from tpu_embed.core.lookup.differentiable import split_activations
from tpu_embed.core.lookup.jagged import Jagged
from tpu_embed.core.lookup.reads import activations_read, record_lookup, zero_after
from tpu_embed.core.lookup.sharded import as_jagged, by_feature, lookup, not_differentiable

__all__ = [
    "BagEntries",
    "Jagged",
    "activations_of",
    "activations_read",
    "as_jagged",
    "bag_entries",
    "by_feature",
    "by_place",
    "combine",
    "in_bags",
    "join_gradients",
    "lookup",
    "not_differentiable",
    "optional_weights",
    "quantize",
    "record_lookup",
    "segments",
    "split_activations",
    "sum_gradients",
    "zero_after",
]

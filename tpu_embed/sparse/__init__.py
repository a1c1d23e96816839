"""Sparse gradients: find the lookups in a user's traced function, differentiate by their rows."""

from tpu_embed.sparse.indexed_slices import (
    IndexedSlices,
    clip_by_global_norm,
    global_norm,
    is_indexed_slices,
    scale,
)
from tpu_embed.sparse.lookup import check_weights, embedding_lookup
from tpu_embed.sparse.program import (
    Program,
    find_sites,
    full,
    known_after,
    known_after_ids,
    positions,
    propagate,
    pull_back,
    sparse_grad,
    sparse_value_and_grad,
    stopped_p,
    tap,
    tapped,
    value_and_aux,
)

__all__ = [
    "IndexedSlices",
    "Program",
    "check_weights",
    "clip_by_global_norm",
    "embedding_lookup",
    "find_sites",
    "full",
    "global_norm",
    "is_indexed_slices",
    "known_after",
    "known_after_ids",
    "positions",
    "propagate",
    "pull_back",
    "scale",
    "sparse_grad",
    "sparse_value_and_grad",
    "stopped_p",
    "tap",
    "tapped",
    "value_and_aux",
]

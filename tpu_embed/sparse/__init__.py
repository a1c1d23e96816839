"""Sparse gradients: find the lookups in a user's traced function, differentiate by their rows."""

from tpu_embed.sparse.arguments import positions, value_and_aux
from tpu_embed.sparse.grad import sparse_grad, sparse_value_and_grad
from tpu_embed.sparse.indexed_slices import (
    IndexedSlices,
    clip_by_global_norm,
    global_norm,
    is_indexed_slices,
    scale,
)
from tpu_embed.sparse.lookup import embedding_lookup
from tpu_embed.sparse.pull_back import pull_back
from tpu_embed.sparse.reach import NOTHING, Sources, propagate
from tpu_embed.sparse.tapped_program import Reached, TappedProgram, differentiable, tap_lookups
from tpu_embed.sparse.taps import known_after, known_after_ids, tapped

__all__ = [
    "NOTHING",
    "IndexedSlices",
    "Reached",
    "Sources",
    "TappedProgram",
    "clip_by_global_norm",
    "differentiable",
    "embedding_lookup",
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
    "tap_lookups",
    "tapped",
    "value_and_aux",
]

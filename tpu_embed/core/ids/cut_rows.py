"""Cut the rows of sequences that are too long: at their end, or at their beginning.

`FeatureConfig.keep` says which. With L = 2, of the row [7, 3, 5] the first ids 7 3 are kept, or the
last ids 3 5, which then stand at the positions 0 1.

Input: rows, and how long they are. Output: the positions after the cut, or the rows that are left.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.config import FeatureConfig


def dense_lengths(present: np.ndarray) -> np.ndarray:
    """Return the lengths of rows, int64 `[B]`: a row ends after its last id that is present.

    Args:
      present: bool `[B, H]`.
    """
    examples, width = present.shape
    if not width:
        return np.zeros(examples, np.int64)
    # [0, 1, 1, 0]: reversed 0 1 1 0, whose first 1 is at 1, so the length is 4 - 1.
    lengths = width - present[:, ::-1].argmax(axis=1)
    return np.where(present.any(axis=1), lengths, 0).astype(np.int64)


def ids_before(config: FeatureConfig, lengths: np.ndarray) -> np.ndarray:
    """Return how many positions are cut off the beginning of each row, int64 `[B]`.

    Args:
      config: of a sequence.
      lengths: int64 `[B]`, of the rows.
    """
    if config.keep == "first" or not config.max_sequence_length:
        return np.zeros_like(lengths)
    return np.maximum(lengths - config.max_sequence_length, 0)


def after_cut(
    config: FeatureConfig, positions: np.ndarray, lengths: np.ndarray, rows: np.ndarray, limit: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of ids after their rows are cut, and which of them are kept, bool `[N]`.

    Args:
      config: of a sequence.
      positions: int64 `[N]`, the position of each id in its row.
      lengths: int64 `[B]`, of the rows.
      rows: integers `[N]`, the row of each id.
      limit: how many positions a row may have.
    """
    if config.keep == "first":
        return positions, positions < limit
    positions = positions - ids_before(config, lengths)[rows]
    return positions, (positions >= 0) & (positions < limit)


def shift_rows(ids: Array, weights: Array | None, length: int) -> tuple[Array, Array | None]:
    """Move the last L ids of each row that is longer to the row's beginning; inside a jit.

    Args:
      ids: integers `[B, H]`, -1 for padding.
      weights: `[B, H]`, or None.
      length: L.

    Returns:
      Both, `[B, H]`; what was before the last L ids of a row is gone.
    """
    width = ids.shape[1]
    places = jnp.arange(1, width + 1, dtype=jnp.int32)
    lengths = jnp.max(jnp.where(ids != PADDING_ID, places, 0), axis=1, initial=0)
    before = jnp.maximum(lengths - length, 0)[:, None]  # [B, 1]
    # A shift by 5 = 4 + 1 is one by 4 and one by 1. A gather of single numbers would cost more on
    # a TPU than these few passes.
    for bit in range(max(0, width - length).bit_length()):
        step = 2**bit
        moves = (before & step) > 0
        ids = jnp.where(moves, _shifted(ids, step, PADDING_ID), ids)
        if weights is not None:
            weights = jnp.where(moves, _shifted(weights, step, 0), weights)
    return ids, weights


def _shifted(rows: Array, step: int, fill: int) -> Array:
    """Return rows `[B, H]` moved to the left by a number of places."""
    return jnp.pad(rows[:, step:], ((0, 0), (0, min(step, rows.shape[1]))), constant_values=fill)

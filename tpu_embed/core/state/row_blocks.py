"""Read a few rows of a shard that lie one after the other, as numbers to compute with.

What passes over a whole table reads it in such blocks, so that no temporary array is as large as
the table, however its rows are packed.

Input: the array of one shard. Output: rows of floats.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_embed._types import Array
from tpu_embed.kernels import storage
from tpu_embed.kernels.formats import PACKED_ROWS, RowFormat


def row_unit(row_format: RowFormat) -> int:
    """Return of what a block's first row and its number of rows are multiples."""
    # Packed rows share lines of 128 words: PACKED_ROWS rows fill a whole number of lines. Not
    # packed, a row is its own line.
    return PACKED_ROWS if row_format.packed else 1


def read_rows(physical: Array, start: Array, size: int, row_format: RowFormat) -> Array:
    """Return the local rows start … start + size - 1, `[size, …]`, float32 or float64.

    Args:
      physical: the array of one shard, for example `[R, D]`.
      start: the first local row, a multiple of `row_unit`; `start + size` is at most R.
      size: the number of rows, a multiple of `row_unit`.
      row_format: how the rows lie in the array.
    """
    unit = row_unit(row_format)
    # Of rows of 32 words, four stand in a line, so 128 rows are 32 lines: the 128 rows from row 256
    # on are the 32 lines from line 64 on.
    lines = row_format.array(unit).shape[0]
    stored = jax.lax.dynamic_slice_in_dim(physical, start // unit * lines, size // unit * lines)
    values = storage.decode(row_format.unpack(row_format.by_row(stored)), row_format.dtype)
    return values.astype(jnp.float64 if values.dtype == jnp.float64 else jnp.float32)

"""Set rows of an array on one device, in blocks of constant size, to apply a delta to a table.

The block size depends on the table alone, so that deltas of any length use one compiled program.

Input: an array, ids and rows. Output: the array with these rows set.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from tpu_embed._checks import message
from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.layout import INT32_ROWS
from tpu_embed.kernels import dispatch

_NUMBERS = 2**20
"""The most numbers in a block, except that a block has at least 64 rows."""


def block_size(vocabulary_size: int, dim: int) -> int:
    """Return the rows per block: constant per table, so only one program compiles.

    It is V rounded up to a power of two, at most `_NUMBERS / D`, and at least 64.
    """
    whole = 1 << (vocabulary_size - 1).bit_length()
    return min(max(64, whole), max(64, _NUMBERS // dim))


def padded_to(size: int, ids: np.ndarray) -> np.ndarray:
    """Return ids `[n]` as `[size]`, padded with `PADDING_ID` at the end."""
    return np.pad(ids, (0, size - ids.size), constant_values=PADDING_ID)


_copied = jax.jit(dispatch.set_rows)
_in_place = jax.jit(dispatch.set_rows, donate_argnums=0)


def check_numbered(array: Array) -> None:
    """Check that the index dtype can number all rows of an array.

    Raises:
      ValueError: there are more rows than int32 can number, and x64 is off.
    """
    if array.shape[0] > INT32_ROWS and not jax.config.read("jax_enable_x64"):
        expected, got = f"at most {INT32_ROWS} rows while x64 is off", f"{array.shape[0]}"
        remedy = 'turn it on with jax.config.update("jax_enable_x64", True)'
        raise ValueError(message("table", expected=expected, got=got, remedy=remedy))


def set_rows(array: Array, ids: np.ndarray, rows: np.ndarray) -> Array:
    """Return a copy of an array with some rows set.

    Args:
      array: `[V, D]` or `[V]`.
      ids: `[n]`, unique.
      rows: `[n, …]`, in the array's dtype.

    Raises:
      ValueError: whatever `check_numbered` refuses.
    """
    return _set(_copied, array, ids, rows)


def set_rows_in_place(array: Array, ids: np.ndarray, rows: np.ndarray) -> Array:
    """Set rows as `set_rows` does, but in the memory of the array, which is deleted by this."""
    return _set(_in_place, array, ids, rows)


def _set(
    first_block: Callable[..., Array], array: Array, ids: np.ndarray, rows: np.ndarray
) -> Array:
    check_numbered(array)
    size, write = block_size(array.shape[0], int(np.prod(array.shape[1:]))), first_block
    for first in range(0, ids.size, size):
        block = ids[first : first + size]
        missing = [(0, size - block.size)] + [(0, 0)] * (rows.ndim - 1)
        array = write(array, padded_to(size, block), np.pad(rows[first : first + size], missing))
        write = _in_place  # from the second block on, the array is already a copy of our own
    return array

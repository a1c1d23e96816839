"""Set rows of an array on one device, in blocks of constant size, to apply a delta to a table.

The block size depends on the table alone, so that deltas of any length use one compiled program.

Input: an array, ids and rows. Output: the array with these rows set.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import numpy as np

from tpu_embed._checks import message
from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.layout import INT32_ROWS
from tpu_embed.kernels import dispatch

_NUMBERS = 2**20
"""The most numbers in a block, except that a block has at least 64 rows."""


def check_numbered(array: Array) -> None:
    """Check that the index dtype can number all rows of an array.

    Raises:
      ValueError: there are more rows than int32 can number, and x64 is off.
    """
    if array.shape[0] > INT32_ROWS and not jax.config.read("jax_enable_x64"):
        expected, got = f"at most {INT32_ROWS} rows while x64 is off", f"{array.shape[0]}"
        remedy = 'turn it on with jax.config.update("jax_enable_x64", True)'
        raise ValueError(message("table", expected=expected, got=got, remedy=remedy))


def _set(write: Callable[..., Array], array: Array, ids: np.ndarray, rows: np.ndarray) -> Array:
    """Return an array with some rows set.

    Args:
      write: sets the first block.
      array: `[V, D]` or `[V]`.
      ids: `[n]`, unique.
      rows: `[n, …]`, in the array's dtype.

    Raises:
      ValueError: whatever `check_numbered` refuses.
    """
    check_numbered(array)
    # Constant per table, so that only one program compiles: V rounded up to a power of two, at most
    # `_NUMBERS / D`, and at least 64.
    most = max(64, _NUMBERS // math.prod(array.shape[1:]))
    size = min(max(64, 1 << (array.shape[0] - 1).bit_length()), most)
    for first in range(0, ids.size, size):
        block, values = ids[first : first + size], rows[first : first + size]
        missing = (0, size - block.size)
        places = np.pad(block, missing, constant_values=PADDING_ID)
        values = np.pad(values, [missing] + [(0, 0)] * (rows.ndim - 1))
        array = write(array, places, values)
        write = _in_place  # from the second block on, the array is already a copy of our own
    return array


_copied = jax.jit(dispatch.set_rows)
_in_place = jax.jit(dispatch.set_rows, donate_argnums=0)

set_rows = functools.partial(_set, _copied)
"""Returns a copy of an array with some rows set: of `(array, ids, rows)`, see `_set`."""

set_rows_in_place = functools.partial(_set, _in_place)
"""Sets rows as `set_rows` does, but in the memory of the array, which is deleted by this."""

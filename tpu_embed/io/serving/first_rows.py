"""First rows of the ids of one call, of a table on the host, that nobody had trained.

They are numbered from the number of exported rows on, and the program finds them in an array of
their own.

Input: ids. Output: their numbers; then the array.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tpu_embed._types import Array

PART = "first"
"""The name of the array among the parts of a table."""


class FirstRows:
    """The first rows that one call needs of a table.

    Args:
      draw: takes uint32 `[m, 2]`, low and high halves of ids, and returns `[m, D]`.
      num_rows: how many rows the table has in arrays.
      blank: `[1, D]`, what the program gets if there are none.
    """

    def __init__(
        self, draw: Callable[[np.ndarray], Array], num_rows: int, blank: np.ndarray
    ) -> None:
        self._draw, self._num_rows, self._blank = draw, num_rows, blank
        self._ids: list[np.ndarray] = []
        self._size = 0

    def number(self, ids: np.ndarray) -> np.ndarray:
        """Return the numbers of ids, uint64 `[n]`, as int32 `[n]`."""
        distinct, at = np.unique(ids, return_inverse=True)
        first = self._num_rows + self._size
        self._ids.append(distinct)
        self._size += distinct.size
        return (first + at).astype(np.int32)

    def rows(self) -> Array | np.ndarray:
        """Return the rows of all numbered ids, in order of their numbers, and perhaps some more."""
        if not self._size:
            return self._blank
        # Rounded up to a power of two, so that few programs compile.
        halves = np.zeros((1 << (self._size - 1).bit_length(), 2), np.uint32)
        ids = np.concatenate(self._ids)
        halves[: ids.size] = np.stack([ids, ids >> np.uint64(32)], axis=1).astype(np.uint32)
        return self._draw(halves)

"""One number for each of some 64-bit ids, in a hash map: a row, or a step.

Input: ids and numbers, NumPy arrays. Output: the same.
"""

from __future__ import annotations

import numpy as np

from tpu_embed.kernels import dispatch


class IdNumbers:
    """A number of 32 bits for every id that was given one; about 23 bytes each.

    Several threads may call `read` at the same time, but not beside what changes it.

    Example:
      >>> numbers = IdNumbers()
      >>> numbers.write(np.array([7, 2**40], np.uint64), np.array([3, 5], np.int32))
      >>> found = np.zeros(3, np.int32)
      >>> numbers.read(np.array([7, 8, 2**40], np.uint64), found)
      >>> found.tolist(), len(numbers)
      ([3, 0, 5], 2)
    """

    def __init__(self) -> None:
        self._store = dispatch.row_store_kernels().RowStore([np.dtype(np.int32).itemsize], None)

    def __len__(self) -> int:
        """Return how many ids have a number."""
        return self._store.numbers.size

    def write(self, ids: np.ndarray, numbers: np.ndarray, mark: int = 1) -> None:
        """Give ids, uint64 `[n]`, all different, numbers, int32 `[n]`.

        Args:
          ids: see above.
          numbers: see above.
          mark: at least 1; `list` finds ids by it.
        """
        if ids.size:
            given = np.ascontiguousarray(numbers)
            self._store.write(np.ascontiguousarray(ids, np.uint64), [_bytes(given)], mark)

    def read(self, ids: np.ndarray, numbers: np.ndarray) -> None:
        """Set the numbers, int32 `[n]`, of those ids, uint64 `[n]`, that have one."""
        self._store.read(np.ascontiguousarray(ids, np.uint64), [_bytes(numbers)])

    def remove(self, ids: np.ndarray) -> None:
        """Forget the numbers of ids, uint64 `[n]`."""
        self._store.remove(np.ascontiguousarray(ids, np.uint64))

    def list(self, mark: int = 1) -> np.ndarray:
        """Return the ids whose mark is at least this one, uint64 `[n]`, in any order."""
        return self._store.list(mark)


def _bytes(numbers: np.ndarray) -> np.ndarray:
    """Return the bytes of contiguous numbers, uint8 `[n, 4]`, in their own memory."""
    return numbers.view(np.uint8).reshape(numbers.size, numbers.itemsize)

"""The store of `row_store_reference` in C++, called with the GIL released, on several threads.

Beside its bytes a row takes 12 for id and mark, and about 7 in the index that finds it.

Input: NumPy arrays. Output: NumPy arrays, the same as those of `row_store_reference`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np

from tpu_embed.kernels import cpu
from tpu_embed.kernels.row_store_reference import StoreNumbers


class RowStore:
    """Rows by id, as `row_store_reference.RowStore`.

    Args:
      widths: the bytes of each field.
      file: a file that nobody else uses; None: memory.
    """

    def __init__(self, widths: Sequence[int], file: BinaryIO | None) -> None:
        sizes = np.array(widths, np.int64)
        number = -1 if file is None else os.dup(file.fileno())  # the store closes its own
        self._store = _function("new")(sizes.ctypes.data, sizes.size, number)
        if self._store is None:
            raise MemoryError("no memory for a store of rows")
        # When Python ends, other threads may still use it, and the system takes back the memory.
        weakref.finalize(self, _function("delete"), self._store).atexit = False

    @property
    def numbers(self) -> StoreNumbers:
        """What the store tells of itself."""
        numbers = (ctypes.c_int64 * 4)()
        _function("numbers")(self._store, ctypes.addressof(numbers))
        return StoreNumbers(*numbers)

    def write(
        self,
        ids: np.ndarray,
        fields: Sequence[np.ndarray],
        mark: int,
        at: np.ndarray | None = None,
    ) -> None:
        """Write rows; see `row_store_reference.RowStore.write`."""
        self._call("write", ids.ctypes.data, ids.size, *_places(ids, fields, at), mark)

    def read(
        self, ids: np.ndarray, fields: Sequence[np.ndarray], at: np.ndarray | None = None
    ) -> np.ndarray:
        """Read the rows that are here; see `row_store_reference.RowStore.read`."""
        found = np.empty(ids.size, bool)
        places = _places(ids, fields, at)
        self._call("read", ids.ctypes.data, ids.size, *places, found.ctypes.data)
        return found

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return which ids, uint64 `[n]`, are here, bool `[n]`."""
        found = np.empty(ids.size, bool)
        self._call("find", ids.ctypes.data, ids.size, found.ctypes.data)
        return found

    def remove(self, ids: np.ndarray) -> int:
        """Remove the ids that are here, uint64 `[n]`; return how many were."""
        count = ctypes.c_int64()
        self._call("remove", ids.ctypes.data, ids.size, ctypes.addressof(count))
        return count.value

    def list(self, mark: int) -> np.ndarray:
        """Return the ids whose mark is at least this one, uint64 `[n]`, in order of places."""
        ids, count = np.empty(0, np.uint64), 1
        while count > ids.size:  # again, if rows were added meanwhile
            ids = np.empty(self.numbers.size, np.uint64)
            count = _function("list")(self._store, mark, ids.ctypes.data, ids.size)
        return ids[:count]

    def compact(self) -> None:
        """Move rows from the last places to free ones, and free the segments without rows."""
        self._call("compact")

    def _call(self, name: str, *arguments: Any) -> None:
        error = _function(name)(self._store, *arguments)
        if error < 0:
            raise MemoryError("no memory for the rows of a host table")
        if error:
            raise OSError(error, os.strerror(error))


def _places(ids: np.ndarray, fields: Sequence[np.ndarray], at: np.ndarray | None) -> Any:
    """Return where the numbers of contiguous arrays are, as a C array, and where the places are."""
    assert all(field.flags.c_contiguous for field in fields)
    addresses = (ctypes.c_void_p * len(fields))(*(field.ctypes.data for field in fields))
    least = min(len(field) for field in fields)
    if at is None:
        assert ids.size <= least
        return addresses, None
    assert at.dtype == np.int64
    assert at.flags.c_contiguous
    assert at.size == ids.size
    assert not at.size or (at.min() >= 0 and at.max() < least)
    return addresses, at.ctypes.data


@functools.cache
def _function(name: str) -> Any:
    """Return a function of the library; ctypes releases the GIL while it runs."""
    function = getattr(ctypes.CDLL(str(cpu.load().path)), f"tpu_embed_storage_{name}")
    arguments, result = _SIGNATURES[name]
    function.argtypes, function.restype = arguments, result
    return function


_INT, _AT = ctypes.c_int64, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "new": ((_AT, _INT, _INT), _AT),
    "delete": ((_AT,), None),
    "write": ((_AT, _AT, _INT, _AT, _AT, _INT), _INT),
    "read": ((_AT, _AT, _INT, _AT, _AT, _AT), _INT),
    "find": ((_AT, _AT, _INT, _AT), _INT),
    "remove": ((_AT, _AT, _INT, _AT), _INT),
    "list": ((_AT, _INT, _AT, _INT), _INT),
    "compact": ((_AT,), _INT),
    "numbers": ((_AT, _AT), None),
}
"""Functions of the library -> what they take, and what they return."""

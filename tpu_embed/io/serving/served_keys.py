"""The keys of a served table: where each has its row, while deltas give rows to new keys.

The keys of an export are sorted, and the key at place i has row i + 1; row 0 is the one that unseen
keys share. They stay in their file. What deltas changed stands beside them:

    keys of the export   5 7 9      rows 1 2 3
    a delta              7 is lost, 8 is new, in the row that is free
    beside them          7: none, 8: row 2

Input: keys. Output: rows; or a plan for what a delta changes, and the keys after it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tpu_embed.storage import HostRows, RowField


class Plan(NamedTuple):
    """What a delta changes among the keys of a table.

    Attributes:
      keys: uint64 `[n]`, those that changed.
      rows: int32 `[n]`, their rows.
      is_new: bool `[n]`, which of them had none.
      lost: uint64 `[m]`, keys that lose their rows.
      free: int32 `[f]`, rows that are free afterwards.
      num_rows: how many rows have been in use.
    """

    keys: np.ndarray
    rows: np.ndarray
    is_new: np.ndarray
    lost: np.ndarray
    free: np.ndarray
    num_rows: int


class ServedKeys:
    """The keys of one table. Threads may call `find` at the same time, but not beside `change`.

    Args:
      keys: of the export, uint64 `[n]`, ascending.

    Example:
      >>> keys = ServedKeys(np.array([5, 7, 9], np.uint64))
      >>> keys.change(keys.plan(np.array([8], np.uint64), np.array([7], np.uint64)))
      >>> keys.find(np.array([5, 7, 8, 9], np.uint64)), len(keys)
      (array([1, 0, 2, 3], dtype=int32), 3)
    """

    def __init__(self, keys: np.ndarray) -> None:
        # The file stays mapped, but a plain view is indexed faster than NumPy's class for files.
        self._exported = np.asarray(keys)
        self._firsts = np.array(keys[::_STRIDE])
        self._moved = HostRows({"row": RowField((), _ROW)})
        self._free, self.num_rows, self._size = np.zeros(0, _ROW), 1 + keys.size, keys.size

    def __len__(self) -> int:
        """Return how many keys have a row."""
        return self._size

    def copy(self) -> ServedKeys:
        """Return the same keys, which may change without these."""
        new = ServedKeys(self._exported)
        moved = self._moved.ids()
        new._moved.write(moved, {"row": self.find(moved)})
        new._free, new.num_rows, new._size = self._free, self.num_rows, self._size
        return new

    def all(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all keys that have a row, uint64 `[n]` ascending, and their rows, int32 `[n]`."""
        keys = np.union1d(self._exported, self._moved.ids())
        rows = self.find(keys)
        return keys[rows > 0], rows[rows > 0]

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the rows of keys, uint64 `[n]`, int32 `[n]`; row 0 for keys without one."""
        rows = self._exported_rows(keys)
        if len(self._moved):
            self._moved.read_into({"row": rows}, None, keys)
        return rows

    def _exported_rows(self, keys: np.ndarray) -> np.ndarray:
        """Return the rows that keys had in the export, int32 `[n]`; row 0 for those without."""
        if not self._exported.size:
            return np.zeros(keys.size, _ROW)
        # Keys 5 7 9 11 with a stride of 2: 9 is after the first 9, so at place 2 or 3. The firsts
        # stay in the processor's cache; a search in all keys would wait for memory at every step.
        at = np.maximum(np.searchsorted(self._firsts, keys, side="right") - 1, 0) * _STRIDE
        last, step = self._exported.size - 1, _STRIDE // 2
        while step:
            further = np.minimum(at + step, last)
            at = np.where(self._exported[further] <= keys, further, at)
            step //= 2
        return np.where(self._exported[at] == keys, at + 1, 0).astype(_ROW)

    def plan(self, keys: np.ndarray, lost: np.ndarray) -> Plan:
        """Return what a delta changes; nothing changes yet.

        Args:
          keys: uint64 `[n]`, different ones: those that changed, or have a row now.
          lost: uint64 `[m]`, different ones: those that have no row any more.
        """
        rows, gone = self.find(keys), self.find(lost)
        is_new, free = rows == 0, np.append(self._free, gone[gone > 0])
        count = int(is_new.sum())
        reused = min(count, free.size)
        # The rows that were freed last are taken first; then those that nobody has had.
        fresh = np.arange(self.num_rows, self.num_rows + count - reused, dtype=_ROW)
        rows[is_new] = np.append(free[free.size - reused :], fresh)
        left = free[: free.size - reused]
        return Plan(keys, rows, is_new, lost[gone > 0], left, self.num_rows + fresh.size)

    def change(self, plan: Plan) -> None:
        """Do what `plan` said."""
        # Only keys of the export must be remembered as lost; of a stream, they would be too many.
        exported = self._exported_rows(plan.lost) > 0
        self._moved.remove(plan.lost[~exported])
        self._moved.write(plan.lost[exported], {"row": np.zeros(int(exported.sum()), _ROW)})
        self._moved.write(plan.keys[plan.is_new], {"row": plan.rows[plan.is_new]})
        self._free, self.num_rows = plan.free, plan.num_rows
        self._size += int(plan.is_new.sum()) - plan.lost.size


_ROW = np.dtype(np.int32)
_STRIDE = 64
"""Of so many exported keys, the first is kept in memory."""


def with_room(num_rows: int) -> int:
    """Return how many rows arrays get that have so many in use, so that there is room for keys."""
    return num_rows + max(num_rows // 4, _LEAST_ROOM)


_LEAST_ROOM = 1024
"""Rows for new keys that a table has at least, when it is exported and when it grows."""

"""Some rows of a store as they are at one moment, to be read later, while others write.

A save takes long, and training goes on meanwhile. So a row that is about to be overwritten is put
aside first, if the save has not come to it yet:

    ids          3 5 8 9        of the snapshot, ascending
    read         3 5            the save has had these
    write 5 8    5              has been read: nothing to do
                 8              is put aside as it is, and read from there later

Input: ids, and a function that reads rows. Output: blocks of rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np

Rows = dict[str, np.ndarray]
"""What some rows have: `[n, …]` by field."""


class RowSnapshot:
    """Rows of a store as they are when this is made.

    Args:
      ids: distinct ids that have a row, uint64 `[n]`, ascending.
      read: returns the rows of ids as they are now.
    """

    def __init__(self, ids: np.ndarray, read: Callable[[np.ndarray], Rows]) -> None:
        self.ids = ids
        self._read = read
        self._lock = threading.Lock()
        self._next = 0  # ids before this position have been read
        self._aside: list[tuple[np.ndarray, Rows]] = []

    def put_aside(self, ids: np.ndarray) -> None:
        """Keep the rows of ids, uint64 `[m]`, that are about to change and have not been read."""
        with self._lock:
            waiting = self.ids[self._next :]
            at = np.minimum(np.searchsorted(waiting, ids), waiting.size - 1)
            if not waiting.size:
                return
            changing = ids[waiting[at] == ids]
            kept = [some for some, _ in self._aside]
            changing = np.setdiff1d(changing, np.concatenate(kept)) if kept else np.sort(changing)
            if changing.size:
                self._aside.append((changing, self._read(changing)))

    def blocks(self, rows: int) -> Iterator[tuple[np.ndarray, Rows]]:
        """Yield ids and their rows, at most so many at a time; once."""
        while self._next < self.ids.size:
            with self._lock:
                ids = self.ids[self._next : self._next + rows]
                block = self._block(ids)
                self._next += ids.size
            yield ids, block

    def _block(self, ids: np.ndarray) -> Rows:
        """Return the rows of ids, from the store or from where they were put aside."""
        aside = [(kept, rows, np.isin(kept, ids, assume_unique=True)) for kept, rows in self._aside]
        aside = [one for one in aside if one[2].any()]
        if not aside:
            return self._read(ids)
        in_store = np.ones(ids.size, bool)
        for kept, _, here in aside:
            in_store[np.searchsorted(ids, kept[here])] = False
        found = self._read(ids[in_store])
        block = {
            name: np.empty((ids.size, *some.shape[1:]), some.dtype) for name, some in found.items()
        }
        for name, some in found.items():
            block[name][in_store] = some
            for kept, rows, here in aside:
                block[name][np.searchsorted(ids, kept[here])] = rows[name][here]
        return block

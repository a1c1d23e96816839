"""Rows by id, in memory or in a scratch file, in NumPy.

A row has several fields of some bytes each. Rows stand in segments, each in one piece of memory;
a dictionary says where. `host_native` does the same in C++, on several threads, with a tenth
of the memory for the dictionary.

    ids      9 4 . 7      a dot is a free place
    place    0 1 2 3

The first segment is small, so that a small table takes little; each next one has as many rows as
all before it, up to full segments. With a first one of 2 rows and full ones of 8:

    place    0 1 | 2 3 | 4 5 6 7 | 8 … 15 | 16 … 23 | …

Input: NumPy arrays. Output: NumPy arrays, the same from both implementations.
"""

from __future__ import annotations

import bisect
import mmap
import os
import threading
from collections.abc import Sequence
from typing import BinaryIO, NamedTuple

import numpy as np

_FIRST_BYTES = 1 << 16
_SEGMENT_BYTES, _LEAST_ROWS = 1 << 24, 4096  # of a full segment


class StoreNumbers(NamedTuple):
    """What a store tells of itself.

    Attributes:
      size: how many rows it has.
      places: how many places were used since it was last compacted.
      index_bytes: of the memory that finds rows.
      row_bytes: of the memory or the file that has them.
    """

    size: int
    places: int
    index_bytes: int
    row_bytes: int


class RowStore:
    """Rows by id; any thread may call any method, but not read a row while it is written.

    Args:
      widths: the bytes of each field.
      file: a file that nobody else uses; None: memory.
    """

    def __init__(self, widths: Sequence[int], file: BinaryIO | None) -> None:
        self._widths, self._file = tuple(widths), file
        self._width = sum(widths)
        page, rows = 1 if file is None else mmap.PAGESIZE, 1  # a file is mapped by whole pages
        while 2 * rows * self._width <= _FIRST_BYTES or rows * self._width % page:
            rows *= 2
        self._first_rows = rows
        while 2 * rows * self._width <= _SEGMENT_BYTES or rows < _LEAST_ROWS:
            rows *= 2
        self._full_rows = rows
        self._segments: list[np.ndarray] = []  # uint8 [rows, width of a row]
        self._ends: list[int] = []  # by segment, how many places there are up to its end
        self._place_of: dict[int, int] = {}
        self._ids = np.zeros(0, np.uint64)  # by place
        self._marks = np.zeros(0, np.uint32)  # by place; 0: it is free
        self._free: list[int] = []
        self._top = 0
        self._lock = threading.Lock()

    @property
    def numbers(self) -> StoreNumbers:
        """What the store tells of itself."""
        index = self._ids.nbytes + self._marks.nbytes + self._place_of.__sizeof__()
        return StoreNumbers(len(self._place_of), self._top, index, self._room * self._width)

    @property
    def _room(self) -> int:
        """How many places all segments have."""
        return self._ends[-1] if self._ends else 0

    def write(
        self,
        ids: np.ndarray,
        fields: Sequence[np.ndarray],
        mark: int,
        at: np.ndarray | None = None,
    ) -> None:
        """Write rows; ids that are not here are added.

        Args:
          ids: distinct, uint64 `[n]`.
          fields: of each field, uint8 `[m, width]`.
          mark: at least 1; `list` finds rows by it.
          at: int64 `[n]`, which of the m are the rows of the ids; None: 0, 1, ….

        Raises:
          MemoryError, OSError: there is no room. Nothing has changed.
        """
        with self._lock:
            new = [id_ for id_ in ids.tolist() if id_ not in self._place_of]
            self._reserve(len(new))
            for id_ in new:
                place = self._free.pop() if self._free else self._top
                self._top = max(self._top, place + 1)
                self._place_of[id_], self._ids[place] = place, id_
            places = self._places(ids)
            self._marks[places] = mark
            for segment, rows, some in self._by_segment(places):
                given = some if at is None else at[some]
                segment[rows] = np.concatenate([field[given] for field in fields], axis=1)

    def read(
        self, ids: np.ndarray, fields: Sequence[np.ndarray], at: np.ndarray | None = None
    ) -> np.ndarray:
        """Read the rows that are here into their places in the fields, uint8 `[m, width]` each.

        Args:
          ids: uint64 `[n]`.
          fields: the results; what is not here is left as it is.
          at: as for `write`, all different.

        Returns:
          bool `[n]`: which ids are here.
        """
        with self._lock:
            places = self._places(ids)
            for segment, rows, some in self._by_segment(places):
                cuts, given = np.cumsum(self._widths)[:-1], some if at is None else at[some]
                for field, part in zip(fields, np.split(segment[rows], cuts, axis=1), strict=True):
                    field[given] = part
        return places >= 0

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return which ids, uint64 `[n]`, are here, bool `[n]`."""
        with self._lock:
            return self._places(ids) >= 0

    def remove(self, ids: np.ndarray) -> int:
        """Remove the ids that are here, uint64 `[n]`; return how many were."""
        with self._lock:
            before = len(self._place_of)
            for id_ in ids.tolist():
                place = self._place_of.pop(id_, -1)
                if place >= 0:
                    self._marks[place] = 0
                    self._free.append(place)
            return before - len(self._place_of)

    def list(self, mark: int) -> np.ndarray:
        """Return the ids whose mark is at least this one, uint64 `[n]`, in order of places."""
        with self._lock:
            marks = self._marks[: self._top]
            return self._ids[: self._top][(marks > 0) & (marks >= mark)]

    def compact(self) -> None:
        """Move rows from the last places to free ones, and free the segments without rows."""
        with self._lock:
            # Places 0 … 5 with 1 and 3 free: 5 moves to 1, 4 to 3, and 4 places are left.
            free = sorted(self._free)
            while free:
                last = self._top - 1
                if free[-1] == last:
                    free.pop()
                else:
                    self._move(last, free.pop(0))
                self._marks[last], self._top = 0, last
            self._free = []
            needed = bisect.bisect_left(self._ends, self._top) + 1 if self._top else 0
            del self._segments[needed:], self._ends[needed:]
            room = self._room
            self._ids, self._marks = self._ids[:room].copy(), self._marks[:room].copy()
            if self._file is not None:
                self._file.truncate(room * self._width)

    def _move(self, place: int, to: int) -> None:
        id_ = int(self._ids[place])
        self._place_of[id_], self._ids[to], self._marks[to] = to, id_, self._marks[place]
        ((source, at, _),) = self._by_segment(np.array([place]))
        ((target, there, _),) = self._by_segment(np.array([to]))
        target[there] = source[at]

    def _places(self, ids: np.ndarray) -> np.ndarray:
        return np.array([self._place_of.get(id_, -1) for id_ in ids.tolist()], np.int64)

    def _by_segment(self, places: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return the segments of places, the rows in them, and which of the places these are."""
        begins = np.array([0, *self._ends])
        numbers = np.searchsorted(begins, places, side="right") - 1  # -1 for none
        chosen = [(n, np.flatnonzero(numbers == n)) for n in np.unique(numbers).tolist() if n >= 0]
        return [(self._segments[n], places[some] - begins[n], some) for n, some in chosen]

    def _reserve(self, more: int) -> None:
        """Get the room for more rows."""
        needed = self._top + more - len(self._free)
        while self._room < needed:
            rows = min(self._room, self._full_rows) or self._first_rows
            self._segments.append(self._new_segment(rows))
            self._ends.append(self._room + rows)
        room = self._room
        if room > self._ids.size:
            self._ids = np.pad(self._ids, (0, room - self._ids.size))
            self._marks = np.pad(self._marks, (0, room - self._marks.size))

    def _new_segment(self, rows: int) -> np.ndarray:
        shape = rows, self._width
        if self._file is None:
            return np.zeros(shape, np.uint8)
        offset = self._room * self._width
        if hasattr(os, "posix_fallocate"):  # a full disk says so now, not when a row is written
            os.posix_fallocate(self._file.fileno(), offset, shape[0] * shape[1])
        return np.memmap(self._file, np.uint8, "r+", offset, shape)

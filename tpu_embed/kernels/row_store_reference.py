"""Rows by id, in memory or in a scratch file, in NumPy.

A row has several fields of some bytes each. A dictionary says in which place it stands.
`host_native` does the same in C++, on several threads, with a tenth of the memory for the
dictionary.

    ids      9 4 . 7      a dot is a free place
    place    0 1 2 3

There is little room at first, so that a small table takes little. Then it doubles, and from some
size on it grows by as much: with 2 rows at first and 8 rows at most, to 2 4 8 16 24 … places.

Input: NumPy arrays. Output: NumPy arrays, the same from both implementations.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from typing import BinaryIO, NamedTuple

import numpy as np

_FIRST_BYTES = 1 << 16
_STEP_BYTES, _STEP_ROWS = 1 << 24, 4096  # by which room grows at last


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
        # A file is mapped by whole pages.
        page, rows = (
            1 if file is None else mmap.PAGESIZE,
            1,
        )
        while 2 * rows * self._width <= _FIRST_BYTES or rows * self._width % page:
            rows *= 2
        self._first_rows = rows
        while 2 * rows * self._width <= _STEP_BYTES or rows < _STEP_ROWS:
            rows *= 2
        self._step_rows = rows
        self._rows = np.zeros((0, self._width), np.uint8)  # by place
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
        return StoreNumbers(len(self._place_of), self._top, index, self._rows.nbytes)

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
            room = self._room_for(self._top + len(new) - len(self._free))
            if room > len(self._rows):
                self._resize(room)
            for id_ in new:
                place = self._free.pop() if self._free else self._top
                self._top = max(self._top, place + 1)
                self._place_of[id_], self._ids[place] = place, id_
            places = self._places(ids)
            self._marks[places] = mark
            given = slice(ids.size) if at is None else at
            self._rows[places] = np.concatenate(
                [field[given] for field in fields], axis=1
            )

    def read(
        self,
        ids: np.ndarray,
        fields: Sequence[np.ndarray],
        at: np.ndarray | None = None,
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
            here = np.flatnonzero(places >= 0)
            cuts, given = np.cumsum(self._widths)[:-1], here if at is None else at[here]
            parts = np.split(self._rows[places[here]], cuts, axis=1)
            for field, part in zip(fields, parts, strict=True):
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
        """Move rows from the last places to free ones, and give back room that is not needed."""
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
            self._resize(self._room_for(self._top))

    def _move(self, place: int, to: int) -> None:
        id_ = int(self._ids[place])
        self._place_of[id_], self._ids[to], self._marks[to] = (
            to,
            id_,
            self._marks[place],
        )
        self._rows[to] = self._rows[place]

    def _places(self, ids: np.ndarray) -> np.ndarray:
        return np.array([self._place_of.get(id_, -1) for id_ in ids.tolist()], np.int64)

    def _room_for(self, rows: int) -> int:
        """Return the places that a store has for so many rows."""
        room = 0
        while room < rows:
            room += min(room, self._step_rows) or self._first_rows
        return room

    def _resize(self, room: int) -> None:
        """Have so many places, of which those that are used stay as they are."""
        before, size = len(self._rows), room * self._width
        self._ids.resize(room, refcheck=False)
        self._marks.resize(room, refcheck=False)
        if self._file is None:
            self._rows.resize((room, self._width), refcheck=False)
            return
        if room > before and hasattr(os, "posix_fallocate"):
            # A full disk says so now, not when a row is written.
            os.posix_fallocate(self._file.fileno(), 0, size)
        if room:
            self._rows = np.memmap(self._file, np.uint8, "r+", 0, (room, self._width))
        else:
            self._rows = self._rows[:0].copy()
        self._file.truncate(size)

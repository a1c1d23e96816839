"""The rows of one table that were touched, with their slots, by 64-bit id.

A table may have 2⁶³ rows; only those that some batch has had take room here. A row is everything
that belongs to it: its values, and its part of every slot. Rows stand in the host's memory, or in a
scratch file on a fast disk, which is gone when the process ends: what is to be kept is saved.

Every row has a mark, a number that grows: a save that begins a new mark afterwards finds, the next
time, the rows written since.

A save takes long, and training goes on meanwhile. So it reads a snapshot: a row that is about to be
overwritten is put aside first, if the save has not come to it yet:

    ids          3 5 8 9        of the snapshot, ascending
    read         3 5            the save has had these
    write 5 8    5              has been read: nothing to do
                 8              is put aside as it is, and read from there later

Input: ids and rows, NumPy arrays. Output: rows.
"""

from __future__ import annotations

import itertools
import math
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from tpu_embed._checks import refuse
from tpu_embed.kernels import dispatch

Rows = Mapping[str, np.ndarray]
"""What some rows have: `[n, …]` by field."""


class RowField(NamedTuple):
    """What a row has of one array.

    Attributes:
      shape: of one row, such as (64,) for values of dimension 64.
      dtype: of its numbers.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of one row."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class HostRows:
    """Rows by id.

    Any thread may call any method; the copies run on several threads without the GIL. A row must
    not be read, or written, while another thread writes it.

    Args:
      fields: what a row has, by name.
      path: a folder for the scratch file; None: the rows are in memory.

    Attributes:
      fields: see above.
      replaced: the number of the last `Replacement` of rows; 0: none was replaced.

    Raises:
      ValueError: a field has no bytes, or there is no such folder.
      OSError: no file can be made there.

    Example:
      >>> rows = HostRows({"values": RowField((2,), np.dtype(np.float32))})
      >>> rows.write(np.array([7], np.uint64), {"values": np.ones((1, 2), np.float32)})
      >>> read, found = rows.read(np.array([5, 7], np.uint64))
      >>> found, read["values"][1]
      (array([False,  True]), array([1., 1.], dtype=float32))
    """

    def __init__(
        self, fields: Mapping[str, RowField], path: str | os.PathLike[str] | None = None
    ) -> None:
        empty = [name for name, field in fields.items() if field.nbytes == 0]
        if empty or not fields:
            refuse(
                "HostRows",
                expected="fields of some bytes",
                got=f"none in {empty}" if empty else "no field",
            )
        self.fields = dict(fields)
        file = None
        if path is not None:
            if not os.path.isdir(path):
                refuse(
                    "path",
                    expected="a folder",
                    got=f"{os.fspath(path)!r}",
                    remedy="make the folder first, on a fast local disk",
                )
            # It has no name, so that it goes when the process ends, however it ends.
            file = tempfile.TemporaryFile(dir=path, prefix="tpu_embed-")  # noqa: SIM115
        widths = [field.nbytes for field in fields.values()]
        self._rows = dispatch.row_store_kernels().RowStore(widths, file)
        if file is not None:
            weakref.finalize(self._rows, file.close)
        self._mark = 1
        self.replaced = 0
        self._snapshots: weakref.WeakSet[RowSnapshot] = weakref.WeakSet()
        # No snapshot begins between putting aside and writing.
        self._changing = threading.Lock()

    def __len__(self) -> int:
        """Return how many rows there are."""
        return self._rows.numbers.size

    @property
    def nbytes(self) -> int:
        """The bytes of memory, or of the file, that hold rows, and of the index beside them."""
        numbers = self._rows.numbers
        return numbers.row_bytes + numbers.index_bytes

    def begin_mark(self) -> int:
        """Give rows that are written from now on a higher mark, and return it."""
        self._mark += 1
        return self._mark

    def ids(self, since: int = 1) -> np.ndarray:
        """Return the ids of rows that were written with this mark or a later one.

        Returns:
          uint64 `[n]`, ascending.
        """
        return np.sort(self._rows.list(since))

    def contains(self, ids: np.ndarray) -> np.ndarray:
        """Return which ids, uint64 `[n]`, have a row here, bool `[n]`."""
        return self._rows.find(np.ascontiguousarray(ids, np.uint64))

    def write(
        self,
        ids: np.ndarray,
        rows: Rows,
        at: np.ndarray | None = None,
        *,
        mark: int | None = None,
    ) -> None:
        """Write rows; an id that has none here gets one.

        Args:
          ids: distinct, uint64 `[n]`.
          rows: `[m, …]` by field.
          at: int64 `[n]`, which of the m are the rows of the ids; None: 0, 1, …, and m is n.
          mark: of these rows, at least 1; None: that of `begin_mark`.

        Raises:
          ValueError: other fields, shapes or dtypes. Nothing has changed.
          MemoryError, OSError: there is no room. Nothing has changed.
        """
        if rows.keys() != self.fields.keys():
            refuse(
                "HostRows.write",
                expected=f"rows of {sorted(self.fields)}",
                got=f"rows of {sorted(rows)}",
            )
        for name, field in self.fields.items():
            given = rows[name]
            shape = (ids.size if at is None else len(given), *field.shape)
            if (given.shape, given.dtype) != (shape, field.dtype):
                refuse(
                    f"HostRows.write: {name}",
                    expected=f"{field.dtype}{list(shape)}",
                    got=f"{given.dtype}{list(given.shape)}",
                )
        arrays = [_bytes(rows[name], field) for name, field in self.fields.items()]
        ids = np.ascontiguousarray(ids, np.uint64)
        with self._changing:
            self._put_aside(ids)
            self._rows.write(ids, arrays, self._mark if mark is None else mark, at)

    def read(self, ids: np.ndarray) -> tuple[Rows, np.ndarray]:
        """Read rows.

        Args:
          ids: uint64 `[n]`.

        Returns:
          `[n, …]` by field, with arbitrary numbers for ids that have no row here; and bool `[n]`,
          which ids have one.
        """
        rows = self.empty(ids.size)
        return rows, self.read_into(rows, None, ids)

    def empty(self, n: int) -> dict[str, np.ndarray]:
        """Return arrays for n rows, `[n, …]` by field."""
        return {
            name: np.empty((n, *f.shape), f.dtype) for name, f in self.fields.items()
        }

    def read_into(
        self, rows: Rows, at: np.ndarray | None, ids: np.ndarray
    ) -> np.ndarray:
        """Read rows to their places in given arrays; the rest of these stays as it is.

        Args:
          rows: contiguous, `[m, …]` by field.
          at: int64 `[n]`, the place of the row of each id among the m; None: 0, 1, ….
          ids: uint64 `[n]`.

        Returns:
          bool `[n]`, which ids have a row here.
        """
        assert all(array.flags.c_contiguous for array in rows.values())
        arrays = [_bytes(rows[name], field) for name, field in self.fields.items()]
        return self._rows.read(np.ascontiguousarray(ids, np.uint64), arrays, at)

    def snapshot(self, ids: np.ndarray) -> RowSnapshot:
        """Return some rows as they are now; they may be read while others write.

        Args:
          ids: distinct ids that have a row, uint64 `[n]`, ascending.
        """
        made = RowSnapshot(ids, self)
        with self._changing:
            self._snapshots.add(made)
        return made

    def _put_aside(self, ids: np.ndarray) -> None:
        """Let snapshots keep rows that are about to change."""
        for snapshot in self._snapshots:
            snapshot.put_aside(ids)

    def remove(self, ids: np.ndarray) -> int:
        """Forget the rows of ids, uint64 `[n]`; return how many had one.

        Where rows go, room stays for rows to come; where most have gone it is given back.
        """
        ids = np.ascontiguousarray(ids, np.uint64)
        with self._changing:
            self._put_aside(ids)
            count = self._rows.remove(ids)
            numbers = self._rows.numbers
            if numbers.places > _FEW_PLACES and 2 * numbers.size < numbers.places:
                self._rows.compact()
        return count


class RowSnapshot:
    """Rows of a store as they are when this is made, to be read later, while others write.

    Args:
      ids: distinct ids that have a row, uint64 `[n]`, ascending.
      store: has their rows.
    """

    def __init__(self, ids: np.ndarray, store: HostRows) -> None:
        self._ids, self._store, self._aside = ids, store, HostRows(store.fields)
        self._lock = threading.Lock()
        self._next = 0  # ids before this position have been read

    def put_aside(self, ids: np.ndarray) -> None:
        """Keep the rows of ids, uint64 `[m]`, that are about to change and have not been read."""
        with self._lock:
            waiting = self._ids[self._next :]
            if waiting.size:
                at = np.minimum(np.searchsorted(waiting, ids), waiting.size - 1)
                changing = ids[(waiting[at] == ids) & ~self._aside.contains(ids)]
                self._aside.write(changing, self._store.read(changing)[0])

    def blocks(self, size: int) -> Iterator[tuple[np.ndarray, Rows]]:
        """Yield ids and their rows, at most so many at a time; once."""
        while self._next < self._ids.size:
            with self._lock:
                ids = self._ids[self._next : self._next + size]
                rows = self._store.empty(ids.size)
                aside = self._aside.read_into(rows, None, ids)
                self._store.read_into(rows, np.flatnonzero(~aside), ids[~aside])
                self._next += ids.size
            yield ids, rows


_FEW_PLACES = 1 << 16
"""A store with fewer places is not worth compacting."""


def _bytes(array: np.ndarray, field: RowField) -> np.ndarray:
    """Return the bytes of rows, uint8 `[n, width]`; of a contiguous array in its own memory."""
    return (
        np.ascontiguousarray(array).view(np.uint8).reshape(array.shape[0], field.nbytes)
    )


_numbers = itertools.count(-1, -1)


NewRows = tuple[np.ndarray, Rows]
"""What is to be at home: distinct ids, uint64 `[n]`; and rows, `[n, …]` by field."""


class Replacement:
    """Rows of one table that are to be replaced at home: all of a call has happened, or nothing.

    A call that gives rows new values writes some of them at home and some on the devices. What is
    written at home cannot be taken back by returning the old state. So the rows from before are
    kept until the call is sure to succeed: in this process, where Ctrl-C may end it, and in the
    others.

    Args:
      home: the rows of the table at home. No other thread writes the rows of these ids.
      make: returns the new rows; called by `write`.

    Attributes:
      number: of this replacement, less than those before, and than any step. By the last one that
        was written, a batch that has read rows at home is compared with a state.

    Example:
      >>> home = HostRows({"values": RowField((1,), np.dtype(np.float32))})
      >>> ids = np.array([7], np.uint64)
      >>> home.write(ids, {"values": np.ones((1, 1), np.float32)})
      >>> two = Replacement(home, lambda: (ids, {"values": np.full((1, 1), 2, np.float32)}))
      >>> two.write()
      >>> home.read(ids)[0]["values"]
      array([[2.]], dtype=float32)
      >>> two.undo()
      >>> home.read(ids)[0]["values"]
      array([[1.]], dtype=float32)
    """

    def __init__(self, home: HostRows, make: Callable[[], NewRows]) -> None:
        self._home, self._make = home, make
        self.number = next(_numbers)
        self._before: tuple[NewRows, np.ndarray, int] | None = None

    def write(self) -> None:
        """Write the new rows, all or none.

        Raises:
          Exception: what `make` raises; MemoryError, OSError: there is no room. No row has changed.
        """
        ids, rows = self._make()
        old, found = self._home.read(ids)
        # `undo` may follow an interrupt that has come anywhere below.
        self._before = (ids, old), found, self._home.replaced
        self._home.write(ids, rows)
        self._home.replaced = self.number

    def undo(self) -> None:
        """Bring back the rows from before `write`, if it has written; ids without one have none."""
        if self._before is not None:
            (ids, old), found, number = self._before
            self._home.write(ids[found], old, np.flatnonzero(found))
            self._home.remove(ids[~found])
            # Last, so that who reads a number, then rows, has no newer rows than it says.
            self._before, self._home.replaced = None, number

"""The compiled functions that run on the host, called with the GIL released, on several threads.

Each does what is called the same in `host_reference`, `row_store_reference` or
`vocabulary_reference`. No XLA program calls them. A task of the functions is one line, and its C
struct is one line of an int64 array, with sizes and the addresses of its arrays.

Beside its bytes a row in a `RowStore` takes 12 for id and mark, and about 7 in the index that finds
it. A step of a `KeyMap` takes time in proportion to the keys of the batch, whatever the number of
rows; per row the map takes 40 bytes (44 with `evict="lfu"`), and at most 20 per key that may wait.

Input: NumPy arrays. Output: NumPy arrays, the same as those of the references.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np

from tpu_embed.kernels import cpu
from tpu_embed.kernels.host_reference import (
    DistinctKeys,
    Pieces,
    Put,
    SortedIds,
    Take,
)
from tpu_embed.kernels.row_store_reference import StoreNumbers
from tpu_embed.kernels.vocabulary_reference import (
    COUNTERS,
    ConflictError,
    MapState,
    Options,
    Taken,
)

IDS_PER_THREAD = 20_000
"""Fewer ids are not worth the start of a thread."""

_NOTHING = 0  # the address of an array that is not given


def sort_ids(
    row_ids: Sequence[np.ndarray], blocks: Sequence[np.ndarray] | None = None
) -> list[SortedIds]:
    """Sort the ids of every line by row; see `host_reference.sort_ids`."""
    found, tasks = [], []
    for number, line in enumerate(row_ids):
        sums = None if blocks is None else blocks[number]
        found.append(_room(line, by_blocks=sums is not None))
        order, row, rows, sum_, sum_rows = map(_address, found[-1])
        inputs = (
            _address(line),
            _NOTHING if sums is None else _address(sums, np.int32, line.size),
        )
        results = order, row, rows, sum_, sum_rows
        tasks.append((line.itemsize, *inputs, line.size, *results, 0, 0, 0))
    counts = _run("sort_ids", tasks, sum(line.size for line in row_ids))[
        :, -3:
    ].tolist()
    pairs = zip(found, counts, strict=True)
    return [
        SortedIds(
            one.order[:n], one.row[:n], one.rows[:u], one.sum[:n], one.sum_rows[:p]
        )
        for one, (n, u, p) in pairs
    ]


def _room(line: np.ndarray, *, by_blocks: bool) -> SortedIds:
    """Return room for the result of a line; without blocks, the sums are the rows."""
    order, row, sum_ = (np.empty(line.size, np.int32) for _ in range(3))
    rows, sum_rows = np.empty_like(line), np.empty_like(line)
    return SortedIds(
        order, row, rows, *((sum_, sum_rows) if by_blocks else (row, rows))
    )


def take(lines: Sequence[Take]) -> None:
    """Write lines of numbers that are taken from other arrays; see `host_reference.take`."""
    tasks = []
    for out, source, index, rest in lines:
        n = source.size if index is None else index.size
        assert out.dtype == source.dtype
        assert n <= out.size
        fill = np.array(rest, out.dtype).view(f"i{out.itemsize}").item()
        at = _NOTHING if index is None else _address(index, np.int32)
        tasks.append(
            (out.itemsize, _address(out), out.size, _address(source), at, n, 0, fill)
        )
    _run("take", tasks, sum(line.out.size for line in lines))


def put(lines: Sequence[Put]) -> None:
    """Write lines of numbers that are put to given positions; see `host_reference.put`."""
    tasks = []
    for out, order, place, run, rest in lines:
        n = order.size
        arrays = (
            _address(order, np.int32),
            _address(run, np.int32, n),
            _address(place, np.int32),
        )
        tasks.append((_address(out, np.int32), out.size, *arrays, n, rest))
    _run("put", tasks, sum(line.out.size for line in lines))


def put_pieces(
    out: np.ndarray, lines: Sequence[np.ndarray], pieces: Pieces, rest: int
) -> None:
    """Write pieces of lines next to each other; see `host_reference.put_pieces`."""
    number, begin, end, minus = (numbers.reshape(-1) for numbers in pieces)
    sizes = np.array([line.size for line in lines])[number]
    assert out.strides[2] == out.itemsize
    assert (
        (begin >= 0) & (begin <= end) & (end <= sizes) & (end - begin <= out.shape[2])
    ).all()
    # One task per piece, as `take` has them.
    tasks = np.zeros((number.size, 8), np.int64)
    device, place = np.divmod(np.arange(number.size), out.shape[1])
    starts = np.array([_address(line, out.dtype) for line in lines])[number]
    tasks[:, 0] = out.itemsize
    tasks[:, 1] = out.ctypes.data + device * out.strides[0] + place * out.strides[1]
    tasks[:, 2] = out.shape[2]
    tasks[:, 3] = starts + begin * out.itemsize
    tasks[:, 5], tasks[:, 6], tasks[:, 7] = end - begin, minus, rest
    _run("take", tasks, out.size)


def distinct_keys(keys: np.ndarray) -> DistinctKeys:
    """Return each key once, and the position of each; see `host_reference.distinct_keys`."""
    distinct, first = np.empty(keys.size, np.uint64), np.empty(keys.size, np.int64)
    positions = np.empty(keys.size, np.int32)
    given, results = (
        (_address(keys, np.uint64), keys.size),
        (distinct, positions, first),
    )
    ((*_, size),) = _run(
        "distinct_keys", [(*given, *map(_address, results), 0)], keys.size
    )
    return DistinctKeys(distinct[:size], positions, first[:size])


def split_by_row(
    positions: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Split what a feature looks up by its rows; see `host_reference.split_by_row`."""
    used, room = np.zeros(rows.size, bool), rows.size + 1
    known, absent = np.empty(room, np.int32), np.empty(room, np.int64)
    given = _address(positions, np.int32), positions.size, _address(rows, np.int32)
    results = _address(used), _address(known), _address(absent, np.int64)
    ((*_, size, absences),) = _run("split_by_row", [(*given, *results, 0, 0)], 0)
    return known[:size], absent[:absences]


def are_among(keys: np.ndarray, some: np.ndarray) -> np.ndarray:
    """Return which keys are among some others; see `host_reference.are_among`."""
    found = np.empty(keys.size, bool)
    given = _address(keys, np.uint64), keys.size, _address(some, np.uint64), some.size
    _run("are_among", [(*given, _address(found))], 0)
    return found


def rows_at(rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the rows at positions, -1 where the position is -1; see `host_reference.rows_at`."""
    out = np.empty(positions.size, np.int32)
    given = _address(rows, np.int32), _address(positions, np.int32), positions.size
    _run("rows_at", [(*given, _address(out))], 0)
    return out


def _address(array: np.ndarray, dtype: Any = None, size: int | None = None) -> int:
    """Return where a line's numbers are; the C++ code takes only contiguous ones."""
    assert array.ndim == 1
    assert array.flags.c_contiguous
    assert dtype is None or array.dtype == dtype
    assert size is None or array.size == size
    return array.ctypes.data


def _run(name: str, tasks: list[tuple[int, ...]] | np.ndarray, ids: int) -> np.ndarray:
    """Run tasks, and return them: some have fields for results."""
    array = np.array(tasks, np.int64)
    threads = max(1, min(len(tasks), ids // IDS_PER_THREAD))
    threads = min(threads, cores()) if threads > 1 else 1
    if not cpu.function(f"host_{name}")(array.ctypes.data, len(tasks), threads):
        raise MemoryError(f"no memory to {name} {ids} ids")
    return array


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class RowStore:
    """Rows by id, as `row_store_reference.RowStore`.

    Args:
      widths: the bytes of each field.
      file: a file that nobody else uses; None: memory.
    """

    def __init__(self, widths: Sequence[int], file: BinaryIO | None) -> None:
        sizes = np.array(widths, np.int64)
        # The store closes its own.
        number = -1 if file is None else os.dup(file.fileno())
        self._store = cpu.function("storage_new")(sizes.ctypes.data, sizes.size, number)
        if self._store is None:
            raise MemoryError("no memory for a store of rows")
        # When Python ends, other threads may still use it, and the system takes back the memory.
        weakref.finalize(
            self, cpu.function("storage_delete"), self._store
        ).atexit = False

    @property
    def numbers(self) -> StoreNumbers:
        """What the store tells of itself."""
        numbers = (ctypes.c_int64 * 4)()
        cpu.function("storage_numbers")(self._store, ctypes.addressof(numbers))
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
        self,
        ids: np.ndarray,
        fields: Sequence[np.ndarray],
        at: np.ndarray | None = None,
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
            count = cpu.function("storage_list")(
                self._store, mark, ids.ctypes.data, ids.size
            )
        return ids[:count]

    def compact(self) -> None:
        """Move rows from the last places to free ones, and free the segments without rows."""
        self._call("compact")

    def _call(self, name: str, *arguments: Any) -> None:
        error = cpu.function(f"storage_{name}")(self._store, *arguments)
        if error < 0:
            raise MemoryError("no memory for the rows of a host table")
        if error:
            raise OSError(error, os.strerror(error))


def _places(
    ids: np.ndarray, fields: Sequence[np.ndarray], at: np.ndarray | None
) -> Any:
    """Return where the numbers of contiguous arrays are, as a C array, and where the places are."""
    assert all(field.flags.c_contiguous for field in fields)
    addresses = (ctypes.c_void_p * len(fields))(
        *(field.ctypes.data for field in fields)
    )
    least = min(len(field) for field in fields)
    if at is None:
        assert ids.size <= least
        return addresses, None
    assert at.dtype == np.int64
    assert at.flags.c_contiguous
    assert at.size == ids.size
    assert not at.size or (at.min() >= 0 and at.max() < least)
    return addresses, at.ctypes.data


_EVICT = {"lru": 0, "lfu": 1, "none": 2}
_NEVER = -1  # a ttl of None
_CONFLICTS = {1: "row", 2: "key"}
_NO_MEMORY = "no memory for a map from keys to rows"


class KeyMap:
    """A map from keys to rows, as `vocabulary_reference.KeyMap`.

    Args:
      options: how keys are admitted and evicted.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._native = _Native(options)

    @property
    def step(self) -> int:
        """The number of training batches taken so far."""
        return self._native.step

    @property
    def earliest(self) -> int:
        """The earliest step to which the log reaches."""
        return self._native.numbers().earliest

    @property
    def counters(self) -> np.ndarray:
        """Totals of all steps, int64 `[5]`, as `COUNTERS` names them."""
        return np.array(self._native.numbers().counters, np.int64)

    @property
    def nbytes(self) -> int:
        """The bytes of memory that the map has asked for."""
        return self._native.numbers().bytes

    def __len__(self) -> int:
        return self._native.numbers().size

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the row of each key; see `vocabulary_reference.KeyMap.find`."""
        native = self._native  # another thread may load a state meanwhile
        rows = np.empty(keys.size, np.int64)
        native.call("find", _address(keys), keys.size, _address(rows))
        return rows

    def take(
        self, known: np.ndarray, unknown: np.ndarray, *, at_once: bool = False
    ) -> Taken:
        """Take a training batch; see `vocabulary_reference.KeyMap.take`."""
        rows = np.empty(unknown.size, np.int64)
        arrays = (
            _address(known),
            known.size,
            _address(unknown),
            unknown.size,
            _address(rows),
        )
        task = _TakeTask(*arrays, at_once=int(at_once))
        self._native.call("take", ctypes.addressof(task))
        if task.conflict:
            kind = _CONFLICTS[task.conflict]
            raise ConflictError(
                kind, task.number % 2**64 if kind == "key" else task.number
            )
        (new_keys, new_rows), (evicted_keys, evicted_rows) = (
            (np.empty(n, np.uint64), np.empty(n, np.int64))
            for n in (task.num_new, task.num_evicted)
        )
        reports = new_keys, new_rows, evicted_rows, evicted_keys
        self._native.call("taken", *map(_address, reports))
        return Taken(self.step, rows, *reports, task.unseen)

    def rewind(self, step: int) -> None:
        """Undo the batches after `step`, which the log must reach."""
        self._native.call("rewind", step)

    def forget(self, step: int) -> None:
        """Drop the log of the batches up to `step`; they can no longer be undone."""
        self._native.call("forget", step)

    def state(self, step: int) -> MapState:
        """Return the state after `step`, which the log must reach."""
        numbers = self._native.numbers()
        dtypes = np.uint64, np.int64, np.int64, np.int64
        columns = [np.empty(numbers.most_keys, dtype) for dtype in dtypes]
        waiting = [np.empty(numbers.most_waiting, dtype) for dtype in dtypes[:2]]
        task = _StateTask(*map(_address, (*columns, *waiting)), step=step)
        self._native.call("state", ctypes.addressof(task))
        return MapState(
            *(column[: task.n] for column in columns),
            *(column[: task.w] for column in waiting),
            step=np.array(step, np.int64),
            counters=np.array(task.counters, np.int64),
        )

    def load_state(self, state: MapState) -> None:
        """Replace everything by a valid state; the log is empty then."""
        arrays = [np.ascontiguousarray(array) for array in state[:6]]
        sizes = state.keys.size, state.waiting_keys.size
        task = _StateTask(
            *map(_address, arrays), *sizes, int(state.step), tuple(state.counters)
        )
        native = _Native(self._options)
        native.call("load", ctypes.addressof(task))
        self._native = native


class _Native:
    """Owns a map of the library; one that nobody refers to any more is deleted."""

    def __init__(self, options: Options) -> None:
        ttl = _NEVER if options.ttl is None else options.ttl
        numbers = options._replace(evict=_EVICT[options.evict], ttl=ttl)
        self._map = cpu.function("vocabulary_new")(
            _address(np.array(numbers, np.int64))
        )
        if self._map is None:
            raise MemoryError(_NO_MEMORY)
        # When Python ends, other threads may still use it, and the system takes back the memory.
        weakref.finalize(
            self, cpu.function("vocabulary_delete"), self._map
        ).atexit = False

    def call(self, name: str, *arguments: int) -> None:
        """Call a function of the library for this map."""
        if cpu.function(f"vocabulary_{name}")(self._map, *arguments) is False:
            raise MemoryError(_NO_MEMORY)

    @property
    def step(self) -> int:
        """The number of steps; it is asked for more often than all that `numbers` tells."""
        return cpu.function("vocabulary_step")(self._map)

    def numbers(self) -> _Numbers:
        """Return what the map tells of itself."""
        numbers = _Numbers()
        self.call("numbers", ctypes.addressof(numbers))
        return numbers


def _fields(names: str, counters: bool = False) -> list[tuple[str, Any]]:
    """Return the fields of a C struct: numbers or addresses of 8 bytes, then counters."""
    fields: list[tuple[str, Any]] = [(name, ctypes.c_int64) for name in names.split()]
    return (
        [*fields, ("counters", ctypes.c_int64 * len(COUNTERS))] if counters else fields
    )


class _TakeTask(ctypes.Structure):
    _fields_ = _fields(
        "known k unknown m rows conflict number num_new num_evicted unseen at_once"
    )


class _StateTask(ctypes.Structure):
    _fields_ = _fields(
        "keys rows last_seen batches_seen waiting_keys waiting_counts n w step",
        counters=True,
    )


class _Numbers(ctypes.Structure):
    _fields_ = _fields("step earliest size bytes most_keys most_waiting", counters=True)

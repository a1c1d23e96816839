"""The functions of `host_reference` in C++, on threads of their own, with the GIL released.

They are in the library of the compiled CPU kernels, but no XLA program calls them: a task is one
line, and its C struct is one line of an int64 array, with sizes and the addresses of its arrays.

Input and output: those of `host_reference`, to the bit.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from tpu_embed.kernels import cpu
from tpu_embed.kernels.host_reference import (
    DistinctKeys,
    Pieces,
    Put,
    SortedIds,
    Take,
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
        inputs = _address(line), _NOTHING if sums is None else _address(sums, np.int32, line.size)
        results = order, row, rows, sum_, sum_rows
        tasks.append((line.itemsize, *inputs, line.size, *results, 0, 0, 0))
    counts = _run("sort_ids", tasks, sum(line.size for line in row_ids))[:, -3:].tolist()
    pairs = zip(found, counts, strict=True)
    return [
        SortedIds(one.order[:n], one.row[:n], one.rows[:u], one.sum[:n], one.sum_rows[:p])
        for one, (n, u, p) in pairs
    ]


def _room(line: np.ndarray, *, by_blocks: bool) -> SortedIds:
    """Return room for the result of a line; without blocks, the sums are the rows."""
    order, row, sum_ = (np.empty(line.size, np.int32) for _ in range(3))
    rows, sum_rows = np.empty_like(line), np.empty_like(line)
    return SortedIds(order, row, rows, *((sum_, sum_rows) if by_blocks else (row, rows)))


def take(lines: Sequence[Take]) -> None:
    """Write lines of numbers that are taken from other arrays; see `host_reference.take`."""
    tasks = []
    for out, source, index, rest in lines:
        n = source.size if index is None else index.size
        assert out.dtype == source.dtype
        assert n <= out.size
        fill = np.array(rest, out.dtype).view(f"i{out.itemsize}").item()
        at = _NOTHING if index is None else _address(index, np.int32)
        tasks.append((out.itemsize, _address(out), out.size, _address(source), at, n, 0, fill))
    _run("take", tasks, sum(line.out.size for line in lines))


def put(lines: Sequence[Put]) -> None:
    """Write lines of numbers that are put to given positions; see `host_reference.put`."""
    tasks = []
    for out, order, place, run, rest in lines:
        n = order.size
        arrays = _address(order, np.int32), _address(run, np.int32, n), _address(place, np.int32)
        tasks.append((_address(out, np.int32), out.size, *arrays, n, rest))
    _run("put", tasks, sum(line.out.size for line in lines))


def put_pieces(out: np.ndarray, lines: Sequence[np.ndarray], pieces: Pieces, rest: int) -> None:
    """Write pieces of lines next to each other; see `host_reference.put_pieces`."""
    number, begin, end, minus = (numbers.reshape(-1) for numbers in pieces)
    sizes = np.array([line.size for line in lines])[number]
    assert out.strides[2] == out.itemsize
    assert ((begin >= 0) & (begin <= end) & (end <= sizes) & (end - begin <= out.shape[2])).all()
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
    given, results = (_address(keys, np.uint64), keys.size), (distinct, positions, first)
    ((*_, size),) = _run("distinct_keys", [(*given, *map(_address, results), 0)], keys.size)
    return DistinctKeys(distinct[:size], positions, first[:size])


def split_by_row(positions: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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
    if not _function(name)(array.ctypes.data, len(tasks), threads):
        raise MemoryError(f"no memory to {name} {ids} ids")
    return array


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def _function(name: str) -> Any:
    """Return a function of the library; ctypes releases the GIL while it runs."""
    function = getattr(ctypes.CDLL(str(cpu.load().path)), f"tpu_embed_host_{name}")
    function.argtypes = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64
    function.restype = ctypes.c_bool
    return function

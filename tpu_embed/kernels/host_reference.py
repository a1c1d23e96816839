"""Work on a batch's ids before it is sent: sort them, and write numbers in the order that results.

Everything here runs on the host, in NumPy. `host_native` does the same in C++. Both work on several
lines at once: one line of ids per replica or owner, one line of results per device.

For example, a line with the rows 13 4 -1 13 7 is sorted to

    order      1 4 0 3       the ids that are present, by row; equal rows in batch order
    rows       4 7 13        the distinct rows
    row        0 1 2 2       the distinct row of each sorted id

Input: NumPy arrays. Output: NumPy arrays, the same bits from both implementations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class SortedIds(NamedTuple):
    """The present ids of one line, sorted by row.

    Attributes:
      order: int32 `[n]`, their positions in the line; equal rows are in the order of the line.
      row: int32 `[n]`, the place of each one's row in `rows`.
      rows: `[u]`, the distinct rows, ascending.
      sum: int32 `[n]`, the place of each one's partial sum in `sum_rows`.
      sum_rows: `[p]`, the row of each partial sum, ascending; of one row, in order of the blocks.
    """

    order: np.ndarray
    row: np.ndarray
    rows: np.ndarray
    sum: np.ndarray
    sum_rows: np.ndarray


class Take(NamedTuple):
    """One line to write: `out[i] = source[index[i]]`, and the rest of it filled.

    Attributes:
      out: `[size]`, contiguous, of 4 or 8 bytes per number.
      source: an array of the same dtype.
      index: int32 `[n]`, n ≤ size, positions in `source`; None for 0, 1, 2, … to its end.
      rest: the value of `out[n:]`.
    """

    out: np.ndarray
    source: np.ndarray
    index: np.ndarray | None
    rest: int


class Put(NamedTuple):
    """One line to write: `out[order[i]] = place[run[i]]`, and the rest of it filled.

    Attributes:
      out: int32 `[size]`, contiguous.
      order: int32 `[n]`, different positions in `out`.
      place: int32 `[u]`.
      run: int32 `[n]`, positions in `place`.
      rest: the value of what `order` does not name.
    """

    out: np.ndarray
    order: np.ndarray
    place: np.ndarray
    run: np.ndarray
    rest: int


def sort_ids(
    row_ids: Sequence[np.ndarray], blocks: Sequence[np.ndarray] | None = None
) -> list[SortedIds]:
    """Sort the ids of every line by row.

    Args:
      row_ids: by line, `[N]`, negative for absent ids; of one dtype, int32 or int64.
      blocks: by line, int32 `[N]`, the block of each id's example; in one row, present ids have
        non-decreasing blocks. None: the ids of a line are in one block.
    """
    if blocks is None:
        return [_sort_line(line, None) for line in row_ids]
    return [_sort_line(line, block) for line, block in zip(row_ids, blocks, strict=True)]


def take(lines: Sequence[Take]) -> None:
    """Write lines of numbers that are taken from other arrays."""
    for out, source, index, rest in lines:
        n = source.size if index is None else index.size
        out[:n] = source if index is None else source[index]
        out[n:] = rest


def put(lines: Sequence[Put]) -> None:
    """Write lines of numbers that are put to given positions."""
    for out, order, place, run, rest in lines:
        out.fill(rest)
        out[order] = place[run]


def _sort_line(row_ids: np.ndarray, blocks: np.ndarray | None) -> SortedIds:
    order = _stable_order(row_ids)
    order = order[np.count_nonzero(row_ids < 0) :]
    ordered = row_ids[order]
    new_row = _changes(ordered)
    row, rows = _numbered(new_row), ordered[new_row]
    if blocks is None:
        return SortedIds(order, row, rows, row, rows)
    new_sum = new_row | _changes(blocks[order])
    return SortedIds(order, row, rows, _numbered(new_sum), ordered[new_sum])


def _stable_order(keys: np.ndarray) -> np.ndarray:
    """Return the positions of `keys` in ascending order, equal keys in order, int32 `[N]`."""
    if keys.dtype.itemsize > 4:
        return np.argsort(keys, kind="stable").astype(np.int32)
    # NumPy sorts integers much faster than it sorts their positions: sort key · 2³² + position.
    both = (keys.astype(np.int64) << 32) | np.arange(keys.size)
    both.sort()
    return both.astype(np.int32)


def _changes(x: np.ndarray) -> np.ndarray:
    """Tell, bool `[n]`, where an entry differs from the one before it; True for the first."""
    return np.concatenate([np.ones(min(1, x.size), bool), x[1:] != x[:-1]])


def _numbered(new: np.ndarray) -> np.ndarray:
    """Return the number of the run of each entry, from 0, given where runs begin; int32 `[n]`."""
    return np.cumsum(new, dtype=np.int32) - np.int32(1)

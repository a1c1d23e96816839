"""Work on a batch's ids before it is sent: sort them by row.

A route is numbers that are written in the order of the sorted ids (`take`, `put`). Everything here
runs on the host, in NumPy; `host_native` does the same in C++. Both work on several lines at once:
one line of ids per replica or owner, one line of results per device.

For example, a line with the rows 13 4 -1 13 7 is sorted to

    order      1 4 0 3       the ids that are present, by row; equal rows in the order of the line
    rows       4 7 13        the distinct rows
    row        0 1 2 2       the distinct row of each sorted id

Input: NumPy arrays. Output: NumPy arrays, the same bits from both implementations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tpu_embed._types import PADDING_ID


class SortedIds(NamedTuple):
    """The present ids of one line, sorted by row.

    Attributes:
      order: int32 `[n]`, their positions in the line; ids of one row are sorted by block, those of
        one block are in the order of the line.
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


class Pieces(NamedTuple):
    """Pieces of lines, `[devices, S]` each: piece (d, s) is `lines[line][begin:end] - minus`.

    Attributes:
      line: the number of the line.
      begin: where the piece begins.
      end: where it ends.
      minus: what is subtracted from its numbers.
    """

    line: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    minus: np.ndarray


def sort_ids(
    row_ids: Sequence[np.ndarray], blocks: Sequence[np.ndarray] | None = None
) -> list[SortedIds]:
    """Sort the ids of every line by row.

    Args:
      row_ids: by line, `[N]`, negative for absent ids; of one dtype, int32 or int64.
      blocks: by line, int32 `[N]`, not negative, the block of each id's example; the ids of one row
        are sorted by block. None: the ids of a line are in one block.
    """
    if blocks is None:
        return [_sort_line(line, None) for line in row_ids]
    return [
        _sort_line(line, block) for line, block in zip(row_ids, blocks, strict=True)
    ]


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


def put_pieces(
    out: np.ndarray, lines: Sequence[np.ndarray], pieces: Pieces, rest: int
) -> None:
    """Write pieces of lines next to each other.

    For example, the line 4 7 13 has 4 and 7 in shard 0 and 13 in shard 1, whose first row is 10:
    with the pieces [0:2] - 0 and [2:3] - 10, C = 3 and the rest -1, `out` is 4 7 -1 | 3 -1 -1.

    Args:
      out: `[devices, S, C]`, contiguous in its last axis; piece (d, s) is written to `out[d, s]`.
      lines: the lines, of one dtype, which is that of `out`.
      pieces: no longer than C.
      rest: the value of what a piece leaves of its C numbers.
    """
    for place in np.ndindex(*out.shape[:2]):
        line, begin, end, minus = (int(numbers[place]) for numbers in pieces)
        piece = lines[line][begin:end]
        np.subtract(piece, piece.dtype.type(minus), out=out[place][: piece.size])
        out[place][piece.size :] = rest


def _sort_line(row_ids: np.ndarray, blocks: np.ndarray | None) -> SortedIds:
    order = _stable_order(row_ids)
    if blocks is not None:  # by block first, then stably by row
        by_block = _stable_order(blocks)
        order = by_block[_stable_order(row_ids[by_block])]
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


class DistinctKeys(NamedTuple):
    """The keys that some keys are, each once, in order of first appearance.

    Keys 7 5 7 give the distinct keys 7 5, the positions 0 1 0 and the first places 0 1.

    Attributes:
      keys: uint64 `[m]`.
      positions: int32 `[n]`, where each given key is among them.
      first: int64 `[m]`, where each of them is first among the given keys.
    """

    keys: np.ndarray
    positions: np.ndarray
    first: np.ndarray


def distinct_keys(keys: np.ndarray) -> DistinctKeys:
    """Return each of some keys once, given uint64 `[n]`."""
    sorted_keys, first, inverse = np.unique(
        keys, return_index=True, return_inverse=True
    )
    order = np.argsort(first)
    position = np.empty(order.size, np.int32)
    position[order] = np.arange(order.size)
    return DistinctKeys(sorted_keys[order], position[inverse.reshape(-1)], first[order])


def split_by_row(
    positions: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Split what a feature looks up: rows of keys that have one, and places of keys without.

    With rows 8 -1 3, positions 0 1 -1 1 0 have the known row 8, and first at 1 a key without a row.

    Args:
      positions: int32 `[n]`, positions in `rows`; -1 is padding.
      rows: int32 `[m]`, -1 for keys without a row.

    Returns:
      int32 `[k]`, the rows of those positions that occur, in the order in which they first do;
      int64 `[a]`, the indices in `positions` at which keys without a row occur first.
    """
    occurring, first = np.unique(positions, return_index=True)
    first = np.sort(first[occurring >= 0])
    there = rows[positions[first]] >= 0
    return rows[positions[first[there]]], first[~there]


def are_among(keys: np.ndarray, some: np.ndarray) -> np.ndarray:
    """Return which keys, uint64 `[n]`, are among some others, uint64 `[m]`; bool `[n]`."""
    return np.isin(keys, some)


def rows_at(rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the rows at positions, -1 where the position is -1; int32 `[n]`, as both are."""
    return np.append(rows, np.int32(PADDING_ID))[positions]

"""Which shard of a table has which rows, and a copy of rows from one place to another.

Whatever holds rows is read by a function of row ids, `read(ids) -> {part: [n, …]}`, and written by
`write(ids, rows)`: the devices (`DeviceRows`), rows at home (`HostRows`), files of a checkpoint.
The parts are the values of a row and its part of each slot (`Field.part`), as they are stored.

Input: row ids, as an array or a Python `range`. Output: local rows by shard; or rows elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tpu_embed.core.layout import Stack, TableSlice

BLOCK = 2**22
"""Bytes that are copied at a time, and the unit of files."""

Ids = np.ndarray | range
"""Row ids, int64 `[n]` and all different; or a range of them."""

Rows = Mapping[str, np.ndarray]
"""Rows as they are stored, `[n, …]` by part."""


class Grid(NamedTuple):
    """Where the rows of a table are: row r is row r // S of shard r mod S, or r mod n of r // n.

    Attributes:
      shards: S.
      size: n, the rows of a shard.
      alternate: whether rows alternate between the shards (MOD); otherwise a shard has a contiguous
        range (DIV).
    """

    shards: int
    size: int
    alternate: bool

    @classmethod
    def of(cls, stack: Stack, table: TableSlice) -> Grid:
        """Return the grid of a table in its stack."""
        return cls(stack.num_shards, table.rows_per_shard, stack.placement != "div")

    def ids(self, shards: Sequence[int], first: int, last: int) -> Ids:
        """Return the ids of the local rows `[first, last)` of some shards, ascending."""
        if self.alternate and len(shards) == self.shards:
            return range(first * self.shards, last * self.shards)
        if len(shards) == 1:
            start, step = (shards[0], self.shards) if self.alternate else (shards[0] * self.size, 1)
            return range(start + first * step, start + last * step, step)
        lines, some = np.arange(first, last), np.asarray(shards, np.int64)
        if self.alternate:  # [n, 1] · S + [k]: line after line
            return (lines[:, None] * self.shards + some).reshape(-1)
        return (some[:, None] * self.size + lines).reshape(-1)

    def cut(self, ids: Ids) -> Iterator[tuple[int, Any, Any]]:
        """Yield a shard, its local rows, ascending, and their places in `ids`, for each shard.

        Of a range both are slices, so that no row is copied one by one:

            2 shards of 3 rows, range(1, 5)     MOD  0: rows 1:3 at 1::2    1: rows 0:2 at 0::2
                                                DIV  0: rows 1:3 at 0:2     1: rows 0:2 at 2:4
        """
        if not isinstance(ids, range):
            yield from self._cut_array(ids)
        elif self.alternate:
            # Every so many ids of the range are on the same shard.
            every = self.shards // math.gcd(self.shards, ids.step)
            for k in range(min(every, len(ids))):
                some, step = ids[k::every], ids.step * every // self.shards
                local = slice(some[0] // self.shards, some[-1] // self.shards + 1, step)
                yield some[0] % self.shards, local, slice(k, None, every)
        else:
            at = 0
            while at < len(ids):
                shard, first = divmod(ids[at], self.size)
                n = min(len(ids) - at, -(-(self.size - first) // ids.step))
                local = slice(first, first + (n - 1) * ids.step + 1, ids.step)
                yield shard, local, slice(at, at + n)
                at += n

    def _cut_array(self, ids: np.ndarray) -> Iterator[tuple[int, Any, Any]]:
        # The place of each id in shard after shard: shard · n + local row.
        place = ids % self.shards * self.size + ids // self.shards if self.alternate else ids
        order = np.argsort(place, kind="stable")
        bounds = np.searchsorted(place[order], np.arange(self.shards + 1) * self.size)
        for i in np.flatnonzero(np.diff(bounds)).tolist():
            at = order[bounds[i] : bounds[i + 1]]
            yield i, _as_slice(place[at] - i * self.size), _as_slice(at)


def _as_slice(numbers: np.ndarray) -> Any:
    """Return numbers that follow each other as a slice, others as they are."""
    first, last = numbers[0], numbers[-1]
    run = last - first + 1 == numbers.size and (np.diff(numbers) == 1).all()
    return slice(int(first), int(last) + 1) if run else numbers


def copy_rows(
    read: Callable[[Any], Rows], write: Callable[[Any, Rows], None], blocks: Iterable[Any]
) -> None:
    """Copy rows, block by block, so that little memory is needed.

    Args:
      read: returns the rows of ids.
      write: takes ids and their rows.
      blocks: the ids of each block; or pairs, the ids in the source and those in the sink.
    """
    for block in blocks:
        before, now = block if isinstance(block, tuple) else (block, block)
        write(now, read(before))


def pieces(n: int, size: int) -> Iterator[slice]:
    """Yield the places of n rows, so many at a time."""
    for first in range(0, n, size):
        yield slice(first, min(first + size, n))


def blocks_of(ids: Ids, size: int) -> Iterator[Ids]:
    """Yield so many ids at a time."""
    return (ids[at] for at in pieces(len(ids), size))


def below(ids: Ids, limit: int) -> Ids:
    """Return those of ascending ids that are below a limit."""
    if isinstance(ids, range):
        return ids[: len(range(ids.start, limit, ids.step))]
    return ids[ids < limit]

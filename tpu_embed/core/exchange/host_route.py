"""Compute routes on the host: where each id's row comes back, and the order in which sums are made.

The host knows all ids of a batch before a device sees them. It sorts the ids of each replica by row
once, and everything else follows from that order:

- the distinct rows are what the replica asks the owner shards for;
- the partial sums are the distinct (row, block) pairs: a row's gradients are summed within each
  block of the batch;
- at the owner, the partial sums of all replicas for one row are merged, in the order of the blocks.

For example, S = 2 shards of R = 10 rows, and a replica with the rows 13 4 -1 13 7:

    order      1 4 0 3       the ids that are present, by row; equal rows in batch order
    rows       4 7 13        the distinct rows
    row        0 1 2 2       the distinct row of each sorted id
    places     0 1 2         in a send buffer of C = 2 rows per shard: shard * C + rank

`device_route.py` gives the same numbers where the ids are known only on the device.

Input: NumPy arrays of physical rows. Output: NumPy arrays of positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tpu_embed.core.layout import MeshAxes, Stack


class SortedIds(NamedTuple):
    """The present ids of one stack on one replica (or one owner), sorted by row.

    Attributes:
      order: int32 `[n]`, their positions in the batch; equal rows are in batch order.
      row: int32 `[n]`, the place of each one's row in `rows`.
      rows: `[u]`, the distinct physical rows, ascending.
      sum: int32 `[n]`, the place of each one's partial sum in `sum_rows`.
      sum_rows: `[p]`, the row of each partial sum, ascending; of one row, in order of the blocks.
    """

    order: np.ndarray
    row: np.ndarray
    rows: np.ndarray
    sum: np.ndarray
    sum_rows: np.ndarray


def sort_ids(row_ids: np.ndarray, blocks: np.ndarray | None) -> SortedIds:
    """Sort the ids of one replica by row.

    Args:
      row_ids: `[N]`, negative for absent ids.
      blocks: integer `[N]`, the block of each id's example, non-decreasing among the present ids;
        None: all are in one block.
    """
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


def bounds(rows: np.ndarray, stack: Stack) -> np.ndarray:
    """Return where the rows of each shard begin among ascending rows, int `[S + 1]`."""
    shards = np.arange(stack.num_shards + 1, dtype=np.int64) * stack.num_rows
    return np.searchsorted(rows, shards)


def places(rows: np.ndarray, stack: Stack, capacity: int) -> np.ndarray:
    """Return each row's place in a buffer `[S * C]`, int32: shard · C + its rank in the shard.

    Args:
      rows: `[u]` physical rows, ascending.
      stack: the stack.
      capacity: C, the rows that the buffer has room for per shard.
    """
    first, number = bounds(rows, stack)[:-1], np.arange(rows.size)
    shard = rows // stack.num_rows
    return (shard * capacity + number - first[shard]).astype(np.int32)


class Merge(NamedTuple):
    """How one owner shard merges the partial sums that it gets from all replicas.

    Attributes:
      source: int32 `[p]`, the replica that each is from, in the order in which they are added.
      rank: int32 `[p]`, its number among those that this replica sends to the shard.
      total: int32 `[p]`, the merged sum that each is added to, ascending.
      row_ids: `[u]`, the local row of each merged sum, ascending.
    """

    source: np.ndarray
    rank: np.ndarray
    total: np.ndarray
    row_ids: np.ndarray


def merge_sums(sum_rows: Sequence[np.ndarray], stack: Stack, shard: int) -> Merge:
    """Merge what the replicas send to one shard.

    Args:
      sum_rows: by replica, in batch order: the physical rows of its partial sums, ascending.
      stack: the stack.
      shard: the owner.
    """
    pieces = [bounds(rows, stack)[shard : shard + 2] for rows in sum_rows]
    mine = [rows[first:last] for rows, (first, last) in zip(sum_rows, pieces, strict=True)]
    sizes = [last - first for first, last in pieces]
    source = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    rank = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
    merged = sort_ids(np.concatenate(mine) - shard * stack.num_rows, None)
    return Merge(source[merged.order], rank[merged.order], merged.row, merged.rows)


def parcels(axes: MeshAxes, stack: Stack, shard: int) -> np.ndarray:
    """Return the place of each replica's parcel among those that an owner receives, `[replicas]`.

    Parcels arrive as `[rest, S]`: from S devices along the shard axes (an all-to-all), gathered
    over the batch axes that do not split the rows (an all-gather). Along an axis that splits the
    rows but not the batch, all devices hold the same ids; only the one at the owner's coordinate
    counts.
    """
    arrival = (*axes.other_batch_axes(stack.shard_axes), *stack.shard_axes)
    sizes = [axes.mesh.shape[name] for name in arrival]
    batch = [axes.mesh.shape[name] for name in axes.batch_axes]
    of_replica = np.unravel_index(np.arange(axes.replicas), batch or [1])
    of_owner = np.unravel_index(shard, [axes.mesh.shape[n] for n in stack.shard_axes] or [1])
    part = np.zeros(axes.replicas, np.int64)
    for name, size in zip(arrival, sizes, strict=True):
        if name in axes.batch_axes:
            coordinate = of_replica[axes.batch_axes.index(name)]
        else:
            coordinate = of_owner[stack.shard_axes.index(name)]
        part = part * size + coordinate
    return part

"""The arithmetic of routes on the host, for `core/place/`, which makes them.

A route says where each id's row comes back, and the order in which sums are made.

The host knows all ids of a batch before a device sees them. It sorts the ids of each replica by row
once, and everything else follows from that order:

- the distinct rows are what the replica asks the owner shards for;
- the partial sums are the distinct (row, block) pairs: a row's gradients are summed within each
  block of the batch;
- at the owner, the partial sums of all replicas for one row are merged, in the order of the blocks.

For example, S = 2 shards of R = 10 rows, and a replica with the rows 13 4 -1 13 7:

    order      1 4 0 3       the ids that are present, by row; equal rows in the order of the line
    rows       4 7 13        the distinct rows
    row        0 1 2 2       the distinct row of each sorted id
    places     0 1 2         in a send buffer of C = 2 rows per shard: shard * C + rank

`route.py` gives the same numbers where the ids are known only on the device.

Input: NumPy arrays of physical rows. Output: NumPy arrays of positions.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np

from tpu_embed.core.layout import MeshAxes, Stack
from tpu_embed.kernels.dispatch import host_kernels
from tpu_embed.kernels.host_reference import SortedIds


def bounds(lines: Sequence[np.ndarray], stack: Stack) -> np.ndarray:
    """Return where the rows of each shard begin on every line, int `[lines, S + 1]`.

    Args:
      lines: rows, ascending, all of one dtype.
      stack: the stack.
    """
    found = np.empty((len(lines), stack.num_shards + 1), np.int64)
    for at, rows in zip(found, lines, strict=True):
        # The first rows have the rows' dtype (the end of the last shard may not fit it): otherwise
        # NumPy converts all rows to a common one before it searches.
        firsts = np.arange(stack.num_shards, dtype=rows.dtype) * rows.dtype.type(stack.num_rows)
        at[:-1], at[-1] = rows.searchsorted(firsts), rows.size
    return found


def places(at: np.ndarray, capacity: int) -> np.ndarray:
    """Return each row's place in a buffer `[S * C]`, int32: shard · C + its rank in the shard.

    Args:
      at: int `[S + 1]`, where the rows of each shard begin among ascending rows.
      capacity: C, the rows that the buffer has room for per shard.
    """
    # The rows of one shard are adjacent, so place - number is one constant for each shard.
    shift = np.arange(at.size - 1) * capacity - at[:-1]
    return np.arange(at[-1], dtype=np.int32) + shift.astype(np.int32).repeat(at[1:] - at[:-1])


def merge_sums(sum_rows: Sequence[np.ndarray], at: np.ndarray) -> list[SortedIds]:
    """Return the partial sums that each shard gets from all replicas, sorted by physical row.

    Args:
      sum_rows: by replica, in batch order: the physical rows of its partial sums, ascending.
      at: int `[replicas, S + 1]`, where those of each shard begin.
    """
    # A parcel is what one replica sends to one shard; those for one shard are joined. A plain slice
    # is faster than `np.split`.
    received = [
        np.concatenate([line[i:j] for line, i, j in zip(sum_rows, begins, ends, strict=True)])
        for begins, ends in itertools.pairwise(at.T.tolist())
    ]
    return host_kernels().sort_ids(received)


@functools.cache
def parcel_places(axes: MeshAxes, shard_axes: tuple[str, ...]) -> np.ndarray:
    """Return where each replica's parcel is among those that each owner receives, `[S, replicas]`.

    Parcels arrive as `[rest, S]`: from S devices along the shard axes (an all-to-all), gathered
    over the batch axes that do not split the rows (an all-gather). Along an axis that splits the
    rows but not the batch, all devices hold the same ids; only the one at the owner's coordinate
    counts.
    """
    # On a mesh of x = 2 and y = 3 that both split the batch, with rows split over x, parcels arrive
    # as [y, x]: that of replica (x, y) is at 2 y + x, for every owner.
    arrival = (*axes.other_batch_axes(shard_axes), *shard_axes)
    sizes = [axes.mesh.shape[name] for name in arrival]
    batch = [axes.mesh.shape[name] for name in axes.batch_axes]
    rows = [axes.mesh.shape[name] for name in shard_axes]
    of_replica = np.unravel_index(np.arange(axes.replicas), batch or [1])
    of_owner = np.unravel_index(np.arange(axes.size(shard_axes)), rows or [1])
    part = np.zeros((axes.size(shard_axes), axes.replicas), np.int64)
    for name, size in zip(arrival, sizes, strict=True):
        if name in axes.batch_axes:
            coordinate = of_replica[axes.batch_axes.index(name)]
        else:
            coordinate = of_owner[shard_axes.index(name)][:, None]
        part = part * size + coordinate
    return part

"""One stack of a batch on the host: its ids, and the order that every route follows from.

The ids of each replica are sorted by row once. The distinct rows are what the replica asks the
shards for; the partial sums, one for each row and block of the batch, are what it sends them.

Input: the packed ids of this process's replicas. Output: `HostStack`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tpu_embed.core.batch import StackView
from tpu_embed.core.exchange import host_route
from tpu_embed.core.place.packing import StackIds
from tpu_embed.kernels.dispatch import host_kernels
from tpu_embed.kernels.host_reference import SortedIds


class HostStack(NamedTuple):
    """One stack of a batch on the host.

    Attributes:
      ids: the ids of this process's replicas.
      replicas: the sorted ids of each of these replicas.
      rows_at: int `[replicas, S + 1]`, where the distinct rows of each shard begin.
      sums_at: int `[replicas, S + 1]`, where the partial sums of each shard begin.
      numbers: the numbers of these replicas in the global batch.
      row_splits: by jagged feature, int32 `[replicas, B/S + 1]`.
      owners: how every shard merges what it gets; () if the host does not know the whole batch.
    """

    ids: StackIds
    replicas: tuple[SortedIds, ...]
    rows_at: np.ndarray
    sums_at: np.ndarray
    numbers: np.ndarray
    row_splits: dict[int, np.ndarray]
    owners: tuple[host_route.Merge, ...]


class Devices(NamedTuple):
    """What this process's devices hold of a stack.

    Attributes:
      replica: int `[devices]`, whose ids each device has: a number among this process's replicas.
      shard: int `[devices]`, which shard each device owns.
    """

    replica: np.ndarray
    shard: np.ndarray

    @classmethod
    def of(cls, view: StackView) -> Devices:
        """Return what the devices hold of a stack, in the order of the mesh."""
        axes = view.layout.axes
        mine, replicas = axes.local_parts(axes.names), axes.local_parts(axes.batch_axes)
        replica = np.searchsorted(replicas, axes.parts_of_devices(axes.batch_axes)[mine])
        return cls(replica, axes.parts_of_devices(view.stack.shard_axes)[mine])


def sort_stack(
    ids: StackIds, view: StackView, replicas: np.ndarray, row_splits: dict[int, np.ndarray]
) -> HostStack:
    """Sort the ids of one stack by row, on every replica.

    Args:
      ids: the ids.
      view: the stack.
      replicas: the numbers of this process's replicas in the global batch.
      row_splits: of its jagged features.
    """
    stack, axes = view.stack, view.layout.axes
    # One device that sorts the ids itself: nothing is exchanged.
    if stack.num_shards == 1 and axes.replicas == 1 and not view.is_routed:
        nowhere = np.zeros((0, 2), np.int64)
        return HostStack(ids, (), nowhere, nowhere, replicas, row_splits, ())
    ordered = host_kernels().sort_ids(ids.row_ids, ids.blocks)
    rows_at = sums_at = host_route.bounds([one.rows for one in ordered], stack)
    if ids.blocks is not None:
        sums_at = host_route.bounds([one.sum_rows for one in ordered], stack)
    merges = ()
    if view.merges_on_host:
        merges = tuple(host_route.merge_sums([one.sum_rows for one in ordered], sums_at))
    return HostStack(ids, tuple(ordered), rows_at, sums_at, replicas, row_splits, merges)


def bags_of(ids: StackIds, view: StackView) -> np.ndarray:
    """Return the bag of every id, int32 `[replicas, N]`."""
    bags = view.bags.dense_bags(np) if ids.bags is None else ids.bags
    return np.broadcast_to(bags, ids.row_ids.shape)


def ids_at(host: HostStack) -> np.ndarray:
    """Return where the ids of each shard begin among the sorted ids, int `[replicas, S + 1]`."""
    pairs = zip(host.replicas, host.rows_at.astype(np.int32), strict=True)
    return np.array([one.row.searchsorted(at) for one, at in pairs])

"""Write the route of an update: the order of its sums, on the replicas and at the owners.

A row's gradients are summed in batch order within each block of the batch, on the device that has
the block's examples. These partial sums go to the row's owner, which adds them in the order of the
blocks. So every device carries two orders: that of its ids, sorted by the partial sum that each is
added to, and, as an owner, that of the partial sums that arrive, sorted by row.

Input: the sorted ids of all replicas. Output: the fields `sum_index` to `merged` of a line.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tpu_embed._types import PADDING_ID
from tpu_embed.core.batch.packing import StackIds
from tpu_embed.core.batch.stack_view import StackView
from tpu_embed.core.exchange import host_route
from tpu_embed.core.exchange.host_route import Merge, SortedIds


class HostStack(NamedTuple):
    """One stack of a batch on the host.

    Attributes:
      ids: the ids of this process's replicas.
      replicas: the sorted ids of each of these replicas.
      numbers: the numbers of these replicas in the global batch.
      owners: how every shard merges what it gets; () if the host does not know the whole batch.
    """

    ids: StackIds
    replicas: tuple[SortedIds, ...]
    numbers: np.ndarray
    owners: tuple[Merge, ...]


def bags_of(ids: StackIds, view: StackView) -> np.ndarray:
    """Return the bag of every id, int32 `[replicas, N]`, or `[N]` in a dense stack."""
    return view.dense_bags(np) if ids.bags is None else ids.bags


def blocks_of(ids: StackIds, view: StackView, replicas: np.ndarray) -> np.ndarray | None:
    """Return the block of the global batch that each id's example is in, int `[replicas, N]`.

    None, where the examples of a device are in one block.
    """
    layout, spec = view.layout, view.spec
    batch = spec.local_batch * layout.axes.replicas
    if layout.blocks_per_device(batch) == 1:
        return None
    # Number of an example in the global batch -> its block, see `Layout.blocks`. The examples of
    # padding, one past the last, may lie beyond the last block; nobody reads their blocks.
    examples = np.arange(spec.local_batch + 1)
    numbers = replicas[:, None] * spec.local_batch + examples
    block = (numbers * layout.blocks(batch) // batch).astype(np.int32)
    if ids.bags is not None:
        return np.take_along_axis(block, ids.bags // view.bags_per_example, axis=1)
    # Dense: [replicas, examples] -> every example as often as it has columns.
    found = np.repeat(block[:, :-1], max(1, sum(view.columns)), axis=1)
    return found[:, : view.num_ids]


def write_update(
    out: dict[str, np.ndarray],
    view: StackView,
    host: HostStack,
    replica: np.ndarray,
    shard: np.ndarray,
) -> None:
    """Write the fields of an update.

    Args:
      out: the fields of this process's devices, each `[devices, …]`.
      view: the stack.
      host: its ids.
      replica: int `[devices]`, which of the replicas of `host` each device has.
      shard: int `[devices]`, which shard each device owns.
    """
    if view.way == "gather":
        _write_gathered(out, view, host, shard)
        return
    if view.way == "psum":
        _write_cells(out, view, host, replica)
        return
    stack, parcel = view.stack, max(1, view.room.partials)
    bags = np.broadcast_to(bags_of(host.ids, view), host.ids.row_ids.shape)
    sums = [host_route.places(one.sum_rows, stack, parcel)[one.sum] for one in host.replicas]
    orders = [one.order for one in host.replicas]
    _write_sums(out, host.ids, bags, orders, sums, stack.num_shards * parcel, replica)
    if "merged" in out:
        _write_merge(out, view, host, shard)


def _write_sums(
    out: dict[str, np.ndarray],
    ids: StackIds,
    bags: np.ndarray,
    orders: list[np.ndarray],
    sums: list[np.ndarray],
    absent: int,
    replica: np.ndarray,
) -> None:
    """Write bag, sum and weight of every replica's ids, sorted by their sums.

    Args:
      out: the fields of this process's devices.
      ids: the ids.
      bags: int32 `[replicas, N]`.
      orders: by replica, the positions of its ids, sorted.
      sums: by replica, the sum of each.
      absent: the number of no sum.
      replica: which replica each device has.
    """
    for name, fill in (("sum_index", 0), ("sum_segments", absent), ("sum_weights", 0)):
        if name in out:
            out[name].fill(fill)
    for d, r in enumerate(replica):
        order = orders[r]
        out["sum_index"][d, : order.size] = bags[r][order]
        out["sum_segments"][d, : order.size] = sums[r]
        if "sum_weights" in out:
            assert ids.weights is not None, "weighted stacks have weights"
            out["sum_weights"][d, : order.size] = ids.weights[r][order]


def _write_cells(
    out: dict[str, np.ndarray], view: StackView, host: HostStack, replica: np.ndarray
) -> None:
    """Write the route to the cells of a psum: row r in block b is cell b · R + r."""
    rows, numbers = view.stack.num_rows, host.ids.row_ids
    blocks = blocks_of(host.ids, view, host.numbers)
    if blocks is None:
        batch, local = view.global_batch, view.spec.local_batch
        blocks = (host.numbers * local * view.blocks // batch).astype(np.int32)[:, None]
    cells = np.where(numbers < 0, PADDING_ID, numbers + blocks * rows).astype(np.int32)
    by_cell = [host_route.sort_ids(line, None) for line in cells]
    bags = np.broadcast_to(bags_of(host.ids, view), numbers.shape)
    sums = [one.rows[one.row] for one in by_cell]
    orders = [one.order for one in by_cell]
    _write_sums(out, host.ids, bags, orders, sums, view.blocks * rows, replica)
    if "merged" in out:
        touched = host.owners[0].row_ids
        out["merged"].fill(PADDING_ID)
        out["merged"][:, touched] = touched


def _write_merge(
    out: dict[str, np.ndarray], view: StackView, host: HostStack, shard: np.ndarray
) -> None:
    """Write how every owner merges what it receives; devices with copies of a shard do the same."""
    stack, parcel = view.stack, max(1, view.room.partials)
    for owner in np.unique(shard):
        merge = host.owners[owner]
        places = host_route.parcels(view.layout.axes, stack, owner)
        index = (places * parcel).astype(np.int32)[merge.source] + merge.rank
        for d in np.flatnonzero(shard == owner):
            _fill(out, d, "merge_index", index, 0)
            _fill(out, d, "merge_segments", merge.total, view.num_merged)
            _fill(out, d, "merged", merge.row_ids, PADDING_ID)


def _write_gathered(
    out: dict[str, np.ndarray], view: StackView, host: HostStack, shard: np.ndarray
) -> None:
    """Write, for every owner, its entries of the global batch: their bags, sums and rows."""
    ids, stack, axes = host.ids, view.stack, view.layout.axes
    # Bags become numbers of the global batch: bag 2 of replica 3 is 3 · (bags per device) + 2.
    bags = bags_of(ids, view) + (np.arange(axes.replicas) * view.bag_layout.bags)[:, None]
    blocks = blocks_of(ids, view, host.numbers)
    if blocks is None:
        blocks = np.arange(axes.replicas)[:, None]
    blocks = np.broadcast_to(blocks, ids.row_ids.shape)
    for d, owner in enumerate(shard):
        mine = ids.row_ids // stack.num_rows == owner
        one = host_route.sort_ids(ids.row_ids[mine], blocks[mine])
        by_sum = host_route.sort_ids(one.sum_rows, None)
        _fill(out, d, "sum_index", bags[mine][one.order], 0)
        _fill(out, d, "sum_segments", one.sum, view.num_partials)
        if "sum_weights" in out:
            assert ids.weights is not None, "weighted stacks have weights"
            _fill(out, d, "sum_weights", ids.weights[mine][one.order], 0)
        _fill(out, d, "merge_segments", by_sum.row, view.num_merged)
        _fill(out, d, "merged", by_sum.rows - owner * stack.num_rows, PADDING_ID)


def _fill(out: dict[str, np.ndarray], d: int, name: str, values: np.ndarray, rest: int) -> None:
    """Write the values of one device's field, and `rest` after them."""
    if name in out:
        out[name][d, : values.size] = values
        out[name][d, values.size :] = rest

"""Sum gradients by row: per block on the examples' device, then over the blocks on the owner.

Floating-point sums depend on their order, and the result must not depend on the number of devices.
So the global batch is split into G contiguous blocks. A row's gradients are summed feature after
feature within each block; these partial sums are added in the order of the blocks.

Where the host has routed a batch, the device that has a block's examples makes the partial sums and
sends each to its row's owner. Of ids that it has not routed, every owner gets all ids and all
gradients of bags, and makes the sums of its own rows: that moves a gradient per bag, not per id.

Input: one device's ids of a stack, and the gradients of its activations. Output: partial sums at
their rows' owners, with the order to merge them in; or what a compiled kernel needs to make them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.batch import LocalIds, StackView, gather, gather_ids
from tpu_embed.core.exchange import (
    MergeRoute,
    RowSums,
    SumRoute,
    collectives,
    device_route,
    number_runs,
    route,
)
from tpu_embed.core.layout import Layout, Stack, sent_sums_format
from tpu_embed.core.lookup import sum_gradients
from tpu_embed.kernels import dispatch, storage
from tpu_embed.kernels.formats import RowFormat
from tpu_embed.kernels.operands import GradientLayout, RowGradients


class Task(NamedTuple):
    """One stack to update on one device.

    Attributes:
      ids: this device's ids of the stack.
      gradients: the gradients of the stack's features, `[bags, D]` each.
      view: the stack, in the batch that the ids are from.
      row_splits: `[B/S + 1]` of every jagged feature.
    """

    ids: LocalIds
    gradients: tuple[Array, ...]
    view: StackView
    row_splits: Mapping[int, Array]

    @property
    def stack(self) -> Stack:
        """The stack."""
        return self.view.stack

    @property
    def layout(self) -> Layout:
        """The engine's layout."""
        return self.view.layout

    @property
    def rounds(self) -> bool:
        """Whether partial sums are rounded to bfloat16 where they are made."""
        return self.stack.exchange_dtype is not None

    @property
    def rounded_format(self) -> RowFormat | None:
        """The format of partial sums that are rounded; None: they are not."""
        return sent_sums_format(self.stack) if self.rounds else None


class Partials(NamedTuple):
    """Partial sums at the owner of their rows, and how they are merged.

    Attributes:
      sums: `[P, D]`, float; if the exchange rounds them, bfloat16 as uint16.
      merge: their order, and the merged sum that each is added to.
      packed: the sums packed for SparseCores, if they arrived so.
    """

    sums: Array
    merge: MergeRoute
    packed: Array | None = None


def gather_task(task: Task) -> Task:
    """Return a task of ids that the host has not routed, with those of all devices.

    Its ids are local rows of this device's shard, and their blocks are known; its gradients are one
    array. On one device it is the task itself, but for the blocks.
    """
    ids = task.ids._replace(blocks=_blocks(task))
    # One device has all ids and all rows: nothing is sent, and gradients stay by feature.
    if task.view.is_local:
        return task._replace(ids=ids)
    names = task.layout.axes.batch_axes
    with jax.named_scope("route"):
        gradients = gather(jnp.concatenate(task.gradients), names)
        return task._replace(ids=gather_ids(ids, task.view, names), gradients=(gradients,))


def sort_own_ids(task: Task) -> device_route.SortedIds:
    """Return the ids of a gathered task, sorted by row and block, with their bags and gains."""
    ids = task.ids
    assert ids.blocks is not None, "gathered ids have them"
    with jax.named_scope("dedup"):
        blocks = ids.blocks, task.layout.blocks
        given = ids.row_ids, task.stack.num_rows, *blocks, ids.bags, ids.gains
        return device_route.sort_ids(*given)


def sum_own_rows(task: Task) -> Partials:
    """Return the partial sums of a gathered task."""
    given, num_rows = sort_own_ids(task), task.stack.num_rows
    with jax.named_scope("dedup"):
        runs = number_runs(given.row_ids, num_rows, given.blocks)
        # A sum is of one row and one block, and of an id at least. Rows 3 7 7 9 in the blocks 0 0 1
        # 0 have the sums 0 1 2 3, and these the rows 3 7 7 9.
        most = min(given.row_ids.size, num_rows * task.layout.blocks)
        segments = jnp.where(given.row_ids < num_rows, runs.run, most)
        order, rounded = SumRoute(given.bags, given.gains, segments), task.rounded_format
        sums = sum_gradients(task.gradients, order, most, filled=False, sent=rounded)
    with jax.named_scope("merge"):
        rows = runs.run_row_ids[:most]
        return _unpacked(sums, device_route.merge_sorted(rows, None, num_rows), rounded)


def exchange_sums(task: Task) -> Partials:
    """Make the partial sums of a batch that the host has routed, and send them to the owners."""
    ids, stack, axes, rounded = task.ids, task.stack, task.layout.axes, task.rounded_format
    assert ids.sums is not None, "the batch was placed for an update"
    with jax.named_scope("dedup"):
        size = stack.num_shards * task.view.parcel_size
        sums = sum_gradients(task.gradients, ids.sums, size, filled=False, sent=rounded)
    if task.view.is_local:  # nothing is sent, but sums are rounded as if it were
        assert ids.merge is not None, "one device knows the whole batch"
        return _unpacked(sums, ids.merge, rounded)
    with jax.named_scope("route"):
        received, packed = route.send_sums(sums, stack, axes)
        if ids.merge is not None:
            return Partials(received, ids.merge, packed)
        assert ids.sent is not None, "the host tells the rows that it sends"
        rows = route.send_rows(device_route.only_mine(ids.sent, stack, axes), stack, axes)
    with jax.named_scope("merge"):
        return Partials(received, device_route.route_merge(rows, stack, axes), packed)


def _unpacked(sums: Array, merge: MergeRoute, rounded: RowFormat | None) -> Partials:
    """Return partial sums that stay where they were made, perhaps rounded."""
    if rounded is None:
        return Partials(sums, merge)
    return Partials(rounded.unpack(sums), merge, sums if rounded.packing == "words" else None)


def psum_sums(task: Task) -> RowSums:
    """Return all R rows of a small replicated stack with their whole gradients.

    Every device makes sums for all blocks, `[G, R, D]`, and a psum adds them over the devices. That
    is exact, because only the device that has a block's examples contributes numbers other than
    zero. Then the blocks are added in order.
    """
    # A cell for every block and row: no batch needs more. If the devices do not divide G, a block
    # may end on the next device, and a cell is the sum of two: still the same in any order.
    blocks, rows, axes = task.view.layout.blocks, task.stack.num_rows, task.layout.axes.batch_axes
    with jax.named_scope("psum"):
        order, touched = _order_of_cells(task)
        sums = sum_gradients(task.gradients, order, blocks * rows)
        sums = collectives.psum(sums, axes).reshape(blocks, rows, task.stack.dim)
        zero = jnp.zeros_like(sums[0])
        total = jax.lax.fori_loop(0, blocks, lambda b, total: total + sums[b], zero)
        missing = ((0, touched.shape[0] - rows), (0, 0))
        return RowSums(touched, jnp.pad(total, missing))


def bags_to_merge(task: Task) -> Partials:
    """Return the gradients of the bags of a gathered task, as if each were a partial sum.

    A row's gradients are then added one by one, so they must have no gains.
    """
    given = sort_own_ids(task)
    # Rows 3 7 7 of the bags 2 0 5: the gradients 2, 0 and 5 are added to the sums 0, 1 and 1.
    merge = device_route.merge_sorted(given.row_ids, given.bags, task.stack.num_rows)
    return Partials(jnp.concatenate(task.gradients), merge)


def gradients_to_sort(task: Task) -> tuple[RowGradients, GradientLayout]:
    """Return the gradients of a gathered task, for a kernel that sorts and sums them itself.

    It sums feature after feature, so the ids and gradients of several devices are put in order.
    """
    ids, gradients, view = task.ids, task.gradients, task.view
    row_ids, numbers, gains = ids.row_ids, ids.bags, ids.gains
    if not view.is_local:
        n, bags = task.layout.axes.replicas, view.bags
        view = view.joined(n)
        gradients = _by_feature(gradients[0], bags.counts, n)
        # Of bags a0 a1 | b0 and a2 a3 | b1 on two devices: a0 a1 a2 a3 | b0 b1, and their ids
        # alike.
        if bags.widths:
            sizes = np.multiply(bags.widths, bags.counts).tolist()
            numbers = view.bags.dense_bags()
            row_ids, gains = jax.tree.map(
                lambda x: jnp.concatenate(_by_feature(x, sizes, n)), (row_ids, gains)
            )
    given = RowGradients(row_ids, numbers, gains, gradients)
    if task.layout.blocks > 1:
        numbered = range(len(view.features))
        starts = [_block_starts(view, task.row_splits, number) for number in numbered]
        static = all(isinstance(one, np.ndarray) for one in starts)
        joined = jnp.asarray(np.concatenate(starts)) if static else jnp.concatenate(starts)
        given = given._replace(blocks=joined)
    return given, view.bags.gradients._replace(rounds=task.rounds)


def _by_feature(values: Array, sizes: Sequence[int], n: int) -> tuple[Array, ...]:
    """Return what n devices have, one after the other, feature after feature.

    Args:
      values: `[n N, …]`.
      sizes: how many of the N are of each feature.
      n: the number of devices.
    """
    each = values.reshape(n, -1, *values.shape[1:])
    parts = jnp.split(each, np.cumsum(sizes)[:-1], axis=1)
    return tuple(part.reshape(-1, *values.shape[1:]) for part in parts)


def _block_starts(view: StackView, row_splits: Mapping[int, Array], number: int) -> Any:
    """Return the first bags of all blocks but the first, of the feature of this number."""
    jagged = view.bags.shapes[number].has_places
    splits = row_splits[view.features[number]] if jagged else None
    return view.bags.block_starts(number, view.layout.blocks, splits)


def partials_for_kernel(given: Partials) -> tuple[RowGradients, GradientLayout]:
    """Return partial sums as a compiled kernel takes them: M sums are M bags of one id each."""
    size, merge, sums = given.sums.shape[0], given.merge, storage.widened(given.sums)
    sorted_by_row = RowGradients(merge.row_ids, merge.index, None, (sums,), merge.segments)
    return sorted_by_row, GradientLayout((size,))


def _order_of_cells(task: Task) -> tuple[SumRoute, Array]:
    """Return how the sums of a psum are made, and the touched rows `[U]`, `PADDING_ID` for others.

    An id of row r in block b adds to cell b * R + r of `[G * R, D]`; an absent id to none.
    """
    ids, blocks, rows = task.ids, task.view.layout.blocks, task.stack.num_rows
    sums = ids.sums
    if sums is None:
        row_ids = ids.row_ids
        cells = _blocks(task) * rows + row_ids.astype(jnp.int32)
        cells = jnp.where(row_ids < 0, blocks * rows, cells)
        ordered, _, (bags, gains) = dispatch.sort_with(cells, (ids.bags, ids.gains))
        sums = SumRoute(bags, gains, ordered)
    if ids.merge is not None:
        return sums, ids.merge.row_ids
    # A row without ids must stay absent: with a zero gradient it would still decay or move.
    cells = sums.segments
    own = dispatch.occurs(jnp.where(cells < blocks * rows, cells % rows, PADDING_ID), rows)
    counts = collectives.psum(own.astype(jnp.int32), task.layout.axes.batch_axes)
    numbers = jnp.arange(rows, dtype=task.stack.index_dtype)
    touched = jnp.where(counts > 0, numbers, PADDING_ID)
    missing = (0, task.view.num_merged - rows)
    return sums, jnp.pad(touched, missing, constant_values=PADDING_ID)


def _blocks(task: Task) -> Array:
    """Return the block of the global batch that each id's example is in, int32 `[N]`."""
    ids, view, axes = task.ids, task.view, task.layout.axes
    if ids.blocks is not None:
        return ids.blocks
    bags, num_blocks = view.bags, view.layout.blocks
    replica, numbers = collectives.axis_index(axes.batch_axes), np.arange(axes.replicas)
    first = numbers * num_blocks // axes.replicas  # of each replica's blocks
    if view.blocks_per_device == 1:
        return jnp.full_like(ids.bags, jnp.asarray(first, jnp.int32)[replica])
    if not bags.widths or any(shape.has_places for shape in bags.shapes):
        # One device: the host numbers the blocks of such ids of others. The blocks of each feature
        # begin at G bags, ascending; if j of all features' are not after a bag, it is in block
        # (j - 1) % G.
        firsts = [
            jnp.append(jnp.int32(start), _block_starts(view, task.row_splits, number))
            for number, start in enumerate(bags.starts[:-1])
        ]
        at = jnp.searchsorted(jnp.concatenate(firsts), ids.bags, side="right")
        return ((at - 1) % num_blocks).astype(jnp.int32)
    later, parts = np.arange(1, view.blocks_per_device), []
    # Features of one size are alike: [features, ids].
    each = zip(bags.sizes, bags.shapes, strict=True)
    for (size, count, width), some in itertools.groupby(
        each, key=lambda pair: (pair[0], pair[1].bags, pair[1].width)
    ):
        # Where the later blocks of each replica begin among its examples, [replicas, K - 1]: with
        # 10 examples in 4 blocks on one device 3 5 8.
        starts = -(-(first[:, None] + later) * size * axes.replicas // num_blocks)
        mine = jnp.asarray(starts - numbers[:, None] * size, jnp.int32)[replica]
        ids_each = count * (width or 0)
        example = jnp.arange(size * ids_each, dtype=jnp.int32) // max(1, ids_each)
        block = jnp.sum(example[:, None] >= mine[None], axis=1, dtype=jnp.int32)
        parts.append(jnp.tile(block, len(list(some))))
    return jnp.asarray(first, jnp.int32)[replica] + jnp.concatenate(parts)

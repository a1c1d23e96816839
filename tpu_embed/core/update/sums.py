"""Sum gradients by row: per block on the examples' device, then over the blocks on the owner.

Floating-point sums depend on their order, and the result must not depend on the number of devices.
So the global batch is split into G contiguous blocks. A row's gradients are summed feature after
feature within each block, on the device that has the block's examples; these partial sums are sent
to the row's owner, which adds them in the order of the blocks.

How the gradients come to the owners, `batch/stack_view.py` says. Both orders, that of the partial
sums and that of the merge, are a route: the host has computed it for a placed batch; for ids that
only the program knows it is computed here.

Input: one device's ids of a stack, and the gradients of its activations. Output: partial sums at
their rows' owners, with the order to merge them in; or what a compiled kernel needs to make them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.batch import LocalIds, RoutedIds, StackView
from tpu_embed.core.exchange import MergeRoute, RowSums, SumRoute, collectives, device_route, route
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
      fits: whether the batch's capacities are known to suffice for the ids.
    """

    ids: LocalIds | RoutedIds
    gradients: tuple[Array, ...]
    view: StackView
    row_splits: Mapping[int, Array]
    fits: bool

    @property
    def lookup_fits(self) -> bool:
        """Whether the room for the rows of a lookup is known to suffice for the ids."""
        if self.fits or self.stack.num_shards == 1:
            return True
        return max(1, self.view.room.row_capacity) >= self.view.worst_room.row_capacity

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


class Outgoing(NamedTuple):
    """How a device makes its partial sums, and which row each of them is for.

    Attributes:
      sums: which gradients are added to which partial sum of the send buffer `[S * C', D]`: place
        s * C' + i has the i-th partial sum for shard s.
      row_ids: local rows at the owners `[S, C']`; None where the owners know them from the host.
      capacity: C', the partial sums that a destination has room for.
      overflow: bool `[]`, whether some destination gets more of them.
      lookup_overflow: bool `[]`, whether a lookup of these ids, with the capacities of the batch,
        asks some owner for more rows than it has room for.
    """

    sums: SumRoute
    row_ids: Array | None
    capacity: int
    overflow: Array
    lookup_overflow: Array


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


def outgoing_sums(task: Task, capacity: int) -> Outgoing:
    """Return how this device sums its gradients by row and block, for the rows' owners.

    Args:
      task: the stack.
      capacity: C', the partial sums that a destination has room for.
    """
    ids, stack = task.ids, task.stack
    if isinstance(ids, RoutedIds):
        assert ids.sums is not None, "the batch was placed for an update"
        never = jnp.asarray(False)
        return Outgoing(ids.sums, ids.sent, capacity, never, never)
    with jax.named_scope("dedup"):
        blocks, num_blocks = _blocks(task), task.layout.blocks
        given = ids.row_ids, stack, (ids.bags, ids.gains, blocks)
        ordered = device_route.sort_ids(*given, blocks, num_blocks)
        bags, gains, parts = ordered.payload
        if not task.view.accumulates:  # every id is a sum by itself
            parts = ordered.order
        found = device_route.find_destinations(ordered.row_ids, stack, capacity, parts)
        crowded = jnp.asarray(False)
        if not task.lookup_fits:
            room = max(1, task.view.room.row_capacity)
            crowded = device_route.has_more_rows(ordered.row_ids, stack, room)
    sums = SumRoute(bags, gains, found.target)
    return Outgoing(sums, found.row_ids, capacity, found.overflow, crowded)


def exchange_sums(task: Task, outgoing: Outgoing) -> Partials:
    """Sum the gradients of this device by row and block, and send each sum to its row's owner."""
    stack, axes, sent = task.stack, task.layout.axes, outgoing.row_ids
    with jax.named_scope("dedup"):
        size = stack.num_shards * outgoing.capacity
        sums = _summed(task, outgoing.sums, size, filled=False, sent=task.rounded_format)
    with jax.named_scope("route"):
        if task.view.is_local:
            # Nothing is sent, but sums are rounded as if it were.
            rounds = task.rounded_format
            received = sums if rounds is None else rounds.unpack(sums)
            packed = sums if rounds is not None and rounds.packing == "words" else None
        else:
            received, packed = route.send_sums(sums, stack, axes)
        if isinstance(task.ids, RoutedIds) and task.ids.merge is not None:
            return Partials(received, task.ids.merge, packed)
        assert sent is not None, "only the host's own route comes without the rows that are sent"
        rows = route.send_rows(device_route.only_mine(sent, stack, axes), stack, axes)
    with jax.named_scope("merge"):
        return Partials(received, device_route.route_merge(rows, stack, axes), packed)


def exchange_occurrences(task: Task, outgoing: Outgoing) -> RowSums:
    """Send the gradient of every id to its row's owner; return them not summed, in order of sums.

    Args:
      task: a stack without gradient accumulation.
      outgoing: a partial sum for each id.
    """
    stack, axes, sent = task.stack, task.layout.axes, outgoing.row_ids
    capacity = outgoing.capacity
    assert sent is not None, "ids whose gradients are not summed are routed here"
    sums = _summed(task, outgoing.sums, stack.num_shards * capacity)
    received, _ = route.send_sums(sums, stack, axes)
    received = received.reshape(-1, capacity, stack.dim)
    rows = route.send_rows(device_route.only_mine(sent, stack, axes), stack, axes)
    batch_order = axes.batch_order(stack.shard_axes)
    return RowSums(rows[batch_order].reshape(-1), received[batch_order].reshape(-1, stack.dim))


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
        sums = _summed(task, order, blocks * rows)
        sums = collectives.psum(sums, axes).reshape(blocks, rows, task.stack.dim)
        zero = jnp.zeros_like(sums[0])
        total = jax.lax.fori_loop(0, blocks, lambda b, total: total + sums[b], zero)
        missing = ((0, touched.shape[0] - rows), (0, 0))
        return RowSums(touched, jnp.pad(total, missing))


def local_gradients(task: Task) -> tuple[RowGradients, GradientLayout]:
    """Return this device's gradients unsummed, for a kernel that sorts and sums them itself."""
    assert isinstance(task.ids, LocalIds), "routed ids are sorted already"
    ids = task.ids
    given = RowGradients(ids.row_ids, ids.bags, ids.gains, task.gradients)
    if task.layout.blocks > 1:
        starts = [_block_starts(task, n) for n in range(len(task.view.features))]
        static = all(isinstance(one, np.ndarray) for one in starts)
        joined = jnp.asarray(np.concatenate(starts)) if static else jnp.concatenate(starts)
        given = given._replace(blocks=joined)
    return given, task.view.bags.gradients._replace(rounds=task.rounds)


def _block_starts(task: Task, number: int) -> Any:
    """Return the first bags of all blocks but the first, of the feature of this number."""
    splits = task.row_splits.get(task.view.features[number])
    jagged = task.view.bags.shapes[number].has_places
    return task.view.bags.block_starts(number, task.layout.blocks, splits if jagged else None)


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
    if isinstance(ids, RoutedIds):
        assert ids.sums is not None, "the batch was placed for an update"
        sums = ids.sums
    else:
        block = _blocks(task)
        if block is None:  # all of a device's ids are in one
            axes = task.layout.axes
            block = collectives.axis_index(axes.batch_axes) * blocks // axes.replicas
        cells = block * rows + ids.row_ids.astype(jnp.int32)
        cells = jnp.where(ids.row_ids < 0, blocks * rows, cells)
        ordered, _, (bags, gains) = dispatch.sort_with(cells, (ids.bags, ids.gains))
        sums = SumRoute(bags, gains, ordered)
    if isinstance(ids, RoutedIds) and ids.merge is not None:
        return sums, ids.merge.row_ids
    # A row without ids must stay absent: with a zero gradient it would still decay or move.
    cells = sums.segments
    own = dispatch.occurs(jnp.where(cells < blocks * rows, cells % rows, PADDING_ID), rows)
    counts = collectives.psum(own.astype(jnp.int32), task.layout.axes.batch_axes)
    numbers = jnp.arange(rows, dtype=task.stack.index_dtype)
    touched = jnp.where(counts > 0, numbers, PADDING_ID)
    missing = (0, task.view.num_merged - rows)
    return sums, jnp.pad(touched, missing, constant_values=PADDING_ID)


def _summed(task: Task, order: SumRoute, num_sums: int, **options: Any) -> Array:
    """Return sums of this device's gradients; see `sum_gradients`."""
    return sum_gradients(task.gradients, order, num_sums, **options)


def _blocks(task: Task) -> Array | None:
    """Return the block of the global batch that each id's example is in, int32 `[N]`.

    None where a device's examples are in one block.
    """
    ids, view, axes = task.ids, task.view, task.layout.axes
    if view.blocks_per_device == 1:
        return None
    assert isinstance(ids, LocalIds), "the host has routed the others"
    if ids.blocks is not None:
        return ids.blocks
    bags, num_blocks = view.bags, view.layout.blocks
    if not bags.is_dense or any(shape.has_places for shape in bags.shapes):
        # One device: the host has routed such ids of others. The blocks of each feature begin at G
        # bags, ascending; if j of all features' are not after a bag, it is in block (j - 1) % G.
        firsts = [
            jnp.append(jnp.int32(start), _block_starts(task, number))
            for number, start in enumerate(bags.starts[:-1])
        ]
        at = jnp.searchsorted(jnp.concatenate(firsts), ids.bags, side="right")
        return ((at - 1) % num_blocks).astype(jnp.int32)
    replica = collectives.axis_index(axes.batch_axes)
    numbers, later = np.arange(axes.replicas), np.arange(1, view.blocks_per_device)
    first = numbers * num_blocks // axes.replicas
    parts = []
    # Features of one size are alike: [features, ids].
    each = zip(bags.sizes, bags.shapes, strict=True)
    for (size, count, width), some in itertools.groupby(
        each, key=lambda pair: (pair[0], pair[1].bags, pair[1].width)
    ):
        # Where the later blocks of each replica begin among its examples, [replicas, K - 1]: with
        # 10 examples in 4 blocks on one device 3 5 8. None begins after the last example's block.
        starts = -(-(first[:, None] + later) * size * axes.replicas // num_blocks)
        mine = jnp.asarray(starts - numbers[:, None] * size, jnp.int32)[replica]
        ids_each = count * (width or 0)
        example = jnp.arange(size * ids_each, dtype=jnp.int32) // max(1, ids_each)
        block = jnp.sum(example[:, None] >= mine[None], axis=1, dtype=jnp.int32)
        parts.append(jnp.tile(block, len(list(some))))
    return jnp.asarray(first, jnp.int32)[replica] + _at_least_one(jnp.concatenate(parts))


def _at_least_one(numbers: Array) -> Array:
    """Return numbers `[N]`; one 0 if there are none."""
    return numbers if numbers.size else jnp.zeros((1,), numbers.dtype)

"""Sum gradients by row: per block on the examples' device, then over the blocks on the owner.

Floating-point sums depend on their order, and the result must not depend on the number of devices.
So the global batch is split into G contiguous blocks. A row's gradients are summed in batch order
within each block, on the device that has the block's examples; these partial sums are sent to the
row's owner, which adds them in the order of the blocks.

There are four ways to the same sums, and `sharded.py` chooses: partial sums sent by an all-to-all;
gradients sent by an all-gather where that is less; dense sums of a small replicated stack; and a
single device, where a compiled kernel sums and applies the rule at once.

Input: one device's ids of a stack, and the gradients of its activations. Output: local rows with
partial sums (`all_to_all_sums`), then distinct rows with whole sums (`merge_blocks`).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.batch import (
    BagLayout,
    BatchSpec,
    LocalIds,
    StackView,
)
from tpu_embed.core.exchange import RowSums, collectives, route
from tpu_embed.core.layout import Layout, Stack
from tpu_embed.core.lookup import factors, optional_weights, sum_gradients
from tpu_embed.core.update.apply import Blocks, RowGradients
from tpu_embed.kernels import dispatch


class Task(NamedTuple):
    """One stack to update on one device.

    Attributes:
      ids: this device's ids of the stack.
      gradients: their bags' gradients, `[examples * bags, D]` per feature of the stack.
      view: the stack, in the batch that the ids are from.
      fits: whether the batch's capacities are known to suffice for the ids.
    """

    ids: LocalIds
    gradients: tuple[Array, ...]
    view: StackView
    fits: bool

    @property
    def stack(self) -> Stack:
        """The stack."""
        return self.view.stack

    @property
    def layout(self) -> Layout:
        """The engine's layout."""
        return self.view.layout

    @property
    def spec(self) -> BatchSpec:
        """The batch's static shape and capacities."""
        return self.view.spec

    @property
    def accumulates(self) -> bool:
        """Whether the gradients of a row are summed before one update."""
        optimizer = self.stack.optimizer
        return optimizer is None or optimizer.use_gradient_accumulation

    @property
    def bag_layout(self) -> BagLayout:
        """How its ids were combined."""
        return self.view.bag_layout

    @property
    def blocks(self) -> int:
        """G, the number of blocks of the global batch."""
        return self.layout.blocks(self.spec.batch)

    @property
    def alone(self) -> bool:
        """Whether one device has all ids and all rows, so that nothing is exchanged."""
        return self.stack.num_shards == 1 and self.layout.axes.replicas == 1


def all_to_all_sums(task: Task, capacity: int) -> RowSums:
    """Return rows that this device must update, with partial sums of their gradients.

    The partial sums of a row come in the order in which they must be added, that of the blocks.
    Without gradient accumulation there is one entry per occurrence, in batch order.

    Args:
      task: the stack.
      capacity: C, the partial sums that a destination has room for.
    """
    if _fits_psum(task):
        with jax.named_scope("psum"):
            return _summed_by_psum(task)
    with jax.named_scope("dedup"):
        # The sums are made directly in the send buffer [S * C, D]: place s * C + i has the i-th
        # partial sum for shard s.
        way = route.make_route(task.ids.row_ids, task.stack, capacity, _parts(task))
        room = task.stack.num_shards * capacity
        sums = sum_gradients(task.gradients, task.ids, task.bag_layout, way.order, way.target, room)
    with jax.named_scope("route"):
        return route.send(way, sums, task.stack, task.layout.axes)


def merge_blocks(task: Task, received: RowSums) -> RowSums:
    """Return distinct rows, padded to a multiple of `ROW_MULTIPLE`, with their whole gradients.

    Args:
      task: the stack.
      received: what `all_to_all_sums` returned.
    """
    if _fits_psum(task):
        return received
    with jax.named_scope("merge"):
        # What one device sends is sorted by row; only several senders must be sorted together.
        one_source = task.layout.axes.batch_order(task.stack.shard_axes).size == 1
        return route.merge(received, task.stack, in_order=one_source)


def local_gradients(task: Task) -> tuple[RowGradients, Blocks]:
    """Return this device's gradients unsummed, with the bag, weight and factor of each id."""
    ids, form, dtype = task.ids, task.bag_layout, task.stack.compute_dtype
    given = RowGradients(
        ids.row_ids,
        ids.bags,
        optional_weights(ids, dtype),
        factors(ids, form, dtype),
        task.gradients,
    )
    return given, Blocks(form.columns, form.examples, task.blocks)


def prefers_all_gather(task: Task, capacity: int) -> bool:
    """Return whether all-gathering ids and bags' gradients sends less than partial sums would.

    Args:
      task: the stack.
      capacity: C, the partial sums that a destination has room for.
    """
    stack, ids, replicas = task.stack, task.ids, task.layout.axes.replicas
    # With fewer shards than replicas, devices hold copies of rows, and each copy's device would sum
    # the whole batch.
    if stack.num_shards < replicas or not task.accumulates:
        return False
    # Words that a device sends: a gradient per bag, and per id its weight (if any), row and bag.
    # Against that, C partial sums to each of S shards: D numbers and a row id each.
    floats = task.bag_layout.bags * stack.dim + (0 if ids.weights is None else ids.weights.shape[0])
    numbers = floats + 2 * ids.row_ids.shape[0]
    return replicas * numbers < stack.num_shards * capacity * (stack.dim + 1)


def all_gather_gradients(task: Task) -> tuple[RowGradients, Blocks]:
    """Return the unsummed gradients of the global batch; ids of rows on other shards are absent."""
    stack, axes = task.stack, task.layout.axes
    mine, blocks = local_gradients(task)

    # [n, …] per device -> [replicas, n, …] -> [replicas * n, …], in batch order.
    def whole(x: Array) -> Array:
        return collectives.all_gather(x, axes.batch_axes).reshape(-1, *x.shape[1:])

    devices = collectives.axis_index(axes.batch_axes)
    assert mine.bags is not None, "local_gradients numbers the bags"
    # Bags become numbers of the global batch: bag 2 of device 3 is 3 * (bags per device) + 2. The
    # bag of padding may be one past the last; the minimum keeps it on its own device.
    bags = jnp.minimum(mine.bags, task.bag_layout.bags - 1) + devices * task.bag_layout.bags
    given = jax.tree.map(whole, mine._replace(bags=bags))
    # This device owns the physical rows [first, first + R).
    first = collectives.axis_index(stack.shard_axes).astype(given.row_ids.dtype) * stack.num_rows
    local = given.row_ids - first
    owned = (given.row_ids >= first) & (local < stack.num_rows)
    row_ids = jnp.where(owned, local, jnp.asarray(PADDING_ID, local.dtype))
    given = given._replace(row_ids=row_ids)
    return given, blocks._replace(examples=blocks.examples * axes.replicas)


def as_row_gradients(received: RowSums) -> tuple[RowGradients, Blocks]:
    """Return the result of `all_to_all_sums` as gradients that a compiled kernel can sum."""
    # M partial sums are M bags of one id each, so no bags, weights or factors are needed.
    given = RowGradients(received.row_ids, None, None, None, (received.sums,))
    return given, Blocks((1,), received.row_ids.shape[0], 0)


def overflows(task: Task, capacity: int) -> Array:
    """Return whether some shard gets more than `capacity` partial sums from here, bool `[]`."""
    return route.make_route(task.ids.row_ids, task.stack, capacity, _parts(task)).overflow


def _parts(task: Task) -> Array | None:
    """Return a number per id, int32 `[N]`: ids of one row are summed here if their numbers agree.

    It is the id's block of the batch. Without accumulation every id has a number of its own. None,
    where a device holds a single block: all ids of a row are summed.
    """
    if not task.accumulates:
        return jnp.arange(task.ids.row_ids.shape[0], dtype=jnp.int32)
    if task.layout.blocks_per_device(task.spec.batch) == 1:
        return None
    return _blocks(task)


def _blocks(task: Task) -> Array:
    """Return the block of the global batch that contains each id's example, int32 `[N]`."""
    # bag // (bags per example) is the example on this device; `first` makes it global.
    per_example = task.view.bags_per_example
    first = collectives.axis_index(task.layout.axes.batch_axes) * task.spec.local_batch
    examples, batch, blocks = first + task.ids.bags // per_example, task.spec.batch, task.blocks
    if batch % blocks == 0:
        return examples // (batch // blocks)
    # Example e is in block floor(e * G / batch), but e * G may not fit in int32. So search among
    # the first examples of the blocks, ceil(block * batch / G): for 10 examples and G = 4, those
    # are 3, 5 and 8, and the blocks have 3, 2, 3 and 2 examples.
    starts = [-(-block * batch // blocks) for block in range(1, blocks)]
    return jnp.searchsorted(jnp.asarray(starts, jnp.int32), examples, side="right")


def _fits_psum(task: Task) -> bool:
    """Return whether dense sums of a replicated stack have no more rows than the batch has ids."""
    replicas = task.layout.axes.replicas
    if task.stack.num_shards > 1 or replicas == 1 or not task.accumulates:
        return False
    return task.blocks * task.stack.num_rows <= task.view.num_ids * replicas


def _summed_by_psum(task: Task) -> RowSums:
    """Return all R rows of a small replicated stack with their whole gradients.

    Every device makes sums for all blocks, `[G, R, D]`, and a psum adds them over the devices. That
    is exact, because only the device that has a block's examples contributes numbers other than
    zero. Then the blocks are added in order.
    """
    blocks, num_rows, axes = task.blocks, task.stack.num_rows, task.layout.axes.batch_axes
    # An id of row r in block b adds to cell b * R + r of [G * R, D]; an absent id to none.
    cells = _blocks(task) * num_rows + task.ids.row_ids.astype(jnp.int32)
    cells = jnp.where(task.ids.row_ids < 0, blocks * num_rows, cells)
    ordered, order = dispatch.sort_rows(cells)
    sums = sum_gradients(
        task.gradients, task.ids, task.bag_layout, order, ordered, blocks * num_rows
    )
    # A row without ids must stay absent: with a zero gradient it would still decay or move.
    counts = dispatch.segment_sum(jnp.ones_like(ordered), ordered, blocks * num_rows)
    sums = collectives.psum(sums, axes).reshape(blocks, num_rows, task.stack.dim)
    touched = collectives.psum(counts, axes).reshape(blocks, num_rows).sum(0) > 0
    total = jax.lax.fori_loop(0, blocks, lambda b, total: total + sums[b], jnp.zeros_like(sums[0]))
    row_ids = jnp.arange(num_rows, dtype=task.ids.row_ids.dtype)
    return route.padded(RowSums(jnp.where(touched, row_ids, PADDING_ID), total))

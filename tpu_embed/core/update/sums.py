"""Activation gradients become one summed gradient a touched row, on the device that owns the row.

Input: one device's ids of a stack, and the gradients of its activations. Output: local rows with
partial sums (`all_to_all_sums`), then distinct rows with whole sums (`merge_blocks`).

A row's gradients are summed in batch order within each block of the global batch, then over the
blocks in order: the first on the device that has the examples, the second on the row's owner.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.batch import (
    BagLayout,
    Batch,
    BatchSpec,
    LocalIds,
    TracedIds,
    bag_layout,
    bag_offsets,
)
from tpu_embed.core.exchange import RowSums, collectives, route
from tpu_embed.core.layout import Layout, Stack
from tpu_embed.core.lookup import factors, optional_weights, sum_gradients
from tpu_embed.core.update.apply import Blocks, RowGradients
from tpu_embed.kernels import dispatch


class Task(NamedTuple):
    """One stack to update on one device: its ids, a gradient a feature, what is static."""

    ids: LocalIds
    gradients: tuple[Array, ...]
    source: Batch | TracedIds
    layout: Layout
    g: int

    @property
    def stack(self) -> Stack:
        """The stack."""
        return self.layout.stacks[self.g]

    @property
    def spec(self) -> BatchSpec:
        """The batch's forms and capacities."""
        return self.source.spec

    @property
    def accumulates(self) -> bool:
        """Whether the gradients of a row are summed before one update."""
        optimizer = self.stack.optimizer
        return optimizer is None or optimizer.use_gradient_accumulation

    @property
    def bag_layout(self) -> BagLayout:
        """How its ids were combined."""
        return bag_layout(self.spec, self.layout, self.g)

    @property
    def blocks(self) -> int:
        """G, the blocks of the global batch."""
        return self.layout.blocks(self.spec.batch)

    @property
    def alone(self) -> bool:
        """Whether one device has all ids and all rows: nothing is exchanged."""
        return self.stack.num_shards == 1 and self.layout.axes.replicas == 1


def all_to_all_sums(task: Task, capacity: int) -> RowSums:
    """Return rows that this device must update, with partial sums of their gradients.

    Each row's are in the order in which they must be added: by block. Without gradient accumulation
    there is one an occurrence, in batch order.

    Args:
      task: the stack.
      capacity: partial sums a destination has room for.
    """
    if _fits_psum(task):
        with jax.named_scope("psum"):
            return _summed_by_psum(task)
    with jax.named_scope("dedup"):
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
        one_source = task.layout.axes.batch_order(task.stack.shard_axes).size == 1
        return route.merge(received, task.stack, in_order=one_source)


def local_gradients(task: Task) -> tuple[RowGradients, Blocks]:
    """Return the gradients of a device that is alone, as they are: nothing is summed yet."""
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
    """Tell whether all-gathering ids and bags' gradients moves less than sending partial sums.

    Never where devices hold copies of rows: each would sum the whole batch again.

    Args:
      task: the stack.
      capacity: partial sums a destination has room for.
    """
    stack, ids, replicas = task.stack, task.ids, task.layout.axes.replicas
    if stack.num_shards < replicas or not task.accumulates:
        return False
    floats = task.bag_layout.bags * stack.dim + (0 if ids.weights is None else ids.weights.shape[0])
    numbers = floats + 2 * ids.row_ids.shape[0]
    return replicas * numbers < stack.num_shards * capacity * (stack.dim + 1)


def all_gather_gradients(task: Task) -> tuple[RowGradients, Blocks]:
    """Return the gradients of the global batch, of the rows that this device owns."""
    stack, axes = task.stack, task.layout.axes
    mine, blocks = local_gradients(task)

    def whole(x: Array) -> Array:
        return collectives.all_gather(x, axes.batch_axes).reshape(-1, *x.shape[1:])

    devices = collectives.axis_index(axes.batch_axes)
    assert mine.bags is not None, "local_gradients numbers the bags"
    bags = jnp.minimum(mine.bags, task.bag_layout.bags - 1) + devices * task.bag_layout.bags
    given = jax.tree.map(whole, mine._replace(bags=bags))
    first = collectives.axis_index(stack.shard_axes).astype(given.row_ids.dtype) * stack.num_rows
    local = given.row_ids - first
    owned = (given.row_ids >= first) & (local < stack.num_rows)
    rows = jnp.where(owned, local, jnp.asarray(PADDING_ID, local.dtype))
    return given._replace(row_ids=rows), blocks._replace(examples=blocks.examples * axes.replicas)


def as_row_gradients(received: RowSums) -> tuple[RowGradients, Blocks]:
    """Return what `all_to_all_sums` returned, as gradients whose sums are still to be made."""
    given = RowGradients(received.row_ids, None, None, None, (received.sums,))
    return given, Blocks((1,), received.row_ids.shape[0], 0)


def overflows(task: Task, capacity: int) -> Array:
    """Tell, bool `[]`, whether this device's partial sums exceed some destination's room."""
    return route.make_route(task.ids.row_ids, task.stack, capacity, _parts(task)).overflow


def _parts(task: Task) -> Array | None:
    """Return what keeps the gradients of a row apart until they reach its owner, int32 `[N]`.

    The block of each id; every id by itself without accumulation; None where a device holds a
    single block.
    """
    if not task.accumulates:
        return jnp.arange(task.ids.row_ids.shape[0], dtype=jnp.int32)
    if task.layout.blocks_per_device(task.spec.batch) == 1:
        return None
    return _blocks(task)


def _blocks(task: Task) -> Array:
    """Return the block of the global batch that each id's example falls into, int32 `[N]`."""
    _, per_example = bag_offsets(task.spec, task.g)
    first = collectives.axis_index(task.layout.axes.batch_axes) * task.spec.local_batch
    examples, batch, blocks = first + task.ids.bags // per_example, task.spec.batch, task.blocks
    if batch % blocks == 0:
        return examples // (batch // blocks)
    starts = [-(-block * batch // blocks) for block in range(1, blocks)]  # e · G may not fit int32
    return jnp.searchsorted(jnp.asarray(starts, jnp.int32), examples, side="right")


def _fits_psum(task: Task) -> bool:
    """Tell whether a replicated stack's dense block sums are no more than the batch's ids."""
    replicas = task.layout.axes.replicas
    if task.stack.num_shards > 1 or replicas == 1 or not task.accumulates:
        return False
    return task.blocks * task.stack.num_rows <= task.spec.ids(task.g) * replicas


def _summed_by_psum(task: Task) -> RowSums:
    """Sum a small replicated stack densely.

    `[G, R, D]` block sums, one psum (exact: a block is non-zero on one device only), then the
    blocks in order.
    """
    blocks, rows, axes = task.blocks, task.stack.num_rows, task.layout.axes.batch_axes
    cells = _blocks(task) * rows + task.ids.row_ids.astype(jnp.int32)
    cells = jnp.where(task.ids.row_ids < 0, blocks * rows, cells)
    ordered, order = dispatch.sort_rows(cells)
    sums = sum_gradients(task.gradients, task.ids, task.bag_layout, order, ordered, blocks * rows)
    counts = dispatch.segment_sum(jnp.ones_like(ordered), ordered, blocks * rows)
    sums = collectives.psum(sums, axes).reshape(blocks, rows, task.stack.dim)
    touched = collectives.psum(counts, axes).reshape(blocks, rows).sum(0) > 0
    total = jax.lax.fori_loop(0, blocks, lambda b, total: total + sums[b], jnp.zeros_like(sums[0]))
    numbers = jnp.arange(rows, dtype=task.ids.row_ids.dtype)
    return route.padded(RowSums(jnp.where(touched, numbers, PADDING_ID), total))

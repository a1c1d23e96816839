"""Activation gradients become one summed gradient a touched row, on the device that owns the row.

Enters: one device's ids of a stack, and the gradients of its activations. Leaves: local rows with
partial sums (`exchanged`), then distinct ones with whole sums (`merged`). Called by `update.py`.

A row's gradients are summed in batch order within each block of the global batch, then over the
blocks in order: the first on the device that has the examples, the second on the row's owner.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core import collectives, route
from tpu_embed.core.apply import Blocks, RowGradients
from tpu_embed.core.batch import Batch
from tpu_embed.core.batch_spec import BatchSpec
from tpu_embed.core.combine import factors, optional_weights, sum_gradients
from tpu_embed.core.layout import Group, Layout
from tpu_embed.core.located import BagForm, LocalIds, bag_form, bag_offsets
from tpu_embed.core.route import RowSums
from tpu_embed.core.traced import TracedIds
from tpu_embed.kernels import dispatch


class Task(NamedTuple):
    """One stack to update on one device: its ids, a gradient a feature, what is static."""

    ids: LocalIds
    gradients: tuple[Array, ...]
    source: Batch | TracedIds
    layout: Layout
    g: int

    @property
    def group(self) -> Group:
        """The stack."""
        return self.layout.groups[self.g]

    @property
    def spec(self) -> BatchSpec:
        """The batch's forms and capacities."""
        return self.source.spec

    @property
    def accumulates(self) -> bool:
        """Whether the gradients of a row are summed before one update."""
        optimizer = self.group.optimizer
        return optimizer is None or optimizer.use_gradient_accumulation

    @property
    def form(self) -> BagForm:
        """How its ids were combined."""
        return bag_form(self.spec, self.layout, self.g)

    @property
    def blocks(self) -> int:
        """G, the blocks of the global batch."""
        return self.layout.blocks(self.spec.batch)

    @property
    def alone(self) -> bool:
        """Whether one device has all ids and all rows: nothing is exchanged."""
        return self.group.num_shards == 1 and self.layout.axes.replicas == 1


def exchanged(task: Task, capacity: int) -> RowSums:
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
        way = route.make_route(task.ids.rows, task.group, capacity, _parts(task))
        room = task.group.num_shards * capacity
        sums = sum_gradients(task.gradients, task.ids, task.form, way.order, way.target, room)
    with jax.named_scope("route"):
        return route.send(way, sums, task.group, task.layout.axes)


def merged(task: Task, received: RowSums) -> RowSums:
    """Return distinct rows, padded to a multiple of `ROW_MULTIPLE`, with their whole gradients.

    Args:
      task: the stack.
      received: what `exchanged` returned.
    """
    if _fits_psum(task):
        return received
    with jax.named_scope("merge"):
        one_source = task.layout.axes.batch_order(task.group.shard_axes).size == 1
        return route.merge(received, task.group, in_order=one_source)


def ungrouped(task: Task) -> tuple[RowGradients, Blocks]:
    """Return the gradients of a device that is alone, as they are: nothing is summed yet."""
    ids, form, dtype = task.ids, task.form, task.group.compute_dtype
    given = RowGradients(
        ids.rows,
        ids.bags,
        optional_weights(ids, dtype),
        factors(ids, form, dtype),
        task.gradients,
    )
    return given, Blocks(form.columns, form.examples, task.blocks)


def gathers(task: Task, capacity: int) -> bool:
    """Tell whether all-gathering ids and bags' gradients moves less than sending partial sums.

    Never where devices hold copies of rows: each would sum the whole batch again.

    Args:
      task: the stack.
      capacity: partial sums a destination has room for.
    """
    group, ids, replicas = task.group, task.ids, task.layout.axes.replicas
    if group.num_shards < replicas or not task.accumulates:
        return False
    floats = task.form.bags * group.dim + (0 if ids.weights is None else ids.weights.shape[0])
    numbers = floats + 2 * ids.rows.shape[0]
    return replicas * numbers < group.num_shards * capacity * (group.dim + 1)


def gathered(task: Task) -> tuple[RowGradients, Blocks]:
    """Return the gradients of the global batch, of the rows that this device owns."""
    group, axes = task.group, task.layout.axes
    mine, blocks = ungrouped(task)

    def whole(x: Array) -> Array:
        return collectives.all_gather(x, axes.batch_axes).reshape(-1, *x.shape[1:])

    devices = collectives.axis_index(axes.batch_axes)
    assert mine.bags is not None, "ungrouped numbers the bags"
    bags = jnp.minimum(mine.bags, task.form.bags - 1) + devices * task.form.bags
    given = jax.tree.map(whole, mine._replace(bags=bags))
    first = collectives.axis_index(group.shard_axes).astype(given.rows.dtype) * group.rows
    local = given.rows - first
    owned = (given.rows >= first) & (local < group.rows)
    rows = jnp.where(owned, local, jnp.asarray(PADDING_ID, local.dtype))
    return given._replace(rows=rows), blocks._replace(examples=blocks.examples * axes.replicas)


def partly_summed(received: RowSums) -> tuple[RowGradients, Blocks]:
    """Return what `exchanged` returned, as gradients whose sums are still to be made."""
    given = RowGradients(received.rows, None, None, None, (received.sums,))
    return given, Blocks((1,), received.rows.shape[0], 0)


def overflows(task: Task, capacity: int) -> Array:
    """Tell, bool `[]`, whether this device's partial sums exceed some destination's room."""
    return route.make_route(task.ids.rows, task.group, capacity, _parts(task)).overflow


def _parts(task: Task) -> Array | None:
    """Return what keeps the gradients of a row apart until they reach its owner, int32 `[N]`.

    The block of each id; every id by itself without accumulation; None where a device holds a
    single block.
    """
    if not task.accumulates:
        return jnp.arange(task.ids.rows.shape[0], dtype=jnp.int32)
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
    if task.group.num_shards > 1 or replicas == 1 or not task.accumulates:
        return False
    return task.blocks * task.group.rows <= task.spec.ids(task.g) * replicas


def _summed_by_psum(task: Task) -> RowSums:
    """Sum a small replicated stack densely.

    `[G, R, D]` block sums, one psum (exact: a block is non-zero on one device only), then the
    blocks in order.
    """
    blocks, rows, axes = task.blocks, task.group.rows, task.layout.axes.batch_axes
    cells = _blocks(task) * rows + task.ids.rows.astype(jnp.int32)
    cells = jnp.where(task.ids.rows < 0, blocks * rows, cells)
    ordered, order = dispatch.sort_rows(cells)
    sums = sum_gradients(task.gradients, task.ids, task.form, order, ordered, blocks * rows)
    counts = dispatch.segment_sum(jnp.ones_like(ordered), ordered, blocks * rows)
    sums = collectives.psum(sums, axes).reshape(blocks, rows, task.group.dim)
    touched = collectives.psum(counts, axes).reshape(blocks, rows).sum(0) > 0
    total = jax.lax.fori_loop(0, blocks, lambda b, total: total + sums[b], jnp.zeros_like(sums[0]))
    numbers = jnp.arange(rows, dtype=task.ids.rows.dtype)
    return route.padded(RowSums(jnp.where(touched, numbers, PADDING_ID), total))

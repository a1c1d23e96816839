"""Activation gradients in, updated rows out: one summed gradient a touched row, the optimizer's rule, rows set.

Enters: state arrays, the ids of all stacks and one gradient array a stack. Leaves: new state arrays, in place when the
caller donates the old ones. Called by the engine, inside or outside a user's jit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core import collectives, occurrences, route
from tpu_embed.core.apply import TableRows, apply_rule, every_row
from tpu_embed.core.batch import GroupIds, bag_offsets
from tpu_embed.core.batch_spec import BatchSpec, worst_case
from tpu_embed.core.combine import LocalIds, gradients_in_order
from tpu_embed.core.layout import Group, Layout
from tpu_embed.core.lookup import bag_form, local_ids
from tpu_embed.core.route import RowSums
from tpu_embed.core.tables import state_specs
from tpu_embed.kernels import dispatch


class Operands(NamedTuple):
    """What an update needs beside the tables.

    Attributes:
      ids: of every stack.
      gradients: per updated stack, by number, `[B, bags, D]`.
      step: int32 `[]`, t of this update, 1 at the first.
      learning_rates: scalars `[]`, by stack number, for those whose rate is read on the host.
    """

    ids: tuple[GroupIds, ...]
    gradients: dict[int, Array]
    step: Array
    learning_rates: dict[int, Array]


def update(
    tables: Mapping[str, Array],
    slots: Mapping[str, dict[str, Array]],
    operands: Operands,
    spec: BatchSpec,
    layout: Layout,
    *,
    checked: bool,
) -> tuple[dict[str, Array], dict[str, dict[str, Array]], Array]:
    """Return tables and slots after one update, and how many exchanges took the worst-case branch.

    Args:
      tables: `TableState.tables`.
      slots: `TableState.slots`.
      operands: ids, gradients, step, learning rates.
      spec: forms and capacities.
      layout: the engine's.
      checked: the ids are known to fit the capacities.
    """
    axes = layout.axes
    updated = [g for g in sorted(operands.gradients)]
    groups = tuple(layout.groups[g] for g in updated)

    def device(tables: dict, slots: dict, operands: Operands) -> tuple[dict, dict, Array]:
        overflows = jnp.int32(0)
        tables, slots = dict(tables), dict(slots)
        for g in updated:
            name = layout.groups[g].name
            held = TableRows(tables[name], slots[name])
            with jax.named_scope(f"update/{name}"):
                held, overflow = _update_group(held, operands, spec, layout, g, checked=checked)
            tables[name], slots[name] = held
            overflows += overflow.astype(jnp.int32)
        return tables, slots, overflows

    table_specs, slot_specs = state_specs(groups, axes)
    whole, batch = PartitionSpec(), axes.spec(axes.batch_axes)
    new_tables, new_slots, overflows = jax.shard_map(
        device,
        mesh=axes.mesh,
        in_specs=(table_specs, slot_specs, Operands(batch, batch, whole, whole)),  # type: ignore[arg-type]
        out_specs=(table_specs, slot_specs, whole),
        check_vma=False,
    )(
        {group.name: tables[group.name] for group in groups},
        {group.name: slots[group.name] for group in groups},
        operands,
    )
    return {**tables, **new_tables}, {**slots, **new_slots}, overflows


def _update_group(
    held: TableRows, operands: Operands, spec: BatchSpec, layout: Layout, g: int, *, checked: bool
) -> tuple[TableRows, Array]:
    """Update this device's shard of one stack; also tell whether the worst-case branch was taken."""
    group = layout.groups[g]
    ids = local_ids(operands.ids[g], spec, g)
    gradients = operands.gradients[g].astype(group.compute_dtype).reshape(-1, group.dim)

    def with_capacity(capacity: int) -> TableRows:
        sums = _summed(ids, gradients, spec, layout, g, capacity)
        return _apply(held, sums, group, operands, g)

    capacity, enough = spec.groups[g].partials, worst_case(spec, layout).groups[g].partials
    if group.num_shards == 1 and layout.axes.replicas == 1:
        return with_capacity(enough), jnp.asarray(False)
    if checked or capacity >= enough:
        return with_capacity(max(1, capacity)), jnp.asarray(False)
    capacity = max(1, capacity)
    parts = _parts(ids, spec, layout, g)
    overflow = route.make_route(ids.rows, group, capacity, parts).overflow
    overflow = collectives.any_device(overflow, layout.axes.mesh)
    updated = jax.lax.cond(overflow, lambda: with_capacity(enough), lambda: with_capacity(capacity))
    return updated, overflow


def _apply(held: TableRows, sums: RowSums, group: Group, operands: Operands, g: int) -> TableRows:
    optimizer = group.optimizer
    assert optimizer is not None, "only stacks with an optimizer are updated"
    rate = optimizer.resolve_learning_rate(operands.step, operands.learning_rates.get(g))
    with jax.named_scope("rule"):
        if not optimizer.use_gradient_accumulation:
            return occurrences.apply_each(held, sums, group, operands.step, rate)
        if optimizer.updates_every_row:
            sums = every_row(sums, group)
        return apply_rule(held, sums, group, operands.step, rate)


def _parts(ids: LocalIds, spec: BatchSpec, layout: Layout, g: int) -> Array | None:
    """Return what keeps the gradients of a row apart until they reach its owner, int32 `[N]`.

    The block of each id; every id by itself without accumulation; None where a device holds a single block.
    """
    optimizer = layout.groups[g].optimizer
    if optimizer is not None and not optimizer.use_gradient_accumulation:
        return jnp.arange(ids.rows.shape[0], dtype=jnp.int32)
    batch = spec.forms[0].batch
    if layout.blocks_per_device(batch) == 1:
        return None
    return _blocks(ids, spec, layout, g)


def _blocks(ids: LocalIds, spec: BatchSpec, layout: Layout, g: int) -> Array:
    """Return the block of the global batch that each id's example falls into, int32 `[N]`."""
    _, per_example = bag_offsets(spec, g)
    first = collectives.axis_index(layout.axes.batch_axes) * spec.local_batch
    return (first + ids.bags // per_example) // layout.block_size(spec.forms[0].batch)


def _summed(
    ids: LocalIds, gradients: Array, spec: BatchSpec, layout: Layout, g: int, capacity: int
) -> RowSums:
    """Return the rows that this device must update, with their gradients summed over all devices.

    Args:
      ids: this device's ids.
      gradients: of its activations, `[bags, D]`.
      capacity: partial sums a destination has room for.
    """
    group, axes, form = layout.groups[g], layout.axes, bag_form(spec, layout, g)
    if _fits_psum(spec, layout, g):
        return _summed_by_psum(ids, gradients, spec, layout, g)
    with jax.named_scope("dedup"):
        parts = _parts(ids, spec, layout, g)
        way = route.make_route(ids.rows, group, capacity, parts)
        ordered = gradients_in_order(gradients, ids, form, way.order)
        sums = dispatch.segment_sum(ordered, way.target, group.num_shards * capacity)
    with jax.named_scope("route"):
        received = route.send(way, sums, group, axes)
    if group.optimizer is not None and not group.optimizer.use_gradient_accumulation:
        return received
    with jax.named_scope("merge"):
        one_source = axes.batch_order(group.shard_axes).size == 1
        return route.merge(received, group, in_order=one_source)


def _fits_psum(spec: BatchSpec, layout: Layout, g: int) -> bool:
    """Tell whether a replicated stack is so small that its dense block sums are no more than the batch's ids."""
    group = layout.groups[g]
    if group.num_shards > 1 or layout.axes.replicas == 1:
        return False
    if group.optimizer is not None and not group.optimizer.use_gradient_accumulation:
        return False
    blocks = max(layout.sum_blocks, layout.axes.replicas)
    return blocks * group.rows <= spec.ids(g) * layout.axes.replicas


def _summed_by_psum(
    ids: LocalIds, gradients: Array, spec: BatchSpec, layout: Layout, g: int
) -> RowSums:
    """Sum a small replicated stack densely: `[G, R, D]` block sums, one psum, then the blocks in order.

    The psum is exact: a block is non-zero on one device only.
    """
    group, axes = layout.groups[g], layout.axes
    blocks = max(layout.sum_blocks, axes.replicas)
    cells = _blocks(ids, spec, layout, g) * group.rows + ids.rows
    cells = jnp.where(ids.rows < 0, blocks * group.rows, cells)
    ordered, order = dispatch.sort_rows(cells)
    values = gradients_in_order(gradients, ids, bag_form(spec, layout, g), order)
    sums = dispatch.segment_sum(values, ordered, blocks * group.rows)
    counts = dispatch.segment_sum(jnp.ones_like(ordered), ordered, blocks * group.rows)
    sums = collectives.psum(sums, axes.batch_axes).reshape(blocks, group.rows, group.dim)
    touched = collectives.psum(counts, axes.batch_axes).reshape(blocks, group.rows).sum(0) > 0
    total = jax.lax.fori_loop(0, blocks, lambda b, total: total + sums[b], jnp.zeros_like(sums[0]))
    rows = jnp.where(touched, jnp.arange(group.rows, dtype=ids.rows.dtype), PADDING_ID)
    return route.padded(RowSums(rows, total))

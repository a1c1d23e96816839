"""Activation gradients in, updated tables out: sums by row, the optimizer's rule, rows set.

Enters: state arrays, the ids of all stacks and a gradient a feature. Leaves: new state arrays, in
place when the caller donates the old ones. Called by the engine, inside or outside a user's jit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core import collectives, occurrences
from tpu_embed.core.apply import (
    Blocks,
    RowGradients,
    TableRows,
    apply_rule,
    compiled_rule,
    every_row,
    sum_and_apply,
)
from tpu_embed.core.batch import Batch
from tpu_embed.core.batch_spec import worst_case
from tpu_embed.core.gradients import group_gradients
from tpu_embed.core.layout import Group, Layout
from tpu_embed.core.reads import zero_after
from tpu_embed.core.route import RowSums
from tpu_embed.core.sums import (
    Task,
    exchanged,
    gathered,
    gathers,
    merged,
    overflows,
    partly_summed,
    ungrouped,
)
from tpu_embed.core.tables import slot_shapes, state_specs
from tpu_embed.core.traced import TracedIds
from tpu_embed.kernels import dispatch


class Operands(NamedTuple):
    """What an update needs beside the tables and ids.

    Attributes:
      gradients: of the activations, a leaf a feature; None is zero.
      step: int32 `[]`, t of this update, 1 at the first.
      learning_rates: scalars `[]`, by stack number, for those whose rate is read on the host.
      reads: by stack name, activations that were looked up in its table: the update comes after.
      skip: bool `[]`, leave the step out: no row or slot changes; None: never.
    """

    gradients: list[Array | None]
    step: Array
    learning_rates: dict[int, Array]
    reads: dict[str, list[Array]]
    skip: Array | None = None

    @property
    def steps_done(self) -> Array:
        """Updates applied so far, this one included unless it is left out, int32 `[]`."""
        return self.step if self.skip is None else self.step - self.skip.astype(jnp.int32)


class Updated(NamedTuple):
    """What an update returns: parts of `TableState`, bad ids `[F]`, overflows `[]`."""

    tables: dict[str, Array]
    slots: dict[str, dict[str, Array]]
    bad_ids: Array
    overflows: Array


def update(
    tables: Mapping[str, Array],
    slots: Mapping[str, dict[str, Array]],
    source: Batch | TracedIds,
    operands: Operands,
    layout: Layout,
) -> Updated:
    """Return tables and slots after one update, bad ids, and worst-case branches taken.

    Args:
      tables: `TableState.tables`.
      slots: `TableState.slots`.
      source: the ids.
      operands: gradients, step, learning rates.
      layout: the engine's.
    """
    axes = layout.axes
    trained = {g: group for g, group in enumerate(layout.groups) if group.optimizer is not None}

    def device(tables: dict, slots: dict, source: Batch | TracedIds, operands: Operands) -> Updated:
        located, overflowed = source.locate(layout), jnp.int32(0)
        new_tables, new_slots = {}, {}
        for g, group in trained.items():
            held = TableRows(tables[group.name], slots[group.name])
            gradients = group_gradients(operands.gradients, source.spec, layout, g)
            task = Task(located.ids[g], gradients, source, layout, g)
            with jax.named_scope(f"update/{group.name}"):
                held, overflow = _update_group(held, task, operands)
                held = _shared_slots_kept(held, slots[group.name], group, operands.skip)
            new_tables[group.name], new_slots[group.name] = held
            overflowed += overflow.astype(jnp.int32)
        bad_ids = collectives.psum(located.bad_ids, axes.batch_axes)
        return Updated(new_tables, new_slots, bad_ids, overflowed)

    table_specs, slot_specs = state_specs(tuple(trained.values()), axes)
    whole, batch = PartitionSpec(), axes.spec(axes.batch_axes)
    mine = axes.reshard((source, operands.gradients, operands.reads), axes.batch_axes)
    step = jax.shard_map(
        device,
        mesh=axes.mesh,
        in_specs=(table_specs, slot_specs, batch, Operands(batch, whole, whole, batch, whole)),  # type: ignore
        out_specs=Updated(table_specs, slot_specs, whole, whole),  # type: ignore
        check_vma=False,
    )
    held = [{name: arrays[name] for name in table_specs} for arrays in (tables, slots)]
    new = step(held[0], held[1], mine[0], operands._replace(gradients=mine[1], reads=mine[2]))
    return new._replace(tables={**tables, **new.tables}, slots={**slots, **new.slots})


def _update_group(held: TableRows, task: Task, operands: Operands) -> tuple[TableRows, Array]:
    """Update this device's shard of one stack; tell whether the worst-case branch was taken."""

    def with_capacity(held: TableRows, capacity: int) -> TableRows:
        return _apply(held, task, capacity, operands)

    capacity = task.spec.groups[task.g].partials
    enough = worst_case(task.spec, task.layout).groups[task.g].partials
    if task.alone:
        return with_capacity(held, enough), jnp.asarray(False)
    capacity = max(1, capacity)
    if task.source.checked or capacity >= enough:
        return with_capacity(held, capacity), jnp.asarray(False)
    overflow = collectives.any_device(overflows(task, capacity), task.layout.axes.mesh)
    held = _run_if(~overflow, lambda held: with_capacity(held, capacity), held)
    return _run_if(overflow, lambda held: with_capacity(held, enough), held), overflow


def _run_if(flag: Array, run: Callable[[TableRows], TableRows], held: TableRows) -> TableRows:
    """Return `run(held)` where `flag` is set, else `held`; in place, where a `cond` would copy."""
    return jax.lax.fori_loop(0, flag.astype(jnp.int32), lambda _, held: run(held), held)


def _apply(held: TableRows, task: Task, capacity: int, operands: Operands) -> TableRows:
    """Apply the stack's optimizer to the rows that were touched."""
    group, optimizer = task.group, task.group.optimizer
    assert optimizer is not None, "only stacks with an optimizer are updated"
    step = operands.step
    rate = optimizer.resolve_learning_rate(step, operands.learning_rates.get(task.g))
    if not optimizer.use_gradient_accumulation:
        received = exchanged(task, capacity)
        with jax.named_scope("rule"):
            return occurrences.apply_each(
                held, _to_apply(received, task, operands), group, step, rate
            )

    def in_xla(held: TableRows, received: RowSums) -> TableRows:
        sums = merged(task, received)
        with jax.named_scope("rule"):
            if optimizer.updates_every_row:
                sums = every_row(sums, group)
            return apply_rule(held, _to_apply(sums, task, operands), group, step, rate)

    rule = compiled_rule(group, step, rate)

    def in_kernel(held: TableRows, given: RowGradients, blocks: Blocks) -> TableRows:
        assert rule is not None, "only stacks with a compiled rule come here"
        return sum_and_apply(held, _to_apply(given, task, operands), blocks, rule)

    if task.alone:
        native = rule and (lambda held: in_kernel(held, *ungrouped(task)))
        return dispatch.choose(
            held, otherwise=lambda held: in_xla(held, exchanged(task, capacity)), native=native
        )
    if rule and gathers(task, capacity):
        return dispatch.choose(
            held,
            otherwise=lambda held: in_xla(held, exchanged(task, capacity)),
            native=lambda held: in_kernel(held, *gathered(task)),
        )
    received = exchanged(task, capacity)
    native = rule and (lambda held, sums: in_kernel(held, *partly_summed(sums)))
    return dispatch.choose(held, received, otherwise=in_xla, native=native)


def _to_apply(given: Any, task: Task, operands: Operands) -> Any:
    """Return `RowSums` or `RowGradients` whose rows are known after all lookups of their table.

    Where the step is left out they are of no row: their rows are then padding. A branch around the
    update would copy tables and slots instead.
    """
    rows = given.rows
    if nonempty := [read for read in operands.reads[task.group.name] if read.size]:
        rows += zero_after(nonempty).astype(rows.dtype)
    if operands.skip is not None:
        rows = jnp.where(operands.skip, jnp.asarray(PADDING_ID, rows.dtype), rows)
    return given._replace(rows=rows)


def _shared_slots_kept(
    held: TableRows, before: Mapping[str, Array], group: Group, skip: Array | None
) -> TableRows:
    """Return the shard; where the step is left out, with the slots of the whole stack as before."""
    if skip is None:
        return held
    shared = {
        name: jnp.where(skip, before[name], held.slots[name])
        for name, shape in slot_shapes(group).items()
        if not shape.per_row
    }
    return held._replace(slots={**held.slots, **shared})

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

from tpu_embed._types import PADDING_ID, Array, ArrayLike
from tpu_embed.core.batch import Batch, TracedIds, worst_case
from tpu_embed.core.exchange import RowSums, collectives
from tpu_embed.core.layout import Layout, Stack
from tpu_embed.core.lookup import zero_after
from tpu_embed.core.state import StackShard, slot_shapes, state_specs
from tpu_embed.core.update import occurrences
from tpu_embed.core.update.apply import (
    Blocks,
    RowGradients,
    apply_rule,
    compiled_rule,
    every_row,
    sum_and_apply,
)
from tpu_embed.core.update.gradients import stack_gradients
from tpu_embed.core.update.sums import (
    Task,
    all_gather_gradients,
    all_to_all_sums,
    as_row_gradients,
    local_gradients,
    merge_blocks,
    overflows,
    prefers_all_gather,
)
from tpu_embed.kernels import dispatch
from tpu_embed.kernels.rules import CompiledRule


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
    trained = {g: stack for g, stack in enumerate(layout.stacks) if stack.optimizer is not None}

    def device(tables: dict, slots: dict, source: Batch | TracedIds, operands: Operands) -> Updated:
        located, overflowed = source.locate(layout), jnp.int32(0)
        new_tables, new_slots = {}, {}
        for g, stack in trained.items():
            held = StackShard(tables[stack.name], slots[stack.name])
            gradients = stack_gradients(operands.gradients, source.spec, layout, g)
            task = Task(located.ids[g], gradients, source, layout, g)
            with jax.named_scope(f"update/{stack.label}"):
                held, overflow = _update_stack(held, task, operands)
                held = _shared_slots_kept(held, slots[stack.name], stack, operands.skip)
            new_tables[stack.name], new_slots[stack.name] = held
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


def _update_stack(held: StackShard, task: Task, operands: Operands) -> tuple[StackShard, Array]:
    """Update this device's shard of one stack; tell whether the worst-case branch was taken."""

    def with_capacity(held: StackShard, capacity: int) -> StackShard:
        return _apply(held, task, capacity, operands)

    capacity = task.spec.stacks[task.g].partials
    enough = worst_case(task.spec, task.layout).stacks[task.g].partials
    if task.alone:
        return with_capacity(held, enough), jnp.asarray(False)
    capacity = max(1, capacity)
    if task.source.checked or capacity >= enough:
        return with_capacity(held, capacity), jnp.asarray(False)
    overflow = collectives.any_device(overflows(task, capacity), task.layout.axes.mesh)
    held = _run_if(~overflow, lambda held: with_capacity(held, capacity), held)
    return _run_if(overflow, lambda held: with_capacity(held, enough), held), overflow


def _run_if(flag: Array, run: Callable[[StackShard], StackShard], held: StackShard) -> StackShard:
    """Return `run(held)` where `flag` is set, else `held`; in place, where a `cond` would copy."""
    return jax.lax.fori_loop(0, flag.astype(jnp.int32), lambda _, held: run(held), held)


def _apply(held: StackShard, task: Task, capacity: int, operands: Operands) -> StackShard:
    """Apply the stack's optimizer to the rows that were touched, by the strategy that fits.

    A compiled kernel sums gradients and applies the rule in one pass, so it is given gradients as
    early as possible; XLA's operations sum first, in blocks and over them, and apply the rule then.
    """
    rule = _StackRule.of(task, operands)
    if not task.accumulates:
        return rule.to_each_occurrence(held, all_to_all_sums(task, capacity))
    if task.alone:
        return dispatch.choose(
            held,
            otherwise=lambda held: rule.in_xla(held, all_to_all_sums(task, capacity)),
            native=rule.compiled and (lambda held: rule.in_kernel(held, *local_gradients(task))),
        )
    if rule.compiled and prefers_all_gather(task, capacity):
        return dispatch.choose(
            held,
            otherwise=lambda held: rule.in_xla(held, all_to_all_sums(task, capacity)),
            native=lambda held: rule.in_kernel(held, *all_gather_gradients(task)),
        )
    received = all_to_all_sums(task, capacity)
    native = rule.compiled and (lambda held, sums: rule.in_kernel(held, *as_row_gradients(sums)))
    return dispatch.choose(held, received, otherwise=rule.in_xla, native=native)


class _StackRule(NamedTuple):
    """The rule of one stack in one step, and the ways to apply it.

    Attributes:
      task: the stack.
      operands: of the update.
      learning_rate: of this step, scalar.
      compiled: the rule, if the compiled kernels know it; else None.
    """

    task: Task
    operands: Operands
    learning_rate: ArrayLike
    compiled: CompiledRule | None

    @classmethod
    def of(cls, task: Task, operands: Operands) -> _StackRule:
        """Return the rule of a task's stack."""
        optimizer, given = task.stack.optimizer, operands.learning_rates.get(task.g)
        assert optimizer is not None, "only stacks with an optimizer are updated"
        rate = optimizer.resolve_learning_rate(operands.step, given)
        return cls(task, operands, rate, compiled_rule(task.stack, operands.step, rate))

    def to_each_occurrence(self, held: StackShard, received: RowSums) -> StackShard:
        """Apply it once an occurrence: rows `[M]`, a row as often as it occurs, in batch order."""
        with jax.named_scope("rule"):
            given = _to_apply(received, self.task, self.operands)
            return occurrences.apply_each(
                held, given, self.task.stack, self.operands.step, self.learning_rate
            )

    def in_xla(self, held: StackShard, received: RowSums) -> StackShard:
        """Sum what came for each row, then apply it in XLA's operations."""
        stack, sums = self.task.stack, merge_blocks(self.task, received)
        with jax.named_scope("rule"):
            if stack.optimizer is not None and stack.optimizer.updates_every_row:
                sums = every_row(sums, stack)
            given = _to_apply(sums, self.task, self.operands)
            return apply_rule(held, given, stack, self.operands.step, self.learning_rate)

    def in_kernel(self, held: StackShard, given: RowGradients, blocks: Blocks) -> StackShard:
        """Sum gradients and apply it in one compiled kernel."""
        assert self.compiled is not None, "only stacks with a compiled rule come here"
        return sum_and_apply(
            held, _to_apply(given, self.task, self.operands), blocks, self.compiled
        )


def _to_apply(given: Any, task: Task, operands: Operands) -> Any:
    """Return `RowSums` or `RowGradients` whose rows are known after all lookups of their table.

    Where the step is left out they are of no row: their rows are then padding. A branch around the
    update would copy tables and slots instead.
    """
    rows = given.row_ids
    if nonempty := [read for read in operands.reads[task.stack.name] if read.size]:
        rows += zero_after(nonempty).astype(rows.dtype)
    if operands.skip is not None:
        rows = jnp.where(operands.skip, jnp.asarray(PADDING_ID, rows.dtype), rows)
    return given._replace(row_ids=rows)


def _shared_slots_kept(
    held: StackShard, before: Mapping[str, Array], stack: Stack, skip: Array | None
) -> StackShard:
    """Return the shard; where the step is left out, with the slots of the whole stack as before."""
    if skip is None:
        return held
    shared = {
        name: jnp.where(skip, before[name], held.slots[name])
        for name, shape in slot_shapes(stack).items()
        if not shape.per_row
    }
    return held._replace(slots={**held.slots, **shared})

"""Rows and slots through the optimizer's rule, and back into the tables.

Enters: this device's shard of a stack, and distinct local rows with their summed gradients, or, for
a rule that the compiled kernels know, rows whose gradients they sum themselves. Leaves: the shard
with those rows and their slots set. Called by `update.py` and `occurrences.py`.

In XLA the rule stands alone, on a padded number of rows: it is then compiled alike in every
program, and its bits do not depend on what surrounds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpu_embed._types import Array, ArrayLike
from tpu_embed.core.exchange import RowSums, padded
from tpu_embed.core.layout import Stack
from tpu_embed.core.state import StackShard, slot_format, slot_shapes
from tpu_embed.kernels import cpu, dispatch, storage
from tpu_embed.kernels.formats import RowFormat
from tpu_embed.kernels.rules import CompiledRule


class RowGradients(NamedTuple):
    """Gradients of the rows of a device's ids, not yet summed; operands of `cpu.update_rows`.

    Attributes:
      row_ids: local rows `[N]`, `PADDING_ID` for none.
      bags: int32 `[N]`, the bag of each; None: position i has bag i.
      weights: `[N]`, or None.
      factors: of every bag, or None.
      gradients: of the bags, `[examples * bags, D]` a feature.
    """

    row_ids: Array
    bags: Array | None
    weights: Array | None
    factors: Array | None
    gradients: tuple[Array, ...]


class Blocks(NamedTuple):
    """How bags are numbered: columns a feature has, examples, blocks of them (0: no blocks)."""

    columns: tuple[int, ...]
    examples: int
    blocks: int


def compiled_rule(stack: Stack, step: Array, learning_rate: ArrayLike) -> CompiledRule | None:
    """Return the stack's rule if the compiled kernels can apply it to this stack."""
    optimizer = stack.optimizer
    if optimizer is None or stack.compute_dtype != jnp.float32 or optimizer.updates_every_row:
        return None
    if stack.packing != "none":
        return None
    return optimizer.compiled_rule(step, jnp.asarray(learning_rate, stack.compute_dtype))


def sum_and_apply(
    held: StackShard, given: RowGradients, blocks: Blocks, rule: CompiledRule
) -> StackShard:
    """Sum the gradients of every row and update it, in one compiled kernel, in place.

    Args:
      held: the shard.
      given: rows, a row as often as it occurs, in batch order.
      blocks: how their bags are numbered.
      rule: the rule.
    """
    slots = [held.slots[name] for name in rule.slots]
    table, *new = cpu.update_rows(held.table, slots, *given, rule=rule, **blocks._asdict())
    return StackShard(table, dict(zip(rule.slots, new, strict=True)))


def apply_rule(
    held: StackShard, sums: RowSums, stack: Stack, step: Array, learning_rate: ArrayLike
) -> StackShard:
    """Update distinct rows.

    Args:
      held: the shard.
      sums: rows `[U]`, different from each other, the present ones ascending and no farther apart
        than their numbers are, U a multiple of `ROW_MULTIPLE`; their gradients `[U, D]`.
      stack: the stack; it has an optimizer.
      step: int32 `[]`, t.
      learning_rate: scalar.
    """
    assert stack.optimizer is not None, "only stacks with an optimizer are updated"
    shapes = slot_shapes(stack)
    rate = jnp.asarray(learning_rate, stack.compute_dtype)
    table = _read(held.table, sums.row_ids, stack.row_format)
    rows = storage.decode(table, stack.dtype).astype(stack.compute_dtype)
    slots = {
        name: storage.decode(
            _read(held.slots[name], sums.row_ids, slot_format(stack, slot)), slot.dtype
        )
        if slot.per_row
        else held.slots[name]
        for name, slot in shapes.items()
    }
    new_rows, new_slots = _alone(stack.optimizer.update_rows, rows, slots, sums.sums, step, rate)
    written = {
        name: dispatch.write_ascending_rows(
            held.slots[name],
            sums.row_ids,
            storage.encode(new_slots[name], slot.dtype),
            slot_format(stack, slot),
        )
        if slot.per_row
        else new_slots[name]
        for name, slot in shapes.items()
    }
    stored = storage.encode(new_rows, stack.dtype)
    return StackShard(
        dispatch.write_ascending_rows(held.table, sums.row_ids, stored, stack.row_format), written
    )


def _read(array: Array, rows: Array, form: RowFormat) -> Array:
    return form.unpack(dispatch.read_rows(array, rows, form))


def _alone(rule: Callable[..., tuple], *operands: Any) -> tuple:
    """Return `rule(rows, slots, gradients, step, rate)`, compiled apart from all around it.

    XLA's CPU backend drops optimization barriers before it fuses, and which products and sums
    become one multiply-add depends on the fusion; a branch is compiled by itself. The step is
    always positive, which XLA cannot know.
    """

    def branch(*operands: Any) -> tuple:
        return jax.lax.cond(operands[3] > 0, rule, lambda *unchanged: unchanged[:2], *operands)

    operands = jax.lax.optimization_barrier(operands)
    done = jax.lax.platform_dependent(*operands, cpu=branch, default=rule)
    return jax.lax.optimization_barrier(done)


def every_row(sums: RowSums, stack: Stack) -> RowSums:
    """Return all R rows with their gradients: for a rule that decays every row, touched or not."""
    dense = dispatch.set_rows(
        jnp.zeros((stack.num_rows, stack.dim), sums.sums.dtype), sums.row_ids, sums.sums
    )
    return padded(RowSums(jnp.arange(stack.num_rows, dtype=sums.row_ids.dtype), dense))

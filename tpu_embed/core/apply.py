"""Rows and slots through the optimizer's rule, and back into the tables.

Enters: this device's shard of a stack, and distinct local rows with their summed gradients. Leaves:
the shard with those rows and their slots set. Called by `update.py` and `occurrences.py`.

The rule stands alone, on a padded number of rows: XLA then compiles it alike in every program, and
its bits do not depend on what surrounds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpu_embed._types import Array, ArrayLike
from tpu_embed.core.layout import Group
from tpu_embed.core.route import RowSums, padded
from tpu_embed.core.tables import slot_shapes
from tpu_embed.kernels import dispatch, storage


class TableRows(NamedTuple):
    """This device's shard of a stack: stored rows `[R, D]`, and its slots by name."""

    table: Array
    slots: dict[str, Array]


def apply_rule(
    held: TableRows, sums: RowSums, group: Group, step: Array, learning_rate: ArrayLike
) -> TableRows:
    """Update distinct rows.

    Args:
      held: the shard.
      sums: rows `[U]`, different from each other, U a multiple of `ROW_MULTIPLE`; their gradients
        `[U, D]`.
      group: the stack; it has an optimizer.
      step: int32 `[]`, t.
      learning_rate: scalar.
    """
    assert group.optimizer is not None, "only stacks with an optimizer are updated"
    shapes = slot_shapes(group)
    rate = jnp.asarray(learning_rate, group.compute_dtype)
    table = dispatch.gather_rows(held.table, sums.rows)
    rows = storage.decode(table, group.dtype).astype(group.compute_dtype)
    slots = {
        name: storage.decode(dispatch.gather_rows(held.slots[name], sums.rows), slot.dtype)
        if slot.per_row
        else held.slots[name]
        for name, slot in shapes.items()
    }
    new_rows, new_slots = _alone(group.optimizer.update_rows, rows, slots, sums.sums, step, rate)
    written = {
        name: dispatch.set_rows(
            held.slots[name], sums.rows, storage.encode(new_slots[name], slot.dtype)
        )
        if slot.per_row
        else new_slots[name]
        for name, slot in shapes.items()
    }
    stored = storage.encode(new_rows, group.dtype)
    return TableRows(dispatch.set_rows(held.table, sums.rows, stored), written)


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


def every_row(sums: RowSums, group: Group) -> RowSums:
    """Return all R rows with their gradients: for a rule that decays every row, touched or not."""
    dense = dispatch.set_rows(
        jnp.zeros((group.rows, group.dim), sums.sums.dtype), sums.rows, sums.sums
    )
    return padded(RowSums(jnp.arange(group.rows, dtype=sums.rows.dtype), dense))

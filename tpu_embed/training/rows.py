"""A rule on the rows of a parameter that its gradient names, and on nothing else of it.

Enters: a parameter, its slots and a sparse gradient. Leaves: parameter and slots, those rows set.
Called by `Optimizer.apply_gradients`; under a jit that donates them they are updated in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from tpu_embed._checks import message
from tpu_embed._types import Array, ArrayLike
from tpu_embed.core.indexed_slices import IndexedSlices
from tpu_embed.kernels import dispatch
from tpu_embed.optimizers.base import TableOptimizer

__all__ = ["update_touched"]


def update_touched(
    rule: TableOptimizer,
    table: Array,
    slots: Mapping[str, Array],
    gradient: IndexedSlices,
    *,
    step: ArrayLike,
    learning_rate: ArrayLike,
) -> tuple[Array, dict[str, Array]]:
    """Update the rows that a gradient names, each once, with the sum of its values.

    Args:
      rule: of rows.
      table: `[V, …, D]`; its rows are all `[D]` of a touched entry of the first axis.
      slots: `[V, …, D]`, `[V, …]` for one number a row, or shared by all rows.
      gradient: of the table.
      step: int32 scalar t, 1 at the first update.
      learning_rate: scalar.

    Returns:
      table and slots, in their shapes and dtypes.

    Raises:
      ValueError: a table without a last axis, or slots that are not by row.

    Example:
      >>> from tpu_embed.optimizers import SGD
      >>> gradient = IndexedSlices(jnp.ones((2, 1)), jnp.array([2, 2]), (3, 1))
      >>> done, _ = update_touched(
      ...     SGD(0.5), jnp.ones((3, 1)), {}, gradient, step=1, learning_rate=0.5
      ... )
      >>> done.tolist()
      [[1.0], [1.0], [0.0]]
    """
    _check_rank(table)
    dtype = jnp.float64 if table.dtype == jnp.float64 else jnp.float32
    shapes = rule.slot_shapes(table.shape[-1], dtype)
    _check_slots(table, slots, {name: s.shape for name, s in shapes.items() if s.per_row})
    unique = dataclasses.replace(gradient, values=gradient.values.astype(dtype)).deduplicate()

    def read(array: Array, part: tuple[int, ...]) -> Array:
        return dispatch.gather_rows(array, unique.indices).reshape(-1, *part)

    def write(array: Array, rows: Array) -> Array:
        values = rows.astype(array.dtype).reshape(-1, *array.shape[1:])
        return dispatch.set_rows(array, unique.indices, values)

    with jax.named_scope("update_touched"):
        rows = read(table, table.shape[-1:]).astype(dtype)
        held = {
            name: read(slots[name], s.shape).astype(s.dtype) if s.per_row else slots[name]
            for name, s in shapes.items()
        }
        summed = unique.values.reshape(rows.shape).astype(dtype)
        new_rows, new = rule.update_rows(rows, held, summed, step, learning_rate)
        written = {
            name: write(slots[name], new[name]) if s.per_row else new[name]
            for name, s in shapes.items()
        }
        return write(table, new_rows), written


def _check_rank(table: Array) -> None:
    if table.ndim < 2:
        raise ValueError(
            message(
                "IndexedSlices",
                expected="the gradient of a parameter [V, …, D]",
                got=f"one of shape {table.shape}",
                remedy="give the table a last axis of one: table[:, None]",
            )
        )


def _check_slots(
    table: Array, slots: Mapping[str, Array], parts: Mapping[str, tuple[int, ...]]
) -> None:
    for name, part in parts.items():
        expected = (*table.shape[:-1], *part)
        if slots[name].shape != expected:
            what, got = f"slot {name}", f"shape {slots[name].shape}"
            remedy = "a transform that keeps other slots updates whole parameters only"
            raise ValueError(message(what, expected=f"{expected}", got=got, remedy=remedy))

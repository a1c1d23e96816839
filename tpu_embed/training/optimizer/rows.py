"""A sparse update: an optimizer's rule on just the rows of a parameter that its gradient names.

The rows and their slots are gathered, updated by the rule, and written back. Under a jit that
donates the arrays this happens in place. An engine's tables have a function of their own,
`apply_rule` of `core/update/apply.py`: it knows the row format of a stack and gives the same bits
in every program, while here a parameter is an array `[V, …, D]` of the user's own tree, and the
rule is compiled as part of the user's program.

Input: a parameter, its slots, and a sparse gradient.
Output: the parameter and the slots, with those rows set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from tpu_embed._checks import message
from tpu_embed._types import Array, ArrayLike
from tpu_embed.kernels import dispatch
from tpu_embed.optimizers.base import TableOptimizer
from tpu_embed.optimizers.dense import working_dtype
from tpu_embed.sparse import IndexedSlices


def update_parameter_rows(
    rule: TableOptimizer,
    table: Array,
    slots: Mapping[str, Array],
    gradient: IndexedSlices,
    *,
    step: ArrayLike,
    learning_rate: ArrayLike,
) -> tuple[Array, dict[str, Array]]:
    """Update the rows that a gradient names, each once, with the sum of its values.

    `check_rows` must have accepted the table and the slots.

    Args:
      rule: the rule over rows.
      table: `[V, …, D]`. All vectors `[D]` of an entry of the first axis are updated together.
      slots: `[V, …, D]`, or `[V, …]` for one number per row, or an array shared by all rows.
      gradient: the gradient by the table.
      step: int32 scalar t, 1 at the first update.
      learning_rate: scalar.

    Returns:
      the table and the slots, in their shapes and dtypes.

    Example:
      >>> from tpu_embed.optimizers import SGD
      >>> gradient = IndexedSlices(jnp.ones((2, 1)), jnp.array([2, 2]), (3, 1))
      >>> done, _ = update_parameter_rows(
      ...     SGD(0.5), jnp.ones((3, 1)), {}, gradient, step=1, learning_rate=0.5
      ... )
      >>> done.tolist()
      [[1.0], [1.0], [0.0]]
    """
    # Row ids [2, 2, 0] of a table [V, D] with values a, b, c become [2, 0, V] with a + b, c and
    # zeros. The id V is padding: it is never written. Sums are made in the rule's dtype.
    dtype = working_dtype(table)
    shapes = rule.slot_shapes(table.shape[-1], dtype)
    unique = dataclasses.replace(gradient, values=gradient.values.astype(dtype)).deduplicate()

    # The rule sees a matrix of rows. Table [V, M, D] and U unique row ids: read gives [U·M, D],
    # write reshapes back to [U, M, D]. A slot with one number per row is [V, M] and [U·M].
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


def check_rows(
    what: str, rule: TableOptimizer, table: ArrayLike, slots: Mapping[str, Array]
) -> None:
    """Refuse a parameter that a rule cannot update row by row.

    Args:
      what: the name of the gradient, for messages.
      rule: the rule over rows.
      table: the parameter.
      slots: the parameter's slots and the shared ones, by name.

    Raises:
      ValueError: the table has less than two axes, or a slot does not have the shape that the rule
        expects per row.
    """
    shape = jnp.shape(table)
    if len(shape) < 2:
        raise ValueError(
            message(
                what,
                expected="an array, or IndexedSlices of a parameter [V, …, D]",
                got=f"IndexedSlices of one of shape {shape}",
                remedy="give the table a last axis of one: table[:, None]",
            )
        )
    # Table [V, M, D]: a slot of shape [D] per row is [V, M, D], one of shape [] is [V, M].
    for name, slot in rule.slot_shapes(shape[-1], working_dtype(table)).items():
        expected = (*shape[:-1], *slot.shape) if slot.per_row else slot.shape
        got = jnp.shape(slots[name]) if name in slots else None
        if got != expected:
            raise ValueError(
                message(
                    f"{what}: slot {name}",
                    expected=f"shape {expected}",
                    got="none" if got is None else f"shape {got}",
                    remedy="a transform that keeps such slots needs dense gradients",
                )
            )

"""A rule that a user writes as a function of one row, its slots and its gradient.

Input: rows, the slots that the user declares, and gradients.
Output: the rows and the slots that the user's function returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

import jax
import jax.numpy as jnp

from tpu_embed._checks import refuse
from tpu_embed._types import Array
from tpu_embed.kernels.operands import CompiledRule
from tpu_embed.optimizers.base import LearningRate, Slot, Slots, Updated
from tpu_embed.optimizers.row_optimizer import LEARNING_RATE, RowOptimizer, slot_values

Rule = Callable[[Array, Array, dict[str, Array], Array, Array], tuple[Array, Mapping[str, Array]]]


def _checked_rule(what: str, rule: Any) -> Any:
    if not callable(rule):
        refuse(
            what,
            expected="a function (gradient, row, slots, learning_rate, step) -> (row, slots)",
            got=repr(rule),
        )
    return rule


@dataclasses.dataclass(frozen=True)
class CustomOptimizer(RowOptimizer):
    """Update each row with a function of the user's.

        w, slots = rule(g, w, slots, lr, t)

    The rule is mapped over the rows, so it sees one row at a time. If it sums over the row, use
    `row_sum`, `row_mean` and `row_norm`, which give the same bits for every number of devices and
    every placement (on CPU); `jnp.sum` does not. Two of these optimizers are equal if their rule is
    the same function and their options are equal. So define the function once, or else tables that
    use it do not stack.

    Args:
      rule: `(gradient [D], row [D], slots {name: [D]}, learning_rate scalar, step int32 scalar) ->
        (row [D], slots)`, in JAX functions.
      slots: the initial value of each slot by name: a number, or an initializer `(key, shape,
        dtype) -> array`, which is called once per row with the shape `(1, D)`.
      learning_rate: a number, a schedule of the step, or a callable without arguments.

    The other options are those of `RowOptimizer`.

    Raises:
      ValueError: an option is out of its range; at trace time, the rule returns another shape or
        other slots than it was given.

    Example:
      >>> import jax.numpy as jnp
      >>> def signed(gradient, row, slots, learning_rate, step):
      ...     return row - learning_rate * jnp.sign(gradient), {"seen": slots["seen"] + 1}
      >>> optimizer = CustomOptimizer(signed, {"seen": 0}, 0.5)
      >>> slots, g = {"seen": jnp.zeros((1, 2))}, jnp.array([[4.0, -8.0]])
      >>> rows, slots = optimizer.update_rows(jnp.ones((1, 2)), slots, g, 1, 0.5)
      >>> rows.tolist(), slots["seen"].tolist()
      ([[0.5, 1.5]], [[1.0, 1.0]])

    Reference:
      The custom optimizer of TensorFlow's TPU embedding: a function of gradient, weights and slots.
    """

    rule: Rule = field(metadata={"convert": _checked_rule})
    slots: Any = field(metadata={"convert": slot_values})
    learning_rate: LearningRate = field(default=0.01, metadata=LEARNING_RATE)

    def declared_slots(self) -> tuple[Slot, ...]:
        return tuple(Slot(name, initial) for name, initial in self.slots)

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        return None

    def apply_rule(self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array) -> Updated:
        def update_row(g: Array, w: Array, slots: Slots) -> Updated:
            returned = self.rule(g, w, slots, lr, t)
            if not isinstance(returned, tuple) or len(returned) != 2:
                refuse("rule", expected="a pair (row, slots)", got=type(returned).__name__)
            new_w, new_slots = returned
            return _as_before("row", new_w, w), _same_slots(new_slots, slots)

        return jax.vmap(update_row)(g, w, slots)


def _same_slots(new: Mapping[str, Any], old: Slots) -> Slots:
    """Return the slots that the rule returned; `ValueError` if it was given other slots."""
    if not isinstance(new, Mapping) or set(new) != set(old):
        refuse(
            "slots of the rule",
            expected=f"{sorted(old)}",
            got=sorted(new) if isinstance(new, Mapping) else repr(new),
        )
    return {name: _as_before(f"slot {name!r} of the rule", new[name], old[name]) for name in old}


def _as_before(what: str, new: Any, old: Array) -> Array:
    """Return an array in the dtype of the old one; `ValueError` if the shapes differ."""
    if jnp.shape(new) != old.shape:
        refuse(what, expected=f"shape {old.shape}", got=jnp.shape(new))
    return jnp.asarray(new).astype(old.dtype)

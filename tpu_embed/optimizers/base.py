"""What an optimizer of a table is: rows, slots and gradients in, rows and slots out.

`TableOptimizer` is all that the engine needs to know. Our rules come to it through `RowOptimizer`,
any other optax transform through `OptaxOptimizer`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, final

from tpu_embed._types import Array, ArrayLike
from tpu_embed.kernels.rules import CompiledRule
from tpu_embed.optimizers.learning_rate import LearningRate, resolve

Slots = dict[str, Array]
Updated = tuple[Array, Slots]
"""Rows and slots after an update."""


@dataclasses.dataclass(frozen=True)
class SlotShape:
    """Shape of one slot.

    Args:
      shape: of one row's part, without the V axis: `(D,)`, or `()` for one number a row. With
        `per_row=False`: of the one array that the whole stack shares.
      dtype: of the array.
      per_row: whether each row has its own.
    """

    shape: tuple[int, ...]
    dtype: Any
    per_row: bool = True


@dataclasses.dataclass(frozen=True)
class Slot:
    """Declaration of a slot by a rule.

    Args:
      name: of the slot.
      initial: a number, or an initializer `(key, shape, dtype) -> array`.
      one_number: one number a row instead of D.
      every_row: the rule changes it at every step in every row, also in rows that no id touches.
    """

    name: str
    initial: Any
    one_number: bool = False
    every_row: bool = False


class TableOptimizer(abc.ABC):
    """Updates rows of a table."""

    learning_rate: LearningRate | None
    """Constant, schedule or callable; None where an optax transform holds its own."""
    use_gradient_accumulation: bool
    """Whether the gradients of a row are summed before one update."""

    @property
    @abc.abstractmethod
    def updates_every_row(self) -> bool:
        """Whether every row counts as touched at every step."""

    @abc.abstractmethod
    def slot_shapes(self, dim: int, dtype: Any) -> dict[str, SlotShape]:
        """Return the slots of rows `[dim]`, by name; `dtype` is that of the arithmetic."""

    @abc.abstractmethod
    def init_slots(self, rows: Array, keys: Array) -> Slots:
        """Return the slots of fresh rows.

        Args:
          rows: float32 or float64 `[n, D]`.
          keys: JAX keys `[n]`, one a row.

        Returns:
          Per slot an array `[n, ...]`, or as it is when it is not per row.
        """

    @abc.abstractmethod
    def update_rows(
        self,
        rows: Array,
        slots: Mapping[str, Array],
        gradients: Array,
        step: ArrayLike,
        learning_rate: ArrayLike,
    ) -> Updated:
        """Return rows and slots after one update.

        Args:
          rows: float32 or float64 `[n, D]`.
          slots: as `init_slots` made them.
          gradients: `[n, D]`, the sum of each row's gradients.
          step: int32 scalar t, 1 at the first update.
          learning_rate: scalar of this step.

        Returns:
          Rows `[n, D]` and slots, same shapes and dtypes.
        """

    @abc.abstractmethod
    def compiled_rule(self, step: ArrayLike, learning_rate: Array) -> CompiledRule | None:
        """Return the update as the compiled kernels take it, or None: they do not know it.

        Args:
          step: int32 scalar t, 1 at the first update.
          learning_rate: float32 scalar of this step.
        """

    @final
    def resolve_learning_rate(self, step: ArrayLike, operand: ArrayLike | None) -> ArrayLike:
        """Return this step's learning rate; `operand` is the value of a callable without arguments.

        Raises:
          ValueError: such a callable, and no operand.
        """
        return resolve(self.learning_rate, step, operand)

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return class name and hyperparameters as plain objects."""

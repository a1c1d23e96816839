"""The interface of a table's optimizer: rows, slots and gradients in, rows and slots out.

The engine needs nothing but `TableOptimizer`. Our own rules implement it through `RowOptimizer`,
other optax transforms through `OptaxOptimizer`.

Input: rows, their slots, and their gradients.
Output: the rows and the slots after one update.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, final

from tpu_embed._types import Array, ArrayLike
from tpu_embed.kernels.operands import CompiledRule
from tpu_embed.optimizers.learning_rate import LearningRate, resolve

Slots = dict[str, Array]
Updated = tuple[Array, Slots]
"""Rows and slots after an update."""


@dataclasses.dataclass(frozen=True)
class SlotShape:
    """Shape of one slot.

    Args:
      shape: the shape of one row's part, without the axis V: `(D,)`, or `()` for one number per
        row. With `per_row=False` it is the shape of the single array that the whole stack shares.
      dtype: the dtype of the array.
      per_row: whether each row has its own part.
    """

    shape: tuple[int, ...]
    dtype: Any
    per_row: bool = True


@dataclasses.dataclass(frozen=True)
class Slot:
    """Declaration of a slot by a rule.

    Args:
      name: the name of the slot.
      initial: a number, or an initializer `(key, shape, dtype) -> array`.
      one_number: whether the slot has one number per row instead of D.
      every_row: whether the rule changes the slot of every row at every step, also in rows that no
        id touches.
    """

    name: str
    initial: Any
    one_number: bool = False
    every_row: bool = False


class TableOptimizer(abc.ABC):
    """Update rows of a table."""

    learning_rate: LearningRate | None
    """A constant, schedule or callable; None for an optax transform, which holds its own."""
    use_gradient_accumulation: bool
    """Whether the gradients of a row are summed before one update."""

    @property
    @abc.abstractmethod
    def updates_every_row(self) -> bool:
        """Whether every row counts as touched at every step."""

    @abc.abstractmethod
    def slot_shapes(self, dim: int, dtype: Any) -> dict[str, SlotShape]:
        """Return the shapes of the slots by name.

        Args:
          dim: the length of a row.
          dtype: the dtype of the rule's arithmetic.
        """

    @abc.abstractmethod
    def init_slots(self, rows: Array, keys: Array) -> Slots:
        """Return the slots of fresh rows.

        Args:
          rows: float32 or float64 `[n, D]`.
          keys: JAX keys `[n]`, one per row.

        Returns:
          one array per slot: `[n, ...]`, or without the first axis if the slot is not per row.
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
          slots: the slots, shaped as `init_slots` returns them.
          gradients: `[n, D]`, the sum of each row's gradients.
          step: int32 scalar t, 1 at the first update.
          learning_rate: scalar, the learning rate of this step.

        Returns:
          rows `[n, D]` and slots, in the same shapes and dtypes.
        """

    @abc.abstractmethod
    def compiled_rule(self, step: ArrayLike, learning_rate: Array) -> CompiledRule | None:
        """Return the update as data for the compiled kernels, or None if they do not implement it.

        Args:
          step: int32 scalar t, 1 at the first update.
          learning_rate: float32 scalar, the learning rate of this step.
        """

    @final
    def resolve_learning_rate(self, step: ArrayLike, operand: ArrayLike | None) -> ArrayLike:
        """Return the learning rate of this step.

        Args:
          step: int32 scalar t, 1 at the first update.
          operand: the value of a rate that is a callable without arguments, otherwise None.

        Raises:
          ValueError: the rate is such a callable, and `operand` is None.
        """
        return resolve(self.learning_rate, step, operand)

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the class name and the hyperparameters as plain objects."""

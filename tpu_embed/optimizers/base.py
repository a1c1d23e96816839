"""The interface of a table's optimizer: rows, slots and gradients in, rows and slots out.

The engine needs nothing but `TableOptimizer`. Our own rules implement it through `RowOptimizer`,
other optax transforms through `OptaxOptimizer`.

A learning rate is of one of four kinds. A number is a constant. A callable with a required
positional argument is a schedule, as in optax: it is called with the number of updates done so far
(0 at the first). Any other callable is called without arguments: the host calls it once per update
and passes its value to the compiled program, so that a new value needs no new compilation. An optax
transform has its own.

Input: rows, their slots, and their gradients.
Output: the rows and the slots after one update.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import inspect
from collections.abc import Callable, Mapping
from typing import Any, final

import jax
import jax.numpy as jnp

from tpu_embed._checks import is_number, message, refuse
from tpu_embed._types import Array, ArrayLike
from tpu_embed.kernels.operands import CompiledRule

LearningRate = float | Callable[..., Any]


class LearningRateKind(enum.Enum):
    """How the value of a learning rate is found at a step."""

    CONSTANT = "constant"
    SCHEDULE = "schedule"
    HOST = "host"
    TRANSFORM = "transform"
    """The optax transform holds its own learning rate."""


def learning_rate_kind(learning_rate: LearningRate | None) -> LearningRateKind:
    """Return the kind of a learning rate.

    Args:
      learning_rate: a number, a callable, or None for an optax transform, which holds its own.

    Returns:
      the kind. A callable is a SCHEDULE if one of its positional arguments has no default,
      otherwise HOST.

    Example:
      >>> learning_rate_kind(0.1).value, learning_rate_kind(lambda count: 0.1 / (1 + count)).value
      ('constant', 'schedule')
      >>> learning_rate_kind(lambda: 0.1).value
      'host'

    Reference:
      optax: a schedule is a function of the count of updates.
    """
    if learning_rate is None:
        return LearningRateKind.TRANSFORM
    if not callable(learning_rate):
        return LearningRateKind.CONSTANT
    takes_step = any(p.kind is not p.KEYWORD_ONLY for p in _required(learning_rate))
    return LearningRateKind.SCHEDULE if takes_step else LearningRateKind.HOST


def checked_learning_rate(what: str, learning_rate: Any) -> LearningRate:
    """Return a checked learning rate: a Python float, or the callable.

    Raises:
      ValueError: the rate is neither a number nor a callable, or the callable needs more than the
        step, or it has no hash (equal optimizers must have equal hashes).
    """
    if not callable(learning_rate):
        if not is_number(learning_rate):
            refuse(
                what,
                expected="a number, a schedule of the step, or a callable without arguments",
                got=repr(learning_rate),
            )
        return float(learning_rate)
    required = _required(learning_rate)
    if len(required) > 1 or any(p.kind is p.KEYWORD_ONLY for p in required):
        refuse(
            what,
            expected="a callable of the step or without arguments",
            got=f"one that needs {', '.join(p.name for p in required)}",
        )
    try:
        hash(learning_rate)
    except TypeError:
        remedy = "define __hash__ beside __eq__, or wrap it in a function"
        raise ValueError(
            message(
                what,
                expected="a hashable callable",
                got=repr(learning_rate),
                remedy=remedy,
            )
        ) from None
    return learning_rate


def _scheduled(schedule: Callable[..., Any], count: Any) -> Any:
    """Return the schedule's value; `ValueError` if it is not one real number.

    Schedules of optax need JAX's standard dtype promotion, even if the user's program is strict.
    """
    with jax.numpy_dtype_promotion("standard"):
        value = schedule(count)
    dtype = getattr(value, "dtype", None)
    real = dtype is not None and (
        jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    )
    if is_number(value) or (real and jnp.shape(value) == ()):
        return value
    refuse(
        f"learning_rate {getattr(schedule, '__qualname__', repr(schedule))}",
        expected="a schedule that returns a number",
        got=repr(value) if dtype is None else f"{dtype} of shape {jnp.shape(value)}",
    )


def _required(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters that a call must give; [] without a signature, as of some built-ins."""
    try:
        every = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    # *args and **kwargs have no default, but need not be given.
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in every if p.default is p.empty and p.kind not in several]


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
    def compiled_rule(
        self, step: ArrayLike, learning_rate: Array
    ) -> CompiledRule | None:
        """Return the update as data for the compiled kernels, or None if they do not implement it.

        Args:
          step: int32 scalar t, 1 at the first update.
          learning_rate: float32 scalar, the learning rate of this step.
        """

    @final
    def resolve_learning_rate(
        self, step: ArrayLike, operand: ArrayLike | None
    ) -> ArrayLike:
        """Return the learning rate of this step.

        Args:
          step: int32 scalar t, 1 at the first update; a schedule is called with t - 1.
          operand: what a callable without arguments returned before the compiled program ran; None
            for other kinds.

        Returns:
          a scalar; 0.0 if the rate is None, because an optax transform ignores it.

        Raises:
          ValueError: the rate is such a callable and there is no operand, or it is a schedule that
            does not return a number.
        """
        rate: Any = self.learning_rate
        kind = learning_rate_kind(rate)
        if kind is LearningRateKind.SCHEDULE:
            return _scheduled(rate, step - 1)
        if kind is LearningRateKind.CONSTANT:
            return rate
        if kind is LearningRateKind.TRANSFORM:
            return 0.0
        if operand is None:
            refuse(
                "learning_rate",
                expected="the value of its callable, called outside the compiled program",
                got="none",
                remedy="pass update(..., learning_rates=engine.learning_rates())",
            )
        return operand

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the class name and the hyperparameters as plain objects."""

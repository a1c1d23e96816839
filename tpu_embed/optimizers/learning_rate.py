"""The kinds of learning rate: a constant, a schedule of the step, a host callable, optax's own.

A number is a constant. A callable with a required positional argument is a schedule, as in optax:
it is called with the number of updates done so far (0 at the first). Any other callable is called
without arguments: the host calls it once per update and passes its value to the compiled program,
so that a new value needs no new compilation.

Input: a learning rate as a user gives it; the step.
Output: its kind; its value at the step.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tpu_embed._checks import is_number, message
from tpu_embed._types import Array

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
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in _parameters(learning_rate) if p.default is p.empty]
    takes_step = any(p.kind in positional for p in required)
    return LearningRateKind.SCHEDULE if takes_step else LearningRateKind.HOST


def checked_learning_rate(what: str, learning_rate: Any) -> LearningRate:
    """Return a checked learning rate: a Python float, or the callable.

    Raises:
      ValueError: the rate is neither a number nor a callable, or the callable needs more than the
        step, or it has no hash (equal optimizers must have equal hashes).
    """
    if not callable(learning_rate):
        if not is_number(learning_rate):
            expected = "a number, a schedule of the step, or a callable without arguments"
            raise ValueError(message(what, expected=expected, got=repr(learning_rate)))
        return float(learning_rate)
    # *args and **kwargs have no default, but need not be given.
    named = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [
        p for p in _parameters(learning_rate) if p.default is p.empty and p.kind not in named
    ]
    keyword_only = any(p.kind is inspect.Parameter.KEYWORD_ONLY for p in required)
    if len(required) > 1 or keyword_only:
        got = f"one that needs {', '.join(p.name for p in required)}"
        raise ValueError(
            message(what, expected="a callable of the step or without arguments", got=got)
        )
    try:
        hash(learning_rate)
    except TypeError:
        remedy = "define __hash__ beside __eq__, or wrap it in a function"
        raise ValueError(
            message(what, expected="a hashable callable", got=repr(learning_rate), remedy=remedy)
        ) from None
    return learning_rate


def resolve(learning_rate: LearningRate | None, step: Any, operand: Any) -> Array | float:
    """Return the learning rate of one update.

    Args:
      learning_rate: a constant, a schedule, a host callable, or None.
      step: int32 scalar t, 1 at the first update; a schedule is called with t - 1.
      operand: scalar, what a host callable returned before the compiled program ran; None for
        other kinds.

    Returns:
      a scalar; 0.0 if the rate is None, because an optax transform ignores it.

    Raises:
      ValueError: the rate is a host callable and there is no operand, or the rate is a schedule
        that does not return a number.

    Example:
      >>> resolve(lambda count: 0.5**count, 3, None)
      0.25
    """
    kind = learning_rate_kind(learning_rate)
    if kind is LearningRateKind.SCHEDULE:
        return _scheduled(learning_rate, step - 1)  # type: ignore[arg-type]
    if kind is LearningRateKind.CONSTANT:
        return learning_rate  # type: ignore[return-value]
    if kind is LearningRateKind.TRANSFORM:
        return 0.0
    if operand is None:
        raise ValueError(
            message(
                "learning_rate",
                expected="the value of its callable, called outside the compiled program",
                got="none",
                remedy="pass update(..., learning_rates=engine.learning_rates())",
            )
        )
    return operand


def _scheduled(schedule: Callable[..., Any], count: Any) -> Any:
    """Return the schedule's value; `ValueError` if it is not one real number.

    Schedules of optax need JAX's standard dtype promotion, even if the user's program is strict.
    """
    with jax.numpy_dtype_promotion("standard"):
        value = schedule(count)
    dtype = getattr(value, "dtype", None)
    if is_number(value) or (dtype is not None and jnp.shape(value) == () and _is_real(dtype)):
        return value
    what = f"learning_rate {getattr(schedule, '__qualname__', repr(schedule))}"
    got = repr(value) if dtype is None else f"{dtype} of shape {jnp.shape(value)}"
    raise ValueError(message(what, expected="a schedule that returns a number", got=got))


def _is_real(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a callable; [] if it has no signature, as some built-ins."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []

"""Validation helpers: small predicates, and one wording for every error.

An error names the argument or feature path, what was expected, what was got, and the remedy.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from tpu_embed._types import Tracer

_MOST_LINES = 20
"""Of a message of many."""


def message(what: str, *, expected: str, got: Any, remedy: str = "") -> str:
    """Return `what: expected …, got …; remedy`, the wording of every error of this package."""
    text = f"{what}: expected {expected}, got {got}"
    return f"{text}; {remedy}" if remedy else text


def message_of_many(what: str, messages: Sequence[str], *, remedy: str) -> str:
    """Return several messages about one thing as one: a line for each, and one for the remedy.

    Args:
      what: what they are about.
      messages: at least one; of more than `_MOST_LINES` the first ones are shown.
      remedy: what helps.

    Example:
      >>> print(message_of_many("f", ["a: expected 1, got 2", "b: expected 3, got 4"], remedy="x"))
      f: a: expected 1, got 2
        b: expected 3, got 4
        x
    """
    if len(messages) == 1:
        return f"{what}: {messages[0]}; {remedy}"
    shown, left = messages[:_MOST_LINES], len(messages) - _MOST_LINES
    more = [f"and {left} more"] if left > 0 else []
    return f"{what}: " + "\n  ".join([*shown, *more, remedy])


def is_int(value: Any) -> bool:
    """Tell whether `value` is an integer (Python or NumPy); a bool is not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Tell whether `value` is a real number (Python or NumPy scalar); a bool is not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_int(what: str, value: Any, *, minimum: int) -> int:
    """Return `value` as an int.

    Raises:
      ValueError: `value` is not an integer of at least `minimum`.
    """
    if not is_int(value) or value < minimum:
        raise ValueError(message(what, expected=f"an integer >= {minimum}", got=repr(value)))
    return int(value)


def check_choice(what: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """Return `value`.

    Raises:
      ValueError: `value` is none of `choices`.
    """
    if value not in choices:
        words = " | ".join(repr(choice) for choice in choices)
        raise ValueError(message(what, expected=words, got=repr(value)))
    return value


def check_live(what: str, arrays: Iterable[Any]) -> None:
    """Check that no array was donated or deleted: a compiled program may crash on one.

    Args:
      what: what they are, for messages.
      arrays: anything; only arrays on devices can have been donated.

    Raises:
      ValueError: one was.
    """
    for array in arrays:
        if isinstance(array, jax.Array) and not isinstance(array, Tracer) and array.is_deleted():
            remedy = "go on with what that call returned; donate_argnums says what a jit donates"
            got = "one that was donated to an earlier call, or deleted"
            raise ValueError(message(what, expected="arrays that exist", got=got, remedy=remedy))

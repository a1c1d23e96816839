"""Options of a rule: which values are allowed, and how they are stored.

Optimizers are equal by value, so every option is stored in one way: `0.1`, `np.float32(0.1)` and a
0-d array all become a Python float. Each field of a rule says in its metadata what it accepts.

Input: an optimizer as a user constructs it.
Output: the same optimizer with every option checked and normalised.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tpu_embed._checks import is_number, message
from tpu_embed.optimizers.learning_rate import checked_learning_rate

Bounds = tuple[float | None, float | None]


def accepts(expected: str, allowed: Callable[[Any, Any], bool]) -> dict[str, Any]:
    """Return the metadata of a field whose value v must satisfy `allowed(v, optimizer)`.

    Args:
      expected: the condition in words, for the error.
      allowed: the condition, on the value and the whole optimizer.
    """
    return {"expected": expected, "allowed": allowed}


def converted(convert: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return the metadata of a field whose value is stored as `convert(what, value)`."""
    return {"convert": convert}


POSITIVE = accepts("a number > 0", lambda value, _: value > 0)
NON_NEGATIVE = accepts("a number >= 0", lambda value, _: value >= 0)
FRACTION = accepts("a number in [0, 1)", lambda value, _: 0 <= value < 1)
"""The metadata of a rate of a moving average."""
LEARNING_RATE = converted(checked_learning_rate)


def normalise(optimizer: Any) -> None:
    """Check every option of a frozen dataclass and store each in its normal form.

    Numbers become Python floats, mappings sorted tuples of pairs, and `clipvalue` a pair, so that
    optimizers that mean the same compare equal.

    Raises:
      ValueError: an option has a value that its field does not accept.
    """
    name = type(optimizer).__name__
    fields = dataclasses.fields(optimizer)
    # Convert all fields before checking any: a condition may compare two of them.
    for field in fields:
        convert = field.metadata.get("convert", _CONVERT.get(type(field.default), _as_given))
        value = convert(f"{name}.{field.name}", getattr(optimizer, field.name))
        object.__setattr__(optimizer, field.name, value)
    for field in fields:
        value = getattr(optimizer, field.name)
        if "allowed" in field.metadata and not field.metadata["allowed"](value, optimizer):
            expected = field.metadata["expected"]
            raise ValueError(message(f"{name}.{field.name}", expected=expected, got=repr(value)))
    check_order(f"{name}.clip_weight", (optimizer.clip_weight_min, optimizer.clip_weight_max))
    _check_slot_initializers(f"{name}.slot_initializers", optimizer)


def _check_slot_initializers(what: str, optimizer: Any) -> None:
    known = [slot.name for slot in optimizer.declared_slots()]
    for slot, _ in optimizer.slot_initializers:
        if slot not in known:
            words = f"names of its slots ({', '.join(known) or 'it has none'})"
            raise ValueError(message(what, expected=words, got=repr(slot)))


def _as_given(what: str, value: Any) -> Any:
    del what
    return value


def _flag(what: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(message(what, expected="True or False", got=repr(value)))
    return bool(value)


def number(what: str, value: Any) -> float:
    """Return `value` as a float.

    Raises:
      ValueError: `value` is not a number, or is NaN.
    """
    if not is_number(value) or math.isnan(value):
        raise ValueError(message(what, expected="a number", got=repr(value)))
    return float(value)


def optional_number(what: str, value: Any) -> float | None:
    """Return `value` as a float, or None.

    Raises:
      ValueError: `value` is neither a number nor None.
    """
    return None if value is None else number(what, value)


def check_order(what: str, bounds: Bounds) -> None:
    """Raise `ValueError` if the lower bound is above the upper one."""
    low, high = bounds
    if low is not None and high is not None and low > high:
        raise ValueError(message(what, expected="min <= max", got=f"min {low!r} > max {high!r}"))


def clip_bounds(what: str, value: Any) -> Bounds | None:
    """Return `(min, max)` of a clip option.

    Args:
      what: the option's name.
      value: None, one number c for (-c, c), or a pair of which either number may be None.

    Raises:
      ValueError: `value` is none of these, or min > max.
    """
    if value is None:
        return None
    if is_number(value) and not math.isnan(value):
        bounds: Bounds = (-float(value), float(value))
    elif isinstance(value, (tuple, list)) and len(value) == 2:
        bounds = (optional_number(what, value[0]), optional_number(what, value[1]))
    else:
        expected = "None, a number c for (-c, c), or a pair (min, max)"
        raise ValueError(message(what, expected=expected, got=repr(value)))
    check_order(what, bounds)
    return None if bounds == (None, None) else bounds


def slot_values(what: str, values: Any) -> tuple[tuple[str, Any], ...]:
    """Return a mapping from slot names to numbers or initializers as sorted pairs.

    Raises:
      ValueError: `values` is not such a mapping.
    """
    try:
        pairs = dict(values.items() if isinstance(values, Mapping) else (values or ()))
    except (TypeError, ValueError):
        expected = "a mapping from slot names to numbers or initializers"
        raise ValueError(message(what, expected=expected, got=repr(values))) from None
    for slot, value in pairs.items():
        if not isinstance(slot, str) or not slot:
            raise ValueError(message(what, expected="slot names (str)", got=repr(slot)))
        if not callable(value) and not is_number(value):
            expected = "a number or an initializer (key, shape, dtype) -> array"
            raise ValueError(message(f"{what}[{slot!r}]", expected=expected, got=repr(value)))
    # {"m": 1, "a": np.float32(2)} -> (("a", 2.0), ("m", 1.0)): hashable, in one order.
    plain = {slot: float(value) if is_number(value) else value for slot, value in pairs.items()}
    return tuple((slot, plain[slot]) for slot in sorted(plain))


_CONVERT: dict[type, Callable[[str, Any], Any]] = {bool: _flag, float: number}

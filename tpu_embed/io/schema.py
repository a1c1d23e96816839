"""Schemas of JSON files, so that a wrong value is an error that says where in the file it is.

A schema (`Form`) is a function of a value. It returns None if the value matches, and otherwise
where inside the value the problem is, what was expected there and what was got. The functions here
are schemas, or build larger ones from smaller ones.

Input: a JSON value, a schema. Output: nothing, or an error.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable
from typing import Any

import numpy as np

from tpu_embed._checks import is_int, refuse

Problem = tuple[str, str, str]
"""(where inside the value, what was expected, what was got)"""

Form = Callable[[Any], Problem | None]

Json = dict[str, Any]
"""An object of a JSON file."""

INT64_MAX = 2**63 - 1


def check(file: Any, value: Any, form: Form, remedy: str) -> None:
    """Check that a value matches a schema.

    Args:
      file: the file that it was read from, for the message.
      value: any JSON value.
      form: the schema.
      remedy: the remedy for the message.

    Raises:
      ValueError: the value does not match.
    """
    problem = form(value)
    if problem is not None:
        where, expected, got = problem
        refuse(f"{file}{where}", expected=expected, got=got, remedy=remedy)


def anything(value: Any) -> None:
    """Accept any value."""


def accept(expected: str, fits: Callable[[Any], Any]) -> Form:
    """Return the schema of a value that a function accepts."""
    return lambda value: None if fits(value) else _problem(expected, value)


text = accept("a string", lambda value: isinstance(value, str))
"""Accepts a string."""

flag = accept("true or false", lambda value: isinstance(value, bool))
"""Accepts true or false."""


def dtype(value: Any) -> Problem | None:
    """Accept the name of a dtype."""
    try:  # only plain words, because NumPy reads "i4, f8" and the like as record dtypes
        word = isinstance(value, str) and re.fullmatch("[a-z][a-z0-9_]*", value)
        known = word and np.dtype(value).name == value
    except TypeError:
        known = False
    return None if known else _problem("the name of a dtype", value)


def integer(least: int = 0, most: int = INT64_MAX) -> Form:
    """Return the schema of an integer in a range, both ends included."""
    return accept(
        f"an integer from {least} to {most}",
        lambda value: is_int(value) and least <= value <= most,
    )


natural = integer()


def choice(*values: Any) -> Form:
    """Return the schema of a value that is one of these strings or numbers."""
    return accept(
        " | ".join(map(repr, values)),
        lambda value: any(type(value) is type(one) and value == one for one in values),
    )


def optional(form: Form) -> Form:
    """Return the schema of a value that is null or matches a schema."""
    return lambda value: None if value is None else form(value)


def either(*forms: Form) -> Form:
    """Return the schema of a value that matches one of several; errors report the last one."""

    def form(value: Any) -> Problem | None:
        problems = [one(value) for one in forms]
        return None if None in problems else problems[-1]

    return form


def sequence(form: Form) -> Form:
    """Return the schema of a list whose values all match a schema."""

    def whole(value: Any) -> Problem | None:
        if not isinstance(value, list):
            return _problem("a list", value)
        return _first((f"[{i}]", form, one) for i, one in enumerate(value))

    return whole


naturals, texts = sequence(natural), sequence(text)


def mapping(form: Form) -> Form:
    """Return the schema of an object with any keys, whose values all match a schema."""

    def whole(value: Any) -> Problem | None:
        if not isinstance(value, dict):
            return _problem("an object", value)
        return _first((_key(key), form, one) for key, one in value.items())

    return whole


def record(**forms: Form) -> Form:
    """Return the schema of an object with exactly these keys and a schema for each value."""

    def whole(value: Any) -> Problem | None:
        if not isinstance(value, dict):
            return _problem("an object", value)
        if value.keys() != forms.keys():
            return "", f"an object of {sorted(forms)}", f"one of {reprlib.repr(sorted(value))}"
        return _first((_key(key), form, value[key]) for key, form in forms.items())

    return whole


def _first(parts: Any) -> Problem | None:
    """Return the first problem in parts: an iterable of (where it is, its schema, its value)."""
    for where, form, value in parts:
        problem = form(value)
        if problem is not None:
            inside, expected, got = problem
            return f"{where}{inside}", expected, got
    return None


def _key(key: str) -> str:
    return f": {reprlib.repr(key)}"


def _problem(expected: str, value: Any) -> Problem:
    return "", expected, reprlib.repr(value)  # short, however large or deep the value is

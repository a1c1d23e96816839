"""JSON files that identify themselves and carry a checksum, and schemas of what is in them.

Each file names its kind and format. The checksum is of the value, not of the bytes, so white space
and the order of keys may change. A file that was put in the place of another kind of file is
refused, whatever it holds.

A schema (`Form`) is a function of a value. It returns None if the value matches, and otherwise
where inside the value the problem is, what was expected there and what was got. So a wrong value is
an error that says where in the file it is. The functions here are schemas, or build larger ones
from smaller ones.

Input: a JSON object, a schema. Output: a file, or the object read back and checked.
"""

from __future__ import annotations

import json
import re
import reprlib
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from tpu_embed._checks import is_int, refuse
from tpu_embed.io import files
from tpu_embed.io.store import Place

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

    def form(value):
        problems = [one(value) for one in forms]
        return None if None in problems else problems[-1]

    return form


def sequence(form: Form) -> Form:
    """Return the schema of a list whose values all match a schema."""

    def whole(value):
        if not isinstance(value, list):
            return _problem("a list", value)
        return _first((f"[{i}]", form, one) for i, one in enumerate(value))

    return whole


naturals, texts = sequence(natural), sequence(text)


def mapping(form: Form) -> Form:
    """Return the schema of an object with any keys, whose values all match a schema."""

    def whole(value):
        if not isinstance(value, dict):
            return _problem("an object", value)
        return _first((_key(key), form, one) for key, one in value.items())

    return whole


def record(**forms: Form) -> Form:
    """Return the schema of an object with exactly these keys and a schema for each value."""

    def whole(value):
        if not isinstance(value, dict):
            return _problem("an object", value)
        if value.keys() != forms.keys():
            return (
                "",
                f"an object of {sorted(forms)}",
                f"one of {reprlib.repr(sorted(value))}",
            )
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
    # Short, however large or deep the value is.
    return (
        "",
        expected,
        reprlib.repr(value),
    )


# -- files -----------------------------------------------------------------------------------------

_ENVELOPE = {"kind", "format", "crc32"}


def write_with_crc(
    path: Place, kind: str, version: int, value: Json, *, indent: int | None = None
) -> None:
    """Write a JSON object; it is on disk when this returns.

    Args:
      path: where to write the file, which must not exist.
      kind: the kind of file.
      version: the version of its format.
      value: the object, without the keys "kind", "format" and "crc32", which are added.
      indent: the indentation of a file that people read; None writes one line.
    """
    whole = {"kind": kind, "format": version, **value}
    with files.create(path) as file:
        file.write(
            json.dumps({"crc32": _checksum(whole), **whole}, indent=indent).encode()
        )


def read_with_crc(
    path: Place, kind: str, version: int, form: Form, remedy: str
) -> Json:
    """Return the object that `write_with_crc` has written, without the keys that it added.

    Args:
      path: the file.
      kind: the kind of file that it must be.
      version: the version of the format that it must have.
      form: the schema that the object must match.
      remedy: the remedy for messages about a damaged file.

    Raises:
      FileNotFoundError: the file is missing.
      ValueError: it is damaged, of another kind or format, or does not match the schema.
    """
    content = files.read(path, remedy)
    try:
        whole = json.loads(content)
        checksum = _checksum(whole)
    except (ValueError, RecursionError) as error:
        refuse(
            f"{path}",
            expected="a JSON object",
            got=f"{error}",
            remedy=remedy,
            cause=error,
        )
    check(path, whole, mapping(anything), remedy)
    other = "read it with the tpu_embed that wrote it, or write it again"
    wanted = (
        ("format", version, other),
        ("crc32", checksum, remedy),
        ("kind", kind, remedy),
    )
    for what, expected, advice in wanted:
        if whole.get(what) != expected:
            refuse(
                f"{path}: {what}",
                expected=f"{expected!r}",
                got=reprlib.repr(whole.get(what)),
                remedy=advice,
            )
    value = {key: part for key, part in whole.items() if key not in _ENVELOPE}
    check(path, value, form, remedy)
    return value


def _checksum(whole: Any) -> int:
    """Return the CRC-32 of a JSON value without its "crc32", independent of the order of keys."""
    if isinstance(whole, dict):
        whole = {key: value for key, value in whole.items() if key != "crc32"}
    return zlib.crc32(json.dumps(whole, sort_keys=True).encode())

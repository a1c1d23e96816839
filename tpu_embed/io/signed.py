"""JSON files that say what they are: each names its kind and format, and has a checksum.

The checksum is of the value, not of its bytes: white space and the order of keys may change. A file
in the place of another is refused by its kind, whatever it holds.

Input: a JSON object. Output: a file, or the object again, checked.
"""

from __future__ import annotations

import json
import reprlib
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpu_embed._checks import message
from tpu_embed.io import files, schema

__all__ = ["read", "write"]

_ENVELOPE = {"kind", "format", "crc32"}


def write(
    path: Path, kind: str, version: int, value: Mapping[str, Any], *, indent: int | None = None
) -> None:
    """Write a JSON object; it is on the disk when this returns.

    Args:
      path: of the file; nothing is there.
      kind: what it is.
      version: of its format.
      value: has none of the keys "kind", "format" and "crc32", which are added.
      indent: of the lines of a file that people read.
    """
    whole = {"kind": kind, "format": version, **value}
    with files.create(path) as file:
        text = json.dumps({"crc32": _checksum(whole), **whole}, indent=indent)
        file.write(text.encode())


def read(path: Path, kind: str, version: int, form: schema.Form, remedy: str) -> dict[str, Any]:
    """Return the object that `write` has written, without what it added.

    Args:
      path: of the file.
      kind: what it must be.
      version: the format that is read.
      form: what the object must be.
      remedy: for a file that is damaged.

    Raises:
      FileNotFoundError: it is missing.
      ValueError: it is damaged, of another kind or format, or of another form.
    """
    content = files.read(path, remedy)
    try:
        whole = json.loads(content)
        checksum = _checksum(whole)
    except (ValueError, RecursionError) as error:
        expected, got = "a JSON object", f"{error}"
        raise ValueError(message(f"{path}", expected=expected, got=got, remedy=remedy)) from error
    schema.check(path, whole, schema.mapping(schema.anything), remedy)
    if whole.get("format") != version:
        expected, got = f"{version}", reprlib.repr(whole.get("format"))
        remedy = "read it with the tpu_embed that wrote it, or write it again"
        raise ValueError(message(f"{path}: format", expected=expected, got=got, remedy=remedy))
    for what, is_it in (("crc32", checksum), ("kind", kind)):
        if whole.get(what) != is_it:
            expected, got = f"{is_it!r}", reprlib.repr(whole.get(what))
            text = message(f"{path}: {what}", expected=expected, got=got, remedy=remedy)
            raise ValueError(text)
    value = {key: part for key, part in whole.items() if key not in _ENVELOPE}
    schema.check(path, value, form, remedy)
    return value


def _checksum(whole: Any) -> int:
    """Return the CRC-32 of a JSON value but for its own "crc32", whatever the order of its keys."""
    if isinstance(whole, dict):
        whole = {key: value for key, value in whole.items() if key != "crc32"}
    return zlib.crc32(json.dumps(whole, sort_keys=True).encode())

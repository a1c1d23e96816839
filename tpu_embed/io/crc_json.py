"""JSON files that identify themselves: each names its kind and format, and carries a checksum.

The checksum is of the value, not of the bytes, so white space and the order of keys may change. A
file that was put in the place of another kind of file is refused, whatever it holds.

Input: a JSON object. Output: a file, or the object read back and checked.
"""

from __future__ import annotations

import json
import reprlib
import zlib
from typing import Any

from tpu_embed._checks import refuse
from tpu_embed.io import files, schema
from tpu_embed.io.store import Place

_ENVELOPE = {"kind", "format", "crc32"}


def write_with_crc(
    path: Place, kind: str, version: int, value: schema.Json, *, indent: int | None = None
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
        file.write(json.dumps({"crc32": _checksum(whole), **whole}, indent=indent).encode())


def read_with_crc(
    path: Place, kind: str, version: int, form: schema.Form, remedy: str
) -> schema.Json:
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
        refuse(f"{path}", expected="a JSON object", got=f"{error}", remedy=remedy, cause=error)
    schema.check(path, whole, schema.mapping(schema.anything), remedy)
    other = "read it with the tpu_embed that wrote it, or write it again"
    wanted = ("format", version, other), ("crc32", checksum, remedy), ("kind", kind, remedy)
    for what, expected, advice in wanted:
        if whole.get(what) != expected:
            refuse(
                f"{path}: {what}",
                expected=f"{expected!r}",
                got=reprlib.repr(whole.get(what)),
                remedy=advice,
            )
    value = {key: part for key, part in whole.items() if key not in _ENVELOPE}
    schema.check(path, value, form, remedy)
    return value


def _checksum(whole: Any) -> int:
    """Return the CRC-32 of a JSON value without its "crc32", independent of the order of keys."""
    if isinstance(whole, dict):
        whole = {key: value for key, value in whole.items() if key != "crc32"}
    return zlib.crc32(json.dumps(whole, sort_keys=True).encode())

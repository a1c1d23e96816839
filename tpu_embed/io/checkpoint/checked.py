"""JSON files of a checkpoint. Each holds the checkpoint's name, so that no file of another passes.

Input: JSON values. Output: files, or the values read back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax

from tpu_embed._checks import message_of_many, refuse
from tpu_embed.io import schema
from tpu_embed.io.store import Place

_VALUE = "value.json"

FORMAT = 2
"""The version of the checkpoint format."""

REMEDY = "restore another step; this one is damaged"
"""The remedy that every message about a damaged file gives."""

_DEEPEST = 100
"""The deepest nesting that a position may have."""


class MismatchError(ValueError):
    """The files are undamaged, but do not hold what is wanted.

    Args:
      what: the checkpoint.
      differences: a message for each, without a remedy.
      remedy: which arguments of `restore` allow them.
    """

    def __init__(self, what: str, differences: Sequence[str], remedy: str) -> None:
        self._differences = what, differences
        self.advise(remedy)

    def advise(self, remedy: str) -> None:
        """Give another remedy: that of a caller which does not have these arguments."""
        self.args = (message_of_many(*self._differences, remedy=remedy),)


def write_bound(path: Place, checkpoint: str, value: Any) -> None:
    """Write a JSON file of a checkpoint; the kind that it declares is its file name.

    Args:
      path: where to write the file.
      checkpoint: the unique name of the checkpoint.
      value: any JSON value.
    """
    schema.write_with_crc(
        path, path.name, FORMAT, {"checkpoint": checkpoint, "value": value}
    )


def read_bound(
    path: Place, form: schema.Form, checkpoint: str | None = None
) -> tuple[str, Any]:
    """Return the name of the checkpoint that a file belongs to, and its value.

    Args:
      path: the file.
      form: what the value must look like.
      checkpoint: the name of the checkpoint that the file must belong to; None allows any.

    Raises:
      FileNotFoundError: the file is missing.
      ValueError: the file is damaged, or belongs to another checkpoint or another place.
    """
    whole = schema.record(checkpoint=schema.text, value=form)
    found = schema.read_with_crc(path, path.name, FORMAT, whole, REMEDY)
    if checkpoint not in (None, found["checkpoint"]):
        refuse(
            f"{path}",
            expected=f"a file of checkpoint {checkpoint}",
            got=f"one of {found['checkpoint']}",
            remedy=REMEDY,
        )
    return found["checkpoint"], found["value"]


def write_position(directory: Place, checkpoint: str, position: Any) -> None:
    """Write the position in the data; the first process does."""
    if jax.process_index() == 0:
        write_bound(directory / _VALUE, checkpoint, position)


def read_position(directory: Place, checkpoint: str) -> Any:
    """Return the position in the data.

    Raises:
      FileNotFoundError, ValueError: the file is missing; damaged, or of another checkpoint.
    """
    return read_bound(directory / _VALUE, schema.anything, checkpoint)[1]


def as_json(position: Any) -> Any:
    """Return a copy of a JSON value, since the data iterator may change its own later.

    Raises:
      ValueError: the value is not JSON.
    """
    _check_nested(position, 0)
    try:
        return json.loads(json.dumps(position))
    except (TypeError, ValueError) as error:
        refuse("position", expected="a JSON value", got=f"{error}", cause=error)


def _check_nested(value: Any, depth: int) -> None:
    """Check that all keys are strings and that the nesting is not too deep.

    JSON would turn other keys into strings. The process that restores may have a smaller call stack
    than the one that saves, so the depth is limited.
    """
    if depth > _DEEPEST:
        refuse(
            "position",
            expected=f"at most {_DEEPEST} values inside each other",
            got="more",
        )
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                refuse("position", expected="string keys", got=f"key {key!r}")
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inside in value:
            _check_nested(inside, depth + 1)

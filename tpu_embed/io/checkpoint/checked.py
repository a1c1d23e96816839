"""JSON files of a checkpoint, each of which says which checkpoint it belongs to.

Input: JSON values, and what orbax asks of a handler. Output: files, or what was in them.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from tpu_embed._checks import message
from tpu_embed.io import schema, signed
from tpu_embed.processes import raise_on_all

__all__ = [
    "FORMAT",
    "REMEDY",
    "JsonArgs",
    "JsonHandler",
    "as_json",
    "read_signed",
    "write_signed",
]

_VALUE = "value.json"

FORMAT = 2
"""The version of a checkpoint's format."""

REMEDY = "restore another step; this one is damaged"
"""What helps against any damage."""

_DEEPEST = 100
"""Values of a position inside each other."""


def write_signed(path: Path, checkpoint: str, value: Any) -> None:
    """Write a JSON file of a checkpoint: its kind is its file name.

    Args:
      path: of the file.
      checkpoint: the name of the checkpoint, which no other has.
      value: any JSON value.
    """
    signed.write(path, path.name, FORMAT, {"checkpoint": checkpoint, "value": value})


def read_signed(path: Path, form: schema.Form, checkpoint: str | None = None) -> tuple[str, Any]:
    """Return the name of the checkpoint that a file belongs to, and the value that it holds.

    Args:
      path: of the file.
      form: what the value must be.
      checkpoint: which one it must belong to; None: to any.

    Raises:
      FileNotFoundError: it is missing.
      ValueError: it is damaged, or belongs to another checkpoint or in another place.
    """
    whole = schema.record(checkpoint=schema.text, value=form)
    found = signed.read(path, path.name, FORMAT, whole, REMEDY)
    if checkpoint not in (None, found["checkpoint"]):
        expected, got = f"a file of checkpoint {checkpoint}", f"one of {found['checkpoint']}"
        raise ValueError(message(f"{path}", expected=expected, got=got, remedy=REMEDY))
    return found["checkpoint"], found["value"]


@dataclasses.dataclass
class JsonArgs(ocp.args.CheckpointArgs):
    """The checkpoint, and a JSON value to save."""

    checkpoint: str
    value: Any = None


class JsonHandler(ocp.CheckpointHandler):
    """Saves and restores a JSON value."""

    def save(self, directory: Any, args: JsonArgs) -> None:
        """Write the value."""

        def written() -> None:
            if jax.process_index() == 0:
                write_signed(Path(directory) / _VALUE, args.checkpoint, args.value)

        raise_on_all("save", Path(directory), written)

    def restore(self, directory: Any, args: JsonArgs) -> Any:
        """Return the value."""
        path = Path(directory)

        def read() -> Any:
            return read_signed(path / _VALUE, schema.anything, args.checkpoint)[1]

        return raise_on_all("restore", path, read)

    def finalize(self, directory: Any) -> None:
        """Do nothing: all is written."""

    def metadata(self, directory: Any) -> Any:
        """Return nothing: the value says it all."""
        return None

    def close(self) -> None:
        """Do nothing: nothing is open."""


def as_json(position: Any) -> Any:
    """Return a copy of a JSON value: the iterator that it came from goes on.

    Raises:
      ValueError: it is no JSON value.
    """
    _check_nested(position, 0)
    try:
        return json.loads(json.dumps(position))
    except (TypeError, ValueError) as error:
        raise ValueError(message("position", expected="a JSON value", got=f"{error}")) from error


def _check_nested(value: Any, depth: int) -> None:
    """Check that keys are strings, others would come back as such, and that nesting is bounded.

    Who restores may have less room on its stack than who saves.
    """
    if depth > _DEEPEST:
        expected, got = f"at most {_DEEPEST} values inside each other", "more"
        raise ValueError(message("position", expected=expected, got=got))
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(message("position", expected="string keys", got=f"key {key!r}"))
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inside in value:
            _check_nested(inside, depth + 1)

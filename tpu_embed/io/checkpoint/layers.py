"""The tables of many engines in one directory: those of each layer of a model, by the layer's path.

    layers/layers.json             paths of the layers
    layers/model-films-rows~…/     one directory for each, as `tables.py` writes it

Tables of different layers may have one name, or one layer object several places in a model. So a
layer is known by its path alone, and so are its files: each says to which layer of which checkpoint
it belongs.

Input: what each layer writes, or what is wanted of it. Output: files, or states by path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path

import jax

from tpu_embed._checks import message
from tpu_embed.core.state import TableState
from tpu_embed.io import schema
from tpu_embed.io.checkpoint import manifest, tables
from tpu_embed.io.checkpoint.checked import read_signed, write_signed
from tpu_embed.io.checkpoint.manifest import Wanted
from tpu_embed.io.files import file_name
from tpu_embed.state_holder import StateHolder

__all__ = [
    "Prepared",
    "differences",
    "name_of_layer",
    "prepare",
    "read",
    "read_paths",
    "write",
]

_LAYERS = "layers.json"


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What one process writes.

    Attributes:
      checkpoint: its name.
      layers: what each layer writes, by path.
    """

    checkpoint: str
    layers: Mapping[str, tables.Prepared]


def name_of_layer(checkpoint: str, path: str) -> str:
    """Return the name that the files of a layer have, in place of the checkpoint's own."""
    return f"{checkpoint}/{path}"


def prepare(layers: Mapping[str, StateHolder], *, checkpoint: str, copied: bool) -> Prepared:
    """Take what must be written out of the states of layers.

    Args:
      layers: by path.
      checkpoint: the name of the checkpoint.
      copied: whether to copy everything to the host now: the states may be donated afterwards.

    Raises:
      ValueError: a state that is not that of its layer's engine, or that was donated.
    """
    return Prepared(
        checkpoint,
        {
            path: _prepared(path, layer, name_of_layer(checkpoint, path), copied)
            for path, layer in layers.items()
        },
    )


def _prepared(path: str, layer: StateHolder, name: str, copied: bool) -> tables.Prepared:
    try:
        return tables.prepare(layer.engine, layer.state, checkpoint=name, copied=copied)
    except ValueError as error:
        raise ValueError(f"layer {path!r}: {error}") from error


def write(directory: Path, prepared: Prepared) -> None:
    """Write this process's part of all layers.

    Args:
      directory: exists.
      prepared: what to write.
    """
    for path, layer in prepared.layers.items():
        place = directory / file_name(path)
        place.mkdir(exist_ok=True)  # every process does
        tables.write(place, layer)
    if jax.process_index() == 0:
        write_signed(directory / _LAYERS, prepared.checkpoint, sorted(prepared.layers))


def read_paths(directory: Path) -> tuple[str, list[str]]:
    """Return the name of the checkpoint, and the paths of its layers.

    Raises:
      FileNotFoundError: the file that has them is missing.
      ValueError: it is damaged.
    """
    return read_signed(directory / _LAYERS, schema.sequence(schema.text))


def differences(directory: Path, found: Collection[str], wanted: Mapping[str, Wanted]) -> list[str]:
    """Return a message for each layer that is not as it was saved.

    Args:
      directory: of the layers.
      found: paths of those on disk, but for what is left out.
      wanted: what is to be made of each.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: one is damaged, or belongs to another layer.
    """
    messages = []
    for path in sorted({*found, *wanted}):
        if path in wanted and path in found:
            try:
                manifest.read(directory / file_name(path), wanted[path])
            except manifest.MismatchError as error:
                messages.append(f"{error}")
        else:
            expected, got = ("one", "none") if path in wanted else ("none", "one")
            messages.append(message(f"layer {path!r}", expected=expected, got=got))
    return messages


def read(directory: Path, wanted: Mapping[str, Wanted]) -> dict[str, TableState]:
    """Return the states of layers by path.

    Args:
      directory: of the layers.
      wanted: what to make of each.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a table, a field, a shape or a dtype that is not as wanted; a damaged file, or one
        of another layer.
    """
    return {path: tables.read(directory / file_name(path), wanted[path]) for path in sorted(wanted)}

"""Save the tables of all layers of a model in one directory, each under the path of its layer.

    layers/layers.json             paths of the layers
    layers/shared.json             paths of what several places share
    layers/model-films-rows~…/     one directory per layer, as `tables.py` writes it

Tables of different layers may have the same name, and one layer object may appear at several places
in a model. So a layer is identified by its path alone, and each of its files says which layer of
which checkpoint it belongs to.

Input: layers with their states, or what to restore for each. Output: files, or states by path.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import jax

from tpu_embed._checks import message
from tpu_embed.engine_layer import EngineLayer
from tpu_embed.io import schema
from tpu_embed.io.checkpoint import manifest, tables
from tpu_embed.io.checkpoint.checked import MismatchError, read_bound, write_bound
from tpu_embed.io.checkpoint.manifest import Wanted
from tpu_embed.io.files import file_name

_LAYERS = "layers.json"
_SHARED = "shared.json"

Prepared = dict[str, tables.Prepared]
"""What one process will write for each layer, by path."""


def name_of_layer(checkpoint: str, path: str) -> str:
    """Return the name that the files of a layer carry in place of the checkpoint's own."""
    return f"{checkpoint}/{path}"


def prepare(
    layers: Mapping[str, EngineLayer], directory: Path, *, checkpoint: str, copied: bool
) -> Prepared:
    """Return what must be written from the states of layers, by path.

    Args:
      layers: the layers by path.
      directory: that of all layers, once the checkpoint is finished.
      checkpoint: the name of the checkpoint.
      copied: whether to copy everything to the host now, so that the states may be donated
        afterwards.

    Raises:
      ValueError: a state does not fit the engine of its layer, or was donated.
    """
    found = {}
    for path, layer in layers.items():
        place, name = directory_of(directory, path), name_of_layer(checkpoint, path)
        try:
            found[path] = tables.prepare(
                layer.engine, layer.state, place, checkpoint=name, copied=copied
            )
        except ValueError as error:
            raise ValueError(f"layer {path!r}: {error}") from error
    return found


def write(
    directory: Path, checkpoint: str, prepared: Prepared, shared: Sequence[Sequence[str]]
) -> None:
    """Write this process's part of all layers.

    Args:
      directory: an existing directory.
      checkpoint: the name of the checkpoint.
      prepared: what `prepare` returned.
      shared: the paths of each layer or variable that has several; it is saved under one of them.
    """
    for path, layer in prepared.items():
        place = directory / file_name(path)
        place.mkdir(exist_ok=True)  # every process makes it
        tables.write(place, layer)
    if jax.process_index() == 0:
        write_bound(directory / _LAYERS, checkpoint, sorted(prepared))
        write_bound(directory / _SHARED, checkpoint, shared)


def read_paths(directory: Path) -> tuple[str, list[str]]:
    """Return the name of the checkpoint, and the paths of its layers.

    Raises:
      FileNotFoundError: `layers.json` is missing.
      ValueError: `layers.json` is damaged.
    """
    return read_bound(directory / _LAYERS, schema.sequence(schema.text))


def directory_of(directory: Path, path: str) -> Path:
    """Return the directory of one layer's tables in that of all layers."""
    return directory / file_name(path)


def read_shared(directory: Path, checkpoint: str) -> list[list[str]]:
    """Return the paths of each layer or variable that had several.

    Args:
      directory: the directory of all layers.
      checkpoint: the name of the checkpoint.

    Raises:
      FileNotFoundError: `shared.json` is missing.
      ValueError: it is damaged, or belongs to another checkpoint.
    """
    form = schema.sequence(schema.sequence(schema.text))
    return read_bound(directory / _SHARED, form, checkpoint)[1]


def differences(directory: Path, found: Collection[str], wanted: Mapping[str, Wanted]) -> list[str]:
    """Return one message per layer that differs from what was saved.

    Args:
      directory: the directory of all layers.
      found: paths of the layers on disk, without those that are left out.
      wanted: what to restore for each layer, by path.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or belongs to another layer.
    """
    messages = []
    for path in sorted({*found, *wanted}):
        if path in wanted and path in found:
            try:
                manifest.read(directory / file_name(path), wanted[path])
            except MismatchError as error:
                messages.append(f"{error}")
        else:
            expected, got = ("one", "none") if path in wanted else ("none", "one")
            messages.append(message(f"layer {path!r}", expected=expected, got=got))
    return messages


def read(directory: Path, wanted: Mapping[str, Wanted]) -> dict[str, tables.FoundTables]:
    """Return the states of layers by path, and their maps.

    Args:
      directory: the directory of all layers.
      wanted: what to restore for each layer, by path.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a table, field, shape or dtype is not what is wanted; a file is damaged, or
        belongs to another layer.
    """
    return {path: tables.read(directory / file_name(path), wanted[path]) for path in sorted(wanted)}

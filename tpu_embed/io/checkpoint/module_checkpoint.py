"""Checkpoints of flax modules: a model with all its layers, its optimizer, its metrics.

The tables of layers are saved as those of an engine are: rows in logical order, so that they fit
any mesh, placement and packing. All other arrays are saved as they are, by path.

Input: modules by name, a position in the data. Output: a directory; or the same modules, filled
from one.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from tpu_embed._checks import local_path, message, message_of_many
from tpu_embed._types import Array
from tpu_embed.engine_layer import EngineLayer
from tpu_embed.io.checkpoint import layers
from tpu_embed.io.checkpoint.checked import JsonArgs, as_json
from tpu_embed.io.checkpoint.commit import read_checkpoint, write_checkpoint
from tpu_embed.io.checkpoint.items import LAYERS, POSITION, VARIABLES, FilesArgs
from tpu_embed.io.checkpoint.manifest import Wanted
from tpu_embed.io.checkpoint.modules import Modules, take_apart
from tpu_embed.io.checkpoint.trees import (
    PyTreeArgs,
    check_leaves,
    is_left_out,
    leaf_differences,
    read_leaves,
)


def save_modules(path: str | Path, modules: Mapping[str, Any], *, position: Any = None) -> None:
    """Write a checkpoint of flax modules; it is on disk when this returns.

    All arrays are saved: parameters, statistics, random keys, metrics, optimizer states, and the
    tables, slots and counters of the layers of `tpu_embed.nn`. A layer or variable that appears at
    several places is saved once. Python attributes are not saved. When there are several processes,
    all call this, and an error in one is raised in all.

    Args:
      path: a directory that does not exist yet.
      modules: nnx modules, optimizers, metrics, `Rngs`, states or variables, by name.
      position: a JSON value with string keys, for example the state of the data iterator.

    Raises:
      ValueError: the path exists, or is a URL; an array was donated, or could not be replaced by a
        restore; two arrays have the same path; the position is not JSON.
      TypeError: `modules` is not a mapping of names to flax objects.

    Example:
      >>> import tempfile, jax, tpu_embed.nn
      >>> from flax import nnx
      >>> model = nnx.Dict(films=tpu_embed.nn.Embed(8, 2, rngs=nnx.Rngs(0)))
      >>> other = nnx.Dict(films=tpu_embed.nn.Embed(8, 2, placement="div", rngs=nnx.Rngs(1)))
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     save_modules(f"{directory}/first", {"model": model}, position={"epoch": 1})
      ...     restore_modules(f"{directory}/first", {"model": other})
      {'epoch': 1}
      >>> bool((other.films.embedding == model.films.embedding).all())
      True
    """
    args_of = functools.partial(save_modules_args, modules, position, copied=False)
    write_checkpoint(path, args_of)


def restore_modules(
    path: str | Path,
    modules: Mapping[str, Any],
    *,
    key: Array | None = None,
    convert: bool = False,
    leave_out: Sequence[str] = (),
) -> Any:
    """Fill flax modules from a checkpoint; return the position that was saved with them.

    Make the modules with the same structure as those that were saved. Layers may have another mesh,
    number of devices and placement; a layer without an optimizer reads only its table. When this
    raises, the modules are unchanged; after an interrupt they are unchanged or wholly restored.
    When there are several processes, all call this, and an error in one is raised in all.

    Args:
      path: what `save_modules` wrote, or one of the numbered directories of a
        `ModuleCheckpointManager`.
      modules: the modules by name; or what `nnx.eval_shape` returned for them, so that no array is
        held twice. Each array is restored with the sharding that it has in the module; an array
        that was never placed goes to every device of the first layer.
      key: initializes what the checkpoint lacks, as the engine of a layer would: the rows by which
        a table has grown, and all slots of a table whose optimizer is of another class or has other
        slots; or none, if it has no slots. None: a difference of this kind is an error.
      convert: whether a float array may have another dtype than it was saved with; its values are
        rounded then.
      leave_out: paths such as `optimizer` or `model/films`. Whatever is at or below them is neither
        read nor changed.

    Returns:
      The position, or None.

    Raises:
      ValueError: the path is a URL; a layer, table, slot, array, shape or dtype differs from what
        was saved; a file is damaged, or belongs to another checkpoint, layer, table, slot or place.
      FileNotFoundError: there is no checkpoint, or one of its files is missing.
      TypeError: `modules` is not a mapping of names to flax objects.
    """
    wish = _Wish(key, convert, tuple(leave_out))
    chosen: Modules | None = None

    def prepared(path: Path) -> ocp.args.Composite:
        nonlocal chosen
        whole = take_apart(modules)
        chosen = whole.without(wish.leave_out)
        return _restore_args(path, whole, chosen, wish)

    items = (LAYERS, VARIABLES, POSITION)
    found = read_checkpoint(path, items, prepared, writer="save_modules")
    assert chosen is not None, "prepared before it is read"
    chosen.fill(found[LAYERS], found[VARIABLES])
    for name, layer in chosen.layers.items():  # later saves write what has changed since
        storage, saved = layer.engine.storage, found[LAYERS][name].checkpoint
        if storage is not None and saved is not None and layer.engine.vocabularies is not None:
            place = layers.directory_of(local_path(path).absolute() / LAYERS, name)
            storage.begin_save(place, saved, layer.engine.vocabularies.admitted)
    return found[POSITION]


def save_modules_args(
    modules: Mapping[str, Any], position: Any, *, path: Path, checkpoint: str, copied: bool
) -> ocp.args.Composite:
    """Return orbax's arguments for saving.

    Args:
      modules: the modules by name.
      position: a JSON value.
      path: where the checkpoint will be.
      checkpoint: the name of the checkpoint.
      copied: whether to copy tables to the host now, so that they may be donated afterwards.

    Raises:
      ValueError: whatever `save_modules` refuses.
      TypeError: whatever `save_modules` refuses.
    """
    parts = take_apart(modules)
    arrays = parts.arrays()
    check_leaves("modules", arrays)
    prepared = layers.prepare(parts.layers, path / LAYERS, checkpoint=checkpoint, copied=copied)

    def write(path: Path) -> None:
        layers.write(path, checkpoint, prepared, parts.shared)

    return ocp.args.Composite(
        **{
            LAYERS: FilesArgs(write=write),
            VARIABLES: PyTreeArgs(checkpoint, arrays),
            POSITION: JsonArgs(checkpoint, as_json(position)),
        }
    )


@dataclasses.dataclass(frozen=True)
class _Wish:
    """The options of `restore_modules`; see there."""

    key: Array | None
    convert: bool
    leave_out: tuple[str, ...]

    def of_layer(self, path: str, layer: EngineLayer, checkpoint: str) -> Wanted:
        """Return what to restore for one layer."""
        # New rows are made from the key and the name of their table. Tables of different layers
        # may have the same name, so each layer gets a key of its own.
        key = None if self.key is None else jax.random.fold_in(self.key, zlib.crc32(path.encode()))
        name = layers.name_of_layer(checkpoint, path)
        return Wanted(layer.engine, key, self.convert, layer=path, checkpoint=name)


def _restore_args(path: Path, whole: Modules, chosen: Modules, wish: _Wish) -> ocp.args.Composite:
    """Return orbax's arguments for restoring, after comparing the modules with the checkpoint.

    Args:
      path: the checkpoint.
      whole: all modules that were given.
      chosen: the same without what is left out.
      wish: the options of the restore.

    Raises:
      ValueError: layers or arrays differ from what was saved; the message names all of them.
    """
    checkpoint, on_disk = layers.read_paths(path / LAYERS)
    leaves = read_leaves(path / VARIABLES, checkpoint)
    _check_left_out(path, wish.leave_out, {*on_disk, *leaves, *whole.layers, *whole.arrays()})
    here = [layer for layer in on_disk if not is_left_out(layer, wish.leave_out)]
    wanted = {
        layer: wish.of_layer(layer, holder, checkpoint) for layer, holder in chosen.layers.items()
    }
    arrays = chosen.abstract_arrays()
    check_leaves("modules", arrays)
    tree = PyTreeArgs(checkpoint, arrays, wish.convert, wish.leave_out)
    differences = [
        *layers.differences(path / LAYERS, here, wanted),
        *leaf_differences(leaves, tree),
    ]
    saved = chosen.shared_of(layers.read_shared(path / LAYERS, checkpoint))
    if saved != (shared := chosen.shared_of(whole.shared)):
        what = "layers and variables of several paths"
        differences.append(message(what, expected=f"{saved}, as saved", got=f"{shared}"))
    if differences:
        remedy = (
            "give the modules as they were saved; convert=True rounds floats, leave_out= takes "
        )
        remedy += "paths, or those above them"
        text = message_of_many(f"checkpoint {path}", differences, remedy=remedy)
        raise ValueError(text)
    items = {
        LAYERS: FilesArgs(read=lambda path: layers.read(path, wanted)),
        VARIABLES: tree,
        POSITION: JsonArgs(checkpoint),
    }
    return ocp.args.Composite(**items)


def _check_left_out(path: Path, leave_out: Sequence[str], known: Collection[str]) -> None:
    """Check that every path in `leave_out` names something.

    Raises:
      ValueError: neither the checkpoint nor the modules have anything at or below a path.
    """
    for one in leave_out:
        if not any(is_left_out(name, [one]) for name in known):
            tops = sorted({name.split("/")[0] for name in known})
            what, expected = f"checkpoint {path}: leave_out", f"{tops}, or paths below"
            raise ValueError(message(what, expected=expected, got=repr(one)))

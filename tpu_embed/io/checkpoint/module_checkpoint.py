"""Checkpoints of flax modules: a model with all its layers, its optimizer, and what else trains.

The tables of layers are saved as those of an engine are: rows in their order, so that they fit any
mesh, placement and packing. All other arrays are saved as they are, by path.

Input: modules by name, a position in the data. Output: a directory; or the same modules, with what
was in it.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from tpu_embed._checks import message, message_of_many
from tpu_embed._types import Array
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
from tpu_embed.state_holder import StateHolder

__all__ = ["restore_modules", "save_modules", "save_modules_args"]


def save_modules(path: str | Path, modules: Mapping[str, Any], *, position: Any = None) -> None:
    """Write a checkpoint of flax modules; it is on the disk when this returns.

    All of them are saved: parameters, statistics, random keys, metrics, states of optimizers;
    tables, slots and counters of the layers of `tpu_embed.nn`. A layer or variable that stands at
    several places is saved once. Python attributes are not. Of several processes, all call this;
    what goes wrong in one is raised in all.

    Args:
      path: a directory that does not exist.
      modules: by name: nnx modules, optimizers, metrics, `Rngs`, states or variables.
      position: a JSON value, its keys strings, for example where the data iterator stands.

    Raises:
      ValueError: the path exists, or is no file's; an array that was donated, or that could not be
        replaced; two of one path; a position that is no JSON.
      TypeError: modules that are no mapping of names to flax objects.

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
    write_checkpoint(
        path,
        lambda checkpoint: save_modules_args(
            modules, position, checkpoint=checkpoint, copied=False
        ),
    )


def restore_modules(
    path: str | Path,
    modules: Mapping[str, Any],
    *,
    key: Array | None = None,
    convert: bool = False,
    leave_out: Sequence[str] = (),
) -> Any:
    """Fill flax modules with what is in a checkpoint; return the position beside them.

    The modules are made as those that were saved. Layers may have another mesh, another number of
    devices and another placement; a layer without an optimizer reads its table alone. When this
    raises, the modules are as they were. Of several processes, all call this; what goes wrong in
    one is raised in all.

    Args:
      path: what `save_modules` wrote, or one of the numbered directories of a
        `ModuleCheckpointManager`.
      modules: by name, as they were saved; or what `nnx.eval_shape` made of them, so that no array
        is held twice. Each array gets the sharding that stands in the module; where nothing has
        placed it, it is on every device of the first layer.
      key: makes what is not in the checkpoint as the engine of a layer would: rows by which a table
        has grown, all slots of a table whose optimizer is of another class, or has other slots.
        None: that something is not there is an error.
      convert: whether floats may be of another dtype than they were; they are rounded then.
      leave_out: paths such as `optimizer` or `model/films`: what is there and below is neither read
        nor changed.

    Returns:
      the position, or None.

    Raises:
      ValueError: a layer, table, slot, array, shape or dtype is not as it was saved; a file is
        damaged, or belongs to another checkpoint, layer, table, slot or place.
      FileNotFoundError: there is no checkpoint; a file of it is missing.
      TypeError: modules that are no mapping of names to flax objects.
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
    return found[POSITION]


def save_modules_args(
    modules: Mapping[str, Any], position: Any, *, checkpoint: str, copied: bool
) -> ocp.args.Composite:
    """Return what to save, as orbax takes it.

    Args:
      modules: by name.
      position: a JSON value.
      checkpoint: the name of the checkpoint.
      copied: whether to copy tables to the host now: they may be donated afterwards.

    Raises:
      ValueError: what `save_modules` refuses.
      TypeError: the same.
    """
    parts = take_apart(modules)
    arrays = parts.arrays()
    check_leaves("modules", arrays)
    prepared = layers.prepare(parts.layers, checkpoint=checkpoint, copied=copied)
    return ocp.args.Composite(
        **{
            LAYERS: FilesArgs(write=lambda path: layers.write(path, prepared)),
            VARIABLES: PyTreeArgs(checkpoint, arrays),
            POSITION: JsonArgs(checkpoint, as_json(position)),
        }
    )


@dataclasses.dataclass(frozen=True)
class _Wish:
    """What a caller of `restore_modules` asks for; see there."""

    key: Array | None
    convert: bool
    leave_out: tuple[str, ...]

    def of_layer(self, path: str, layer: StateHolder, checkpoint: str) -> Wanted:
        """Return what is wanted of a layer."""
        # Tables of different layers may have one name, by which their rows are made.
        key = None if self.key is None else jax.random.fold_in(self.key, zlib.crc32(path.encode()))
        name = layers.name_of_layer(checkpoint, path)
        return Wanted(layer.engine, key, self.convert, layer=path, checkpoint=name)


def _restore_args(path: Path, whole: Modules, chosen: Modules, wish: _Wish) -> ocp.args.Composite:
    """Return what to restore, as orbax takes it, after a check of what there is.

    Args:
      path: of the checkpoint.
      whole: all that is given.
      chosen: that without what is left out.
      wish: what is asked for.

    Raises:
      ValueError: a layer or an array is not as it was saved; it names all of them.
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
    if differences:
        remedy = "give the modules as they were saved; leave_out= takes paths, or those above them"
        text = message_of_many(f"checkpoint {path}", differences, remedy=remedy)
        raise ValueError(text)
    items = {
        LAYERS: FilesArgs(read=lambda path: layers.read(path, wanted)),
        VARIABLES: tree,
        POSITION: JsonArgs(checkpoint),
    }
    return ocp.args.Composite(**items)


def _check_left_out(path: Path, leave_out: Sequence[str], known: Collection[str]) -> None:
    """Check that something is at every path that is left out.

    Raises:
      ValueError: nothing is, in the checkpoint or in the modules.
    """
    for one in leave_out:
        if not any(is_left_out(name, [one]) for name in known):
            tops = sorted({name.split("/")[0] for name in known})
            what, expected = f"checkpoint {path}: leave_out", f"{tops}, or paths below"
            raise ValueError(message(what, expected=expected, got=repr(one)))

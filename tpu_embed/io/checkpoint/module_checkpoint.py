"""Checkpoints of flax modules: a model with all its layers, its optimizer, its metrics.

    layers/layers.json             paths of the layers
    layers/shared.json             paths of what several places share
    layers/model-films-rows~…/     one directory per layer, as `tables.py` writes it

The tables of layers are saved as those of an engine are: rows in logical order, so that they fit
any mesh, placement and packing. Tables of different layers may have the same name, and one layer
object may appear at several places in a model. So a layer is identified by its path alone, and each
of its files says which layer of which checkpoint it belongs to. All other arrays are saved as they
are, by path.

Input: modules by name, a position in the data. Output: a directory; or the same modules, filled
from one.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from tpu_embed._checks import message
from tpu_embed._types import Array
from tpu_embed.io import schema
from tpu_embed.io.checkpoint import host_rows, manifest, tables, trees
from tpu_embed.io.checkpoint.checked import (
    MismatchError,
    as_json,
    read_bound,
    read_position,
    write_bound,
    write_position,
)
from tpu_embed.io.checkpoint.commit import (
    LAYERS,
    POSITION,
    VARIABLES,
    Begin,
    find_checkpoint,
    open_checkpoint,
    write_checkpoint,
)
from tpu_embed.io.checkpoint.manifest import Wanted
from tpu_embed.io.checkpoint.modules import Modules, take_apart
from tpu_embed.io.files import file_name
from tpu_embed.io.store import Place
from tpu_embed.processes import raise_on_all

_LAYERS = "layers.json"
_SHARED = "shared.json"


def save_modules(path: str | Path, modules: Mapping[str, Any], *, position: Any = None) -> None:
    """Write a checkpoint of flax modules; it is on disk when this returns.

    All arrays are saved: parameters, statistics, random keys, metrics, optimizer states, and the
    tables, slots and counters of the layers of `tpu_embed.nn`. A layer or variable that appears at
    several places is saved once. Python attributes are not saved. When there are several processes,
    all call this, and an error in one is raised in all.

    Args:
      path: a directory that does not exist yet, or a URL of `gs://` or `s3://`.
      modules: nnx modules, optimizers, metrics, `Rngs`, states or variables, by name.
      position: a JSON value with string keys, for example the state of the data iterator.

    Raises:
      ValueError: the path exists, or is a bad URL; an array was donated, or could not be replaced
        by a restore; two arrays have the same path; the position is not JSON.
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
    write_checkpoint(path, functools.partial(prepare_modules, modules, position, copied=False))


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
      ValueError: the path is a bad URL; a layer, table, slot, array, shape or dtype differs from
        what was saved; a file is damaged, or belongs to another checkpoint, layer, table, slot or
        place.
      FileNotFoundError: there is no checkpoint, or one of its files is missing.
      TypeError: `modules` is not a mapping of names to flax objects.
    """
    root, leave_out = find_checkpoint(path), tuple(leave_out)

    def prepared() -> tuple[str, Modules, dict[str, Wanted], dict[str, Any]]:
        whole = take_apart(modules)
        checkpoint, on_disk = read_paths(root / LAYERS)
        leaves = trees.read_leaves(root / VARIABLES, checkpoint)
        _check_left_out(root, leave_out, {*on_disk, *leaves, *whole.layers, *whole.arrays()})
        chosen, wanted = whole.without(leave_out), {}
        for name, layer in chosen.layers.items():
            # New rows are made from the key and the name of their table. Tables of different
            # layers may have the same name, so each layer gets a key of its own.
            own = None if key is None else jax.random.fold_in(key, zlib.crc32(name.encode()))
            bound = f"{checkpoint}/{name}"
            wanted[name] = Wanted(layer.engine, own, convert, layer=name, checkpoint=bound)
        arrays = chosen.abstract_arrays()
        trees.check_leaves("modules", arrays)
        here = [layer for layer in on_disk if not trees.is_left_out(layer, leave_out)]
        differences = [
            *_layer_differences(root / LAYERS, here, wanted),
            *trees.leaf_differences(leaves, arrays, convert=convert, leave_out=leave_out),
        ]
        lists = schema.sequence(schema.sequence(schema.text))
        saved = chosen.shared_of(read_bound(root / LAYERS / _SHARED, lists, checkpoint)[1])
        if saved != (shared := chosen.shared_of(whole.shared)):
            what = "layers and variables of several paths"
            differences.append(message(what, expected=f"{saved}, as saved", got=f"{shared}"))
        if differences:
            remedy = "give the modules as they were saved; convert=True rounds floats, leave_out= "
            remedy += "takes paths, or those above them"
            raise MismatchError(f"checkpoint {root}", differences, remedy)
        return checkpoint, chosen, wanted, arrays

    items = (LAYERS, VARIABLES, POSITION)
    checkpoint, chosen, wanted, arrays = open_checkpoint(
        root, items, prepared, writer="save_modules"
    )
    found = {name: tables.read(directory_of(root, name), one) for name, one in wanted.items()}

    def others() -> tuple[Any, Any]:
        variables = trees.read(root / VARIABLES, checkpoint, arrays)
        return variables, read_position(root / POSITION, checkpoint)

    variables, position = raise_on_all("restore", root, others)
    chosen.fill(found, variables)
    for name, layer in chosen.layers.items():
        host_rows.go_on_from(layer.engine, directory_of(root, name), found[name].checkpoint)
    return position


def prepare_modules(
    modules: Mapping[str, Any], position: Any, *, path: Place, checkpoint: str, copied: bool
) -> Mapping[str, Begin]:
    """Return what a checkpoint of modules is written with, by item.

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
    arrays, prepared = parts.arrays(), {}
    trees.check_leaves("modules", arrays)
    for name, layer in parts.layers.items():
        place, bound = directory_of(path, name), f"{checkpoint}/{name}"
        try:
            prepared[name] = tables.prepare(
                layer.engine, layer.state, place, checkpoint=bound, copied=copied
            )
        except ValueError as error:
            raise ValueError(f"layer {name!r}: {error}") from error
    position = as_json(position)

    def write(directory: Place) -> None:
        for name, layer in prepared.items():
            place = directory / file_name(name)
            place.mkdir(exist_ok=True)  # every process makes it
            tables.write(place, layer)
        if jax.process_index() == 0:
            write_bound(directory / _LAYERS, checkpoint, sorted(prepared))
            write_bound(directory / _SHARED, checkpoint, parts.shared)

    return {
        LAYERS: lambda at: lambda: write(at),
        VARIABLES: lambda at: trees.begin(at, checkpoint, arrays),
        POSITION: lambda at: lambda: write_position(at, checkpoint, position),
    }


def directory_of(checkpoint: Place, layer: str) -> Place:
    """Return the directory of the tables of a layer, given its path, in a checkpoint."""
    return checkpoint / LAYERS / file_name(layer)


def read_paths(directory: Place) -> tuple[str, list[str]]:
    """Return the name of the checkpoint, and the paths of its layers.

    Raises:
      FileNotFoundError: `layers.json` is missing.
      ValueError: `layers.json` is damaged.
    """
    return read_bound(directory / _LAYERS, schema.sequence(schema.text))


def _layer_differences(
    directory: Place, found: Collection[str], wanted: Mapping[str, Wanted]
) -> list[str]:
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


def _check_left_out(path: Place, leave_out: Sequence[str], known: Collection[str]) -> None:
    """Check that every path in `leave_out` names something.

    Raises:
      ValueError: neither the checkpoint nor the modules have anything at or below a path.
    """
    for one in leave_out:
        if not any(trees.is_left_out(name, [one]) for name in known):
            tops = sorted({name.split("/")[0] for name in known})
            what, expected = f"checkpoint {path}: leave_out", f"{tops}, or paths below"
            raise ValueError(message(what, expected=expected, got=repr(one)))

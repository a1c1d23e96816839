"""Checkpoints of flax modules: a model with all its layers, its optimizer, its metrics.

    layers/layers.json             paths of the layers
    layers/shared.json             paths of what several places share
    layers/model-films-rows~…/     one directory per layer, as `tables.py` writes it

The tables of layers are saved as those of an engine are: rows in logical order, so that they fit
any mesh, placement and packing. Tables of different layers may have the same name, and one layer
object may appear at several places in a model. So a layer is identified by its path alone, and each
of its files says which layer of which checkpoint it belongs to. All other arrays are saved as they
are, by path.

A model, its optimizer and its metrics are graphs of objects, in which an object or variable may
appear at several places. Here everything is identified by its path, such as `model/films/rows` or
`optimizer/step`: the keys from the name that the caller gave the module, joined by slashes. An
object that appears at several places is listed once, under the first of its paths.

Input: modules by name, a position in the data. Output: a directory; or the same modules, filled
from one.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from tpu_embed._checks import check_type, message, refuse
from tpu_embed._types import Array
from tpu_embed.core.layout import make_axes
from tpu_embed.engine_layer import EngineLayer
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
from tpu_embed.io.checkpoint.tables import FoundTables
from tpu_embed.io.files import file_name
from tpu_embed.io.store import Place
from tpu_embed.processes import raise_on_all
from tpu_embed.vocabulary import load_together

_LAYERS = "layers.json"
_SHARED = "shared.json"


def save_modules(
    path: str | Path, modules: Mapping[str, Any], *, position: Any = None
) -> None:
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
    write_checkpoint(
        path, functools.partial(prepare_modules, modules, position, copied=False)
    )


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
        what was saved; a file is damaged, or belongs to another checkpoint, layer, table, slot
        or place.
      FileNotFoundError: there is no checkpoint, or one of its files is missing.
      TypeError: `modules` is not a mapping of names to flax objects.
    """
    root, leave_out = find_checkpoint(path), tuple(leave_out)

    def stays(path):
        return not trees.is_left_out(path, leave_out)

    def of_several(shared):
        kept = ([*filter(stays, paths)] for paths in shared)
        return sorted(paths for paths in kept if len(paths) > 1)

    def prepared():
        whole, wanted = take_apart(modules), {}
        checkpoint, on_disk = read_paths(root / LAYERS)
        leaves, arrays = trees.read_leaves(root / VARIABLES, checkpoint), whole.arrays()
        _check_left_out(root, leave_out, {*on_disk, *leaves, *whole.layers, *arrays})
        for name in filter(stays, whole.layers):
            # New rows are made from the key and the name of their table. Tables of different
            # layers may have the same name, so each layer gets a key of its own.
            own = (
                None
                if key is None
                else jax.random.fold_in(key, zlib.crc32(name.encode()))
            )
            bound, engine = f"{checkpoint}/{name}", whole.layers[name].engine
            wanted[name] = Wanted(engine, own, convert, layer=name, checkpoint=bound)
        # An array that was never placed gets a sharding over every device of the first layer.
        axes = [one.engine.layout.axes for one in wanted.values()] or [
            make_axes(None, None)
        ]
        everywhere = axes[0].sharding(())
        arrays = {
            p: trees.abstract_leaf(arrays[p], everywhere) for p in filter(stays, arrays)
        }
        trees.check_leaves("modules", arrays)
        differences = [
            *_layer_differences(root / LAYERS, [*filter(stays, on_disk)], wanted),
            *trees.leaf_differences(
                leaves, arrays, convert=convert, leave_out=leave_out
            ),
        ]
        lists = schema.sequence(schema.texts)
        saved = of_several(read_bound(root / LAYERS / _SHARED, lists, checkpoint)[1])
        if saved != (shared := of_several(whole.shared)):
            what = "layers and variables of several paths"
            differences.append(
                message(what, expected=f"{saved}, as saved", got=f"{shared}")
            )
        if differences:
            remedy = "give the modules as they were saved; convert=True rounds floats, leave_out= "
            remedy += "takes paths, or those above them"
            raise MismatchError(f"checkpoint {root}", differences, remedy)
        return checkpoint, whole, wanted, arrays

    items = (LAYERS, VARIABLES, POSITION)
    checkpoint, whole, wanted, arrays = open_checkpoint(
        root, items, prepared, writer="save_modules"
    )
    found = {
        name: tables.read(directory_of(root, name), one) for name, one in wanted.items()
    }

    def others():
        variables = trees.read(root / VARIABLES, checkpoint, arrays)
        return variables, read_position(root / POSITION, checkpoint)

    variables, position = raise_on_all("restore", root, others)
    whole.fill(found, variables)
    for name, one in wanted.items():
        host_rows.go_on_from(
            one.engine, directory_of(root, name), found[name].checkpoint
        )
    return position


def prepare_modules(
    modules: Mapping[str, Any],
    position: Any,
    *,
    path: Place,
    checkpoint: str,
    copied: bool,
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

    def write(directory):
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
    return read_bound(directory / _LAYERS, schema.texts)


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


def _check_left_out(
    path: Place, leave_out: Sequence[str], known: Collection[str]
) -> None:
    """Check that every path in `leave_out` names something.

    Raises:
      ValueError: neither the checkpoint nor the modules have anything at or below a path.
    """
    for one in leave_out:
        if not any(trees.is_left_out(name, [one]) for name in known):
            tops = sorted({name.split("/")[0] for name in known})
            refuse(
                f"checkpoint {path}: leave_out",
                expected=f"{tops}, or paths below",
                got=repr(one),
            )


# -- modules in parts -----------------------------------------------------------------------------


Keys = tuple[Any, ...]
"""Keys from the modules to an object or a leaf."""


@dataclasses.dataclass(frozen=True)
class Modules:
    """Modules split into layers and other arrays.

    Attributes:
      by_name: the modules.
      layers: the objects that hold the state of an engine, by path.
      holders: all other variables, and arrays that a module holds without one, with the keys from
        the modules to each.
      shared: the paths of each layer or variable that has several, sorted.
    """

    by_name: dict[str, Any]
    layers: dict[str, EngineLayer]
    holders: list[tuple[Keys, Any]]
    shared: list[list[str]]

    def arrays(self) -> dict[str, Any]:
        """Return all arrays except those of layers, by path; Python numbers become arrays."""
        return {path: _number(array) for path, array in _arrays(self.holders)}

    def fill(self, found: Mapping[str, FoundTables], arrays: Mapping[str, Any]) -> None:
        """Set the states of layers, their maps, and other arrays, in place: all of them or none.

        An interrupt comes before that or after it.

        Args:
          found: states and maps of layers, by path; others stay as they are.
          arrays: other arrays, by path; those that are not given stay as they are.
        """

        def new(keys, array):
            return arrays.get(trees.name_of(keys), array)

        # All values and maps are made before the first is set, so that an error changes nothing.
        values = [
            jax.tree.map_with_path(new, {_path(keys): _value(holder)})[_path(keys)]
            for keys, holder in self.holders
        ]
        loads = []
        for path, one in found.items():
            vocabularies = self.layers[path].engine.vocabularies
            if vocabularies is not None and one.maps is not None:
                loads.append(vocabularies.prepare_load(one.maps, one.homes))
        before = [_value(holder) for _, holder in self.holders]
        own = [one for path in found for one in self.layers[path].state_variables]
        owned = [one.get_raw_value() for one in own]

        def fill():
            self._set_values(values)
            for path, one in found.items():
                self.layers[path].set_state(one.state)

        def undo():
            self._set_values(before)
            for variable, value in zip(own, owned, strict=True):
                variable.set_raw_value(value)

        load_together(loads, fill, undo)

    def _set_values(self, values: Sequence[Any]) -> None:
        for (keys, holder), value in zip(self.holders, values, strict=True):
            if isinstance(holder, nnx.Variable):
                holder.set_raw_value(value)
            else:
                nnx.update(self.by_name, nnx.from_flat_state({keys: value}))


def _value(holder: Any) -> Any:
    """Return the value of a variable, which is any pytree of arrays; an array as it is."""
    return holder.get_raw_value() if isinstance(holder, nnx.Variable) else holder


def _arrays(holders: Iterable[tuple[Keys, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the arrays in the values of holders, with their paths."""
    for keys, holder in holders:
        for path, array in jax.tree.leaves_with_path({_path(keys): _value(holder)}):
            yield trees.name_of(path), array


def take_apart(modules: Mapping[str, Any]) -> Modules:
    """Return the layers and leaves of modules.

    Args:
      modules: models, optimizers, metrics, `Rngs`, states and variables by name.

    Raises:
      TypeError: `modules` is not a mapping, or has a value that is not a flax object.
      ValueError: an array could not be replaced by a restore; two arrays have the same path.
    """
    by_name = _checked(modules)
    objects = dict(nnx.iter_graph(by_name))
    layers = {
        _path(k): one for k, one in objects.items() if isinstance(one, EngineLayer)
    }
    # The variables of layers are saved as tables: only the others become leaves.
    own = {
        id(variable) for layer in layers.values() for variable in layer.state_variables
    }
    flat = nnx.to_flat_state(nnx.state(by_name))
    holders = [(keys, holder) for keys, holder in flat if id(holder) not in own]
    # What is in a tuple cannot be replaced.
    replaceable = nnx.Pytree | nnx.State | dict | list
    for keys, holder in holders:
        if not (
            isinstance(holder, nnx.Variable)
            or isinstance(objects[keys[:-1]], replaceable)
        ):
            refuse(
                f"modules: {_path(keys)!r}",
                expected="arrays that can be replaced",
                got="an array in a tuple",
                remedy="hold it in an nnx.Variable",
            )
    paths = [*layers, *(path for path, _ in _arrays(holders))]
    for path, count in collections.Counter(paths).items():
        if count > 1:
            refuse(
                f"modules: {path!r}",
                expected="one of this path",
                got=f"{count}",
                remedy="name attributes and keys without '/'",
            )
    return Modules(by_name, layers, holders, _shared(by_name))


def _shared(by_name: Mapping[str, Any]) -> list[list[str]]:
    """Return the paths of every layer and variable that has several, each list sorted."""
    paths: dict[int, set[str]] = collections.defaultdict(set)
    for keys, holder in _holders(by_name, (), frozenset()):
        paths[id(holder)].add(_path(keys))
    return sorted(sorted(found) for found in paths.values() if len(found) > 1)


def _holders(
    node: Any, keys: Keys, above: frozenset[int]
) -> Iterator[tuple[Keys, Any]]:
    """Yield every layer and variable at every place that it has, with its keys."""
    if isinstance(node, EngineLayer | nnx.Variable):
        yield keys, node
        return
    if isinstance(node, Mapping):
        children = dict(node)
    elif isinstance(node, list | tuple | nnx.List):
        children = dict(enumerate(node))
    elif isinstance(node, nnx.Pytree):
        children = vars(node)
    else:
        return
    # A module may hold one that holds it: what is above is not entered again.
    for key, child in children.items():
        if id(child) not in above:
            yield from _holders(child, (*keys, key), above | {id(node)})


def _checked(modules: Any) -> dict[str, Any]:
    """Return modules as a dictionary.

    Raises:
      TypeError: `modules` is not a mapping of names to flax objects.
    """
    if not isinstance(modules, Mapping) or isinstance(modules, nnx.Pytree):
        refuse(
            "modules",
            expected="modules by name",
            got=type(modules).__name__,
            remedy='give {"model": model}',
            error=TypeError,
        )
    for name, module in modules.items():
        if not isinstance(name, str):
            refuse("modules", expected="names", got=repr(name), error=TypeError)
        check_type(
            f"modules[{name!r}]",
            module,
            nnx.Pytree | nnx.Variable | nnx.State,
            expected="an nnx module, optimizer, state or variable",
            remedy="hold it in a module; what is no array goes into position=",
        )
    return dict(modules)


def _path(keys: Keys) -> str:
    return "/".join(map(str, keys))


def _number(leaf: Any) -> Any:
    """Return a Python number as the array that a jit would make of it; other leaves unchanged."""
    if not isinstance(leaf, bool | int | float) or isinstance(leaf, np.generic):
        return leaf
    try:
        return np.asarray(leaf, jax.dtypes.canonicalize_dtype(type(leaf)))
    except OverflowError:  # a jit would refuse it
        return leaf

"""Split flax modules into layers that have an engine and all other arrays, and fill them again.

A model, its optimizer and its metrics are graphs of objects, in which an object or variable may
appear at several places. Here everything is identified by its path, such as `model/films/rows` or
`optimizer/step`: the keys from the name that the caller gave the module, joined by slashes. An
object that appears at several places is listed once, under the first of its paths.

Input: modules by name. Output: their layers and arrays by path; or the modules, with new arrays.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from tpu_embed._checks import message
from tpu_embed.core.layout import make_axes
from tpu_embed.engine_layer import EngineLayer
from tpu_embed.io.checkpoint.tables import FoundTables
from tpu_embed.io.checkpoint.trees import abstract_leaf, is_left_out
from tpu_embed.vocabulary import load_together

Keys = tuple[Any, ...]
"""Keys from the modules to an object or a leaf."""


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A variable, or an array that a module holds without one.

    Attributes:
      keys: the keys from the modules to it.
      holder: the variable, or the array itself.
    """

    keys: Keys
    holder: Any

    @property
    def value(self) -> Any:
        """The value of the variable: an array, or any pytree of arrays."""
        return self.holder.get_raw_value() if self.in_variable else self.holder

    @property
    def in_variable(self) -> bool:
        """Whether the holder is a variable."""
        return isinstance(self.holder, nnx.Variable)

    def arrays(self) -> dict[str, Any]:
        """Return the arrays in the value, by path."""
        pairs, _ = jax.tree_util.tree_flatten_with_path({_path(self.keys): self.value})
        return {
            jax.tree_util.keystr(keys, simple=True, separator="/"): array for keys, array in pairs
        }

    def with_arrays(self, by_path: Mapping[str, Any]) -> Any:
        """Return the value with new arrays; arrays that are not given stay."""
        arrays = [by_path.get(path, array) for path, array in self.arrays().items()]
        return jax.tree.unflatten(jax.tree.structure(self.value), arrays)


@dataclasses.dataclass(frozen=True)
class Modules:
    """Modules split into layers and other arrays.

    Attributes:
      by_name: the modules.
      layers: the objects that hold the state of an engine, by path.
      leaves: all other variables and arrays.
      shared: the paths of each layer or variable that has several, sorted.
      leave_out: paths; arrays at or below them are left out.
    """

    by_name: dict[str, Any]
    layers: dict[str, EngineLayer]
    leaves: list[_Leaf]
    shared: list[list[str]]
    leave_out: tuple[str, ...] = ()

    def arrays(self) -> dict[str, Any]:
        """Return all arrays except those of layers, by path; Python numbers become arrays."""
        found: dict[str, Any] = {}
        for leaf in self.leaves:
            found |= leaf.arrays()
        return {
            path: _number(array)
            for path, array in found.items()
            if not is_left_out(path, self.leave_out)
        }

    def abstract_arrays(self) -> dict[str, Any]:
        """Return shapes and shardings of what `arrays` returns.

        An array that was never placed gets a sharding over every device of the first layer.
        """
        meshes = [layer.engine.layout.axes for layer in self.layers.values()]
        everywhere = (meshes[0] if meshes else make_axes(None, None)).sharding(())
        return {path: abstract_leaf(one, everywhere) for path, one in self.arrays().items()}

    def shared_of(self, shared: Sequence[Sequence[str]]) -> list[list[str]]:
        """Return lists of paths without those that are left out, where several remain."""
        kept = [[p for p in paths if not is_left_out(p, self.leave_out)] for paths in shared]
        return sorted(paths for paths in kept if len(paths) > 1)

    def without(self, leave_out: tuple[str, ...]) -> Modules:
        """Return the modules without the layers and arrays at or below some paths."""
        layers = {p: layer for p, layer in self.layers.items() if not is_left_out(p, leave_out)}
        return dataclasses.replace(self, layers=layers, leave_out=leave_out)

    def fill(self, found: Mapping[str, FoundTables], arrays: Mapping[str, Any]) -> None:
        """Set the states of layers, their maps, and all arrays, in place: all of them or none.

        An interrupt comes before that or after it.

        Args:
          found: states and maps of layers, by path.
          arrays: all other arrays, by path.
        """
        # All values and maps are made before the first is set, so that an error changes nothing.
        values = [leaf.with_arrays(arrays) for leaf in self.leaves]
        loads = []
        for path, layer in self.layers.items():
            maps, vocabularies = found[path].maps, layer.engine.vocabularies
            if vocabularies is not None and maps is not None:
                loads.append(vocabularies.prepare_load(maps, found[path].homes))
        before = [leaf.value for leaf in self.leaves]
        own = [one for layer in self.layers.values() for one in layer.state_variables]
        owned = [one.get_raw_value() for one in own]

        def fill() -> None:
            self._set_leaves(values)
            for path, layer in self.layers.items():
                layer.set_state(found[path].state)

        def undo() -> None:
            self._set_leaves(before)
            for variable, value in zip(own, owned, strict=True):
                variable.set_raw_value(value)

        load_together(loads, fill, undo)

    def _set_leaves(self, values: Sequence[Any]) -> None:
        for leaf, value in zip(self.leaves, values, strict=True):
            if leaf.in_variable:
                leaf.holder.set_raw_value(value)
            else:
                nnx.update(self.by_name, nnx.from_flat_state({leaf.keys: value}))


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
    layers = {_path(k): one for k, one in objects.items() if isinstance(one, EngineLayer)}
    # The variables of layers are saved as tables: only the others become leaves.
    own = {id(variable) for layer in layers.values() for variable in layer.state_variables}
    flat = nnx.to_flat_state(nnx.state(by_name))
    leaves = [_Leaf(keys, holder) for keys, holder in flat if id(holder) not in own]
    for leaf in leaves:
        replaceable = nnx.Pytree | nnx.State | dict | list  # what is in a tuple cannot be replaced
        if not (leaf.in_variable or isinstance(objects[leaf.keys[:-1]], replaceable)):
            got, remedy = "an array in a tuple", "hold it in an nnx.Variable"
            expected = "arrays that can be replaced"
            what = f"modules: {_path(leaf.keys)!r}"
            raise ValueError(message(what, expected=expected, got=got, remedy=remedy))
    paths = [*layers, *(path for leaf in leaves for path in leaf.arrays())]
    for path, count in collections.Counter(paths).items():
        if count > 1:
            what, remedy = f"modules: {path!r}", "name attributes and keys without '/'"
            expected = "one of this path"
            raise ValueError(message(what, expected=expected, got=f"{count}", remedy=remedy))
    return Modules(by_name, layers, leaves, _shared(by_name))


def _shared(by_name: Mapping[str, Any]) -> list[list[str]]:
    """Return the paths of every layer and variable that has several, each list sorted."""
    paths: dict[int, set[str]] = collections.defaultdict(set)
    for keys, holder in _holders(by_name, (), frozenset()):
        paths[id(holder)].add(_path(keys))
    return sorted(sorted(found) for found in paths.values() if len(found) > 1)


def _holders(node: Any, keys: Keys, above: frozenset[int]) -> Iterator[tuple[Keys, Any]]:
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
        remedy, got = 'give {"model": model}', type(modules).__name__
        raise TypeError(message("modules", expected="modules by name", got=got, remedy=remedy))
    for name, module in modules.items():
        if not isinstance(name, str):
            raise TypeError(message("modules", expected="names", got=repr(name)))
        if not isinstance(module, nnx.Pytree | nnx.Variable | nnx.State):
            expected, got = "an nnx module, optimizer, state or variable", type(module).__name__
            remedy = "hold it in a module; what is no array goes into position="
            raise TypeError(
                message(f"modules[{name!r}]", expected=expected, got=got, remedy=remedy)
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

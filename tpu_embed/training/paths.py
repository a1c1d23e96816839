"""A parameter tree as a flat list of leaves, and the slots of each leaf in an optimizer's state.

Users name a parameter by its `jax.tree_util` key path, or by the `keystr` of that path. The tree
`{"w": [a, b]}` has the leaves `['w'][0]` and `['w'][1]`, with the numbers 0 and 1.

optax keeps one state for the whole tree. For `adam` over {b, w} its leaves are count, mu of b, mu
of w, nu of b, nu of w: the slots mu and nu per parameter, and a shared count.

Input: a pytree of parameters, paths that a user gives, and the state of a transform over the tree.
Output: `Leaves`, which maps paths to numbers, and trees that hold some of the leaves; `State`: the
slots of a parameter by name, and states without the slots of some parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import optax
from jax.tree_util import KeyPath, keystr

from tpu_embed._checks import refuse
from tpu_embed._types import Array, PyTree
from tpu_embed.optimizers.optax_rows import name_slots

Path = KeyPath | str
"""A key path, or its `keystr`."""


NOTHING = optax.MaskedNode()
"""Stands for an absent leaf. It is a tree without leaves, so optax transforms skip it."""


class Leaves(NamedTuple):
    """A flattened tree: lists with one entry per leaf, in flattening order.

    Attributes:
      structure: the structure of the tree.
      paths: the key path of each leaf.
      labels: the `keystr` of each path.
      values: the leaves.
    """

    structure: Any
    paths: list[KeyPath]
    labels: list[str]
    values: list[Any]

    def find(self, path: Any, *, what: str) -> int:
        """Return the number of the leaf at a path.

        Raises:
          ValueError: no leaf has this path.
        """
        label = path if isinstance(path, str) else repr(path)
        if isinstance(path, tuple):
            label = keystr(path)
        if label not in self.labels:
            refuse(
                what,
                expected=f"the path of one of {listed(self.labels)}",
                got=label,
                remedy="paths are those of jax.tree_util, or their keystr",
            )
        return self.labels.index(label)

    def find_all(self, paths: Iterable[Any], *, what: str) -> list[int]:
        """Return the numbers of the leaves at some paths, in the order of the paths.

        Raises:
          ValueError: no leaf has one of the paths, or a path occurs twice.
        """
        found = [self.find(path, what=what) for path in paths]
        for i in found:
            if found.count(i) > 1:
                got = self.labels[i] or "the parameter"
                refuse(
                    what,
                    expected="each path once",
                    got=f"{got} twice",
                    remedy="leave the repeated one out",
                )
        return found

    def only(self, keep: Mapping[int, Any]) -> PyTree:
        """Return a tree with `NOTHING` at every leaf whose number is not in `keep`."""
        # Leaves a, b, c and keep = {1: x}: the tree of [NOTHING, x, NOTHING].
        return self.structure.unflatten([keep.get(i, NOTHING) for i in range(len(self.labels))])


def is_nothing(tree: Any) -> bool:
    """Return whether a tree is `NOTHING`."""
    return isinstance(tree, optax.MaskedNode)


def leaves_of(params: PyTree) -> Leaves:
    """Return the leaves of a tree with their paths.

    Raises:
      ValueError: the tree has no leaves.

    Example:
      >>> leaves_of({"w": 1.0, "b": [2.0]}).labels
      ["['b'][0]", "['w']"]
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(params)
    if not pairs:
        refuse(
            "params",
            expected="at least one array",
            got=repr(params),
            remedy="give a pytree of arrays",
        )
    paths = [path for path, _ in pairs]
    return Leaves(structure, paths, [keystr(path) for path in paths], [leaf for _, leaf in pairs])


def listed(labels: Iterable[str]) -> str:
    """Return paths as text for a message."""
    # A tree that is a single array has one leaf, whose keystr is the empty string.
    return ", ".join(label or "the parameter" for label in labels)


_NOBODY = -1
"""The owner of a leaf that belongs to no parameter."""


class State(NamedTuple):
    """The leaves of a state, as lists with one entry per leaf.

    Attributes:
      structure: the structure of the state.
      names: the name of each leaf; the same slot of several parameters has one name.
      owners: the number of the parameter that each leaf belongs to, -1 for none.
      values: the leaves.
      divisible: whether the owners are known. If not, they are all -1.
    """

    structure: Any
    names: list[str]
    owners: list[int]
    values: list[Array]
    divisible: bool

    def slots(self, owner: int = _NOBODY) -> dict[str, Array]:
        """Return a parameter's slots by name; without a number what belongs to no parameter."""
        each = zip(self.names, self.owners, self.values, strict=True)
        return {name: value for name, whose, value in each if whose == owner}

    def only(self, parameters: Collection[int]) -> PyTree:
        """Return the state without the slots of parameters other than these.

        The state must be divisible, or these be all parameters. What belongs to no parameter stays.
        """
        # parameters [1] of {b, w}: [count, mu b, mu w] -> the tree of [count, NOTHING, mu w].
        kept = {_NOBODY, *parameters}
        pairs = zip(self.values, self.owners, strict=True)
        return self.structure.unflatten([x if owner in kept else NOTHING for x, owner in pairs])

    def updated(self, state: PyTree) -> State:
        """Return this state with new values from a state that `only` made.

        Where the given state has `NOTHING`, the old value stays.
        """
        new = self.structure.flatten_up_to(state)
        pairs = zip(new, self.values, strict=True)
        return self._replace(values=[old if is_nothing(x) else x for x, old in pairs])

    def with_slots(self, parameter: int, slots: Mapping[str, Array]) -> State:
        """Return this state with new slots of one parameter; shared leaves keep their values."""
        each = zip(self.names, self.owners, self.values, strict=True)
        new = [slots.get(name, old) if whose == parameter else old for name, whose, old in each]
        return self._replace(values=new)


def take_apart(transform: optax.GradientTransformation, state: PyTree, params: Leaves) -> State:
    """Return the leaves of a transform's state with their names and owners.

    Args:
      transform: the transform that made the state.
      state: a state as `transform.init` returns it.
      params: the parameters that the state is for; their values are not read.

    Example:
      >>> from tpu_embed.training.paths import leaves_of
      >>> params = {"b": 1.0, "w": 2.0}
      >>> transform = optax.adam(0.1)
      >>> state = take_apart(transform, transform.init(params), leaves_of(params))
      >>> state.slots(1), state.slots()
      ({'mu': Array(0., dtype=float32...), 'nu': ...}, {'count': Array(0, dtype=int32)})
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(state)
    paths, values = [path for path, _ in pairs], [leaf for _, leaf in pairs]
    owners = _owners(transform, state, params)
    divisible = owners is not None
    owners = owners or [_NOBODY] * len(values)
    # The path of a slot ends with its parameter's path, which is not part of the slot's name:
    # path (0, mu, w) with the owner w, of depth 1, is of the kind (0, mu).
    depths = [len(params.paths[owner]) if owner >= 0 else 0 for owner in owners]
    kinds = [path[: len(path) - depth] for path, depth in zip(paths, depths, strict=True)]
    distinct = list(dict.fromkeys(kinds))
    name_of = dict(zip(distinct, name_slots(distinct), strict=True))
    return State(structure, [name_of[kind] for kind in kinds], owners, values, divisible)


def _owners(
    transform: optax.GradientTransformation, state: PyTree, params: Leaves
) -> list[int] | None:
    """Return the owner of each leaf of the state, None if that cannot be found out.

    optax finds out by running `transform.init` on a placeholder and looking where it reappears.
    """
    # Replace each slot by the number of its parameter and every other leaf by -1:
    # [count, mu b, mu w] -> [-1, 0, 1].
    numbers = params.structure.unflatten(range(len(params.labels)))
    try:
        with jax.numpy_dtype_promotion("standard"):
            owners = optax.tree_map_params(
                transform,
                lambda leaf, number: leaf if is_nothing(leaf) else number,
                state,
                numbers,
                transform_non_params=lambda rest: jax.tree.map(lambda _: _NOBODY, rest),
                is_leaf=is_nothing,
            )
    except (AttributeError, LookupError, TypeError, ValueError):
        return None  # init got a placeholder in place of arrays; a transform may fail in many ways
    found = jax.tree.leaves(owners)
    return found if len(found) == len(jax.tree.leaves(state)) else None

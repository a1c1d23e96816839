"""A parameter tree as a flat list of leaves, each of which can be found by its path.

Users name a parameter by its `jax.tree_util` key path, or by the `keystr` of that path. The tree
`{"w": [a, b]}` has the leaves `['w'][0]` and `['w'][1]`, with the numbers 0 and 1.

Input: a pytree of parameters, and paths that a user gives.
Output: `Leaves`, which maps paths to numbers, and trees that hold some of the leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import optax
from jax.tree_util import KeyPath, keystr

from tpu_embed._checks import message
from tpu_embed._types import PyTree

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
        label = _label(path)
        if label not in self.labels:
            raise ValueError(
                message(
                    what,
                    expected=f"the path of one of {listed(self.labels)}",
                    got=label,
                    remedy="paths are those of jax.tree_util, or their keystr",
                )
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
                raise ValueError(
                    message(
                        what,
                        expected="each path once",
                        got=f"{got} twice",
                        remedy="leave the repeated one out",
                    )
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
        raise ValueError(
            message(
                "params",
                expected="at least one array",
                got=repr(params),
                remedy="give a pytree of arrays",
            )
        )
    paths = [path for path, _ in pairs]
    return Leaves(structure, paths, [keystr(path) for path in paths], [leaf for _, leaf in pairs])


def listed(labels: Iterable[str]) -> str:
    """Return paths as text for a message."""
    # A tree that is a single array has one leaf, whose keystr is the empty string.
    return ", ".join(label or "the parameter" for label in labels)


def _label(path: Any) -> str:
    if isinstance(path, str):
        return path
    return keystr(path) if isinstance(path, tuple) else repr(path)

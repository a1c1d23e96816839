"""Which leaf of an optax state belongs to which parameter, and which to none.

optax keeps one state for the whole tree. For `adam` over {b, w} its leaves are count, mu of b, mu
of w, nu of b, nu of w: the slots mu and nu per parameter, and a shared count.

Input: the state of a transform over a parameter tree.
Output: `State`: the slots of a parameter by name, and states without the slots of some parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import optax

from tpu_embed._types import Array, PyTree
from tpu_embed.optimizers.optax_rows import name_slots
from tpu_embed.training.paths import NOTHING, Leaves, is_nothing

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

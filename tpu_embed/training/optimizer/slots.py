"""An optax state taken apart: what belongs to which parameter, and what to none.

Enters: the state of a transform over a parameter tree. Leaves: the slots of a parameter by name,
and states in which some parameters do not occur. Called by `TreeOptimizer`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import optax

from tpu_embed._checks import message
from tpu_embed._types import Array, PyTree
from tpu_embed.optimizers._slot_names import name_slots
from tpu_embed.training.paths import NOTHING, Leaves, is_nothing

__all__ = ["State", "take_apart"]

_NOBODY = -1


class State(NamedTuple):
    """The leaves of a state.

    Attributes:
      structure: of the state.
      names: of each leaf; the slots of one kind have one name.
      owners: the number of the parameter that each belongs to; -1: to none.
      values: the leaves.
      divisible: whether it is known which leaf belongs to whom.
    """

    structure: Any
    names: list[str]
    owners: list[int]
    values: list[Array]
    divisible: bool

    def slots(self, parameter: int) -> dict[str, Array]:
        """Return a parameter's slots, by name."""
        return {name: self.values[place] for name, place in self._places(parameter)}

    def shared(self) -> dict[str, Array]:
        """Return what belongs to no parameter, by name."""
        return {name: self.values[place] for name, place in self._places(_NOBODY)}

    def _places(self, owner: int) -> Iterator[tuple[str, int]]:
        for place, (name, whose) in enumerate(zip(self.names, self.owners, strict=True)):
            if whose == owner:
                yield name, place

    def check_divisible(self) -> None:
        """Refuse a state of which no part can be left out.

        Raises:
          ValueError: it is not known which leaf belongs to whom.
        """
        if not self.divisible:
            raise ValueError(
                message(
                    "optimizer",
                    expected="a transform whose state has a part for each parameter",
                    got="one that mixes them, and parameters without a gradient",
                    remedy="give a gradient for every parameter, zeros if need be",
                )
            )

    def only(self, parameters: Collection[int]) -> PyTree:
        """Return the state, known to be divisible, without the slots of all but some parameters."""
        kept = (_NOBODY, *parameters)
        pairs = zip(self.values, self.owners, strict=True)
        return self.structure.unflatten([x if owner in kept else NOTHING for x, owner in pairs])

    def updated(self, state: PyTree) -> State:
        """Return this state with the values of one that `only` made."""
        new = self.structure.flatten_up_to(state)
        pairs = zip(new, self.values, strict=True)
        return self._replace(values=[old if is_nothing(x) else x for x, old in pairs])

    def with_slots(self, parameter: int, slots: Mapping[str, Array]) -> State:
        """Return this state with other slots of a parameter; what it shares is left as it is."""
        values = list(self.values)
        for name, place in self._places(parameter):
            values[place] = slots.get(name, values[place])
        return self._replace(values=values)

    def tree(self) -> PyTree:
        """Return the state put together."""
        return self.structure.unflatten(self.values)


def take_apart(transform: optax.GradientTransformation, state: PyTree, params: Leaves) -> State:
    """Take the state of a transform apart.

    Args:
      transform: that made it.
      state: as `transform.init` gave it.
      params: the parameters it is for; their values are not read.

    Example:
      >>> from tpu_embed.training.paths import leaves_of
      >>> params = {"b": 1.0, "w": 2.0}
      >>> transform = optax.adam(0.1)
      >>> state = take_apart(transform, transform.init(params), leaves_of(params))
      >>> state.slots(1), state.shared()
      ({'mu': Array(0., dtype=float32...), 'nu': ...}, {'count': Array(0, dtype=int32)})
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(state)
    paths, values = [path for path, _ in pairs], [leaf for _, leaf in pairs]
    owners = _owners(transform, state, params)
    divisible = owners is not None
    owners = owners or [_NOBODY] * len(values)
    depths = [len(params.paths[owner]) if owner >= 0 else 0 for owner in owners]
    kinds = [path[: len(path) - depth] for path, depth in zip(paths, depths, strict=True)]
    distinct = list(dict.fromkeys(kinds))
    name_of = dict(zip(distinct, name_slots(distinct), strict=True))
    return State(structure, [name_of[kind] for kind in kinds], owners, values, divisible)


def _owners(
    transform: optax.GradientTransformation, state: PyTree, params: Leaves
) -> list[int] | None:
    """Return the owner of each leaf, None if the transform does not tell.

    It tells by making a state for parameters of no known structure.
    """
    numbers = params.structure.unflatten(range(len(params.labels)))

    def own(leaf: Any, number: int) -> Any:
        return leaf if is_nothing(leaf) else number

    def nobody(value: Any) -> Any:
        return jax.tree.map(lambda _: _NOBODY, value)

    try:
        with jax.numpy_dtype_promotion("standard"):
            owners = optax.tree_map_params(
                transform, own, state, numbers, transform_non_params=nobody, is_leaf=is_nothing
            )
    except (AttributeError, LookupError, TypeError, ValueError):
        return None  # the transform's own code, given no arrays: how it fails is up to it
    found = jax.tree.leaves(owners)
    return found if len(found) == len(jax.tree.leaves(state)) else None

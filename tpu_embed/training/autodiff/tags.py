"""Names for intermediate values of a function, so that it can be differentiated by them.

`tag` is the identity and leaves a mark in the jaxpr. The jaxpr can then be run again with a *tap*
at some of the marks: an extra input that does not change the value, but has its derivative.

Input: values to name; later a jaxpr in which they are named.
Output: the same values; later the marks (`Tagged`) whose names are asked for.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from tpu_embed._checks import message
from tpu_embed._jaxprs import CALLS, REMATS, Path, Site
from tpu_embed._snapshot import as_array
from tpu_embed._types import Array, PyTree
from tpu_embed.sparse import find_sites, full, stopped_p, tapped


@dataclasses.dataclass(frozen=True)
class Tag:
    """Stand for a named value among the xs of `gradients`.

    Args:
      name: the name that `tag` gave the value.

    Raises:
      ValueError: the name is not a non-empty string.
    """

    name: str

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name):
            raise ValueError(
                message(
                    "Tag.name",
                    expected="a non-empty string",
                    got=repr(self.name),
                    remedy="use the name given to tag",
                )
            )


def tag(value: PyTree, name: str) -> PyTree:
    """Name an intermediate value, and return it unchanged.

    This is the identity under every transformation. Under `vmap` the named value is the whole
    batch.

    Args:
      value: an array or a pytree of arrays.
      name: the name, which may be given once in a function.

    Raises:
      ValueError: the name is not a non-empty string.

    Example:
      >>> from tpu_embed.training import gradients
      >>> def square(x):
      ...     return tag(3.0 * x, "h") ** 2
      >>> [float(g) for g in gradients(square, [1.0, Tag("h")])]
      [18.0, 6.0]
    """
    leaves, structure = jax.tree.flatten(value)
    arrays = [as_array(leaf) for leaf in leaves]
    return structure.unflatten(tag_p.bind(*arrays, name=Tag(name).name, structure=structure))


@dataclasses.dataclass(frozen=True)
class Tagged(Site):
    """A place in a program where a name was given.

    Attributes:
      own: whether the gradient by the value is wanted.
      stop: whether the value counts as a constant in all other gradients.
    """

    own: bool
    stop: bool

    def taps(self) -> list[Array]:
        """Return zeros like each leaf of the value, or nothing if its gradient is not wanted."""
        return [full(atom.aval, 0) for atom in self.eqn.invars] if self.own else []

    def run(
        self, values: Iterable[Array], taps: Sequence[Array], guard: Array
    ) -> tuple[list[Array], None]:
        """Return the value; its gradient goes to the taps, and no further if it is a stop."""
        if self.stop:
            values = [stopped_p.bind(value, guard) for value in values]
        if self.own:
            values = map(tapped, values, taps)
        return tag_p.bind(*values, **self.eqn.params), None

    def nothing(self) -> None:
        """Return no note: a tag leaves none."""


def find_asked(jaxpr: Any, wanted: Collection[str], stops: Collection[str]) -> list[Any]:
    """Return the lookups of a jaxpr, and the values whose names are given, in program order.

    Args:
      jaxpr: an open jaxpr.
      wanted: the names of values whose gradients are wanted.
      stops: the names at which differentiation stops.

    Raises:
      ValueError: a name is not in the jaxpr, is in it twice, or is where it cannot be tapped.
    """
    by_name: dict[str, list[Tagged]] = collections.defaultdict(list)

    def enter(path: Path) -> Tagged | None:
        name = path[-1][0].params["name"]
        by_name[name].append(Tagged(path, name in wanted, name in stops))
        return by_name[name][0] if name in asked else None

    asked = dict.fromkeys([*wanted, *stops])
    sites = find_sites(jaxpr, {tag_p: enter})
    for name in asked:
        found = by_name.get(name, [])
        if len(found) != 1:
            raise _misplaced(
                name,
                "it once in the function",
                f"it {len(found)} times" if found else f"only {sorted(by_name)}",
                "give each value a name of its own" if found else "tag(value, name) names one",
            )
        # A jit or remat runs its jaxpr once per call. In a scan or while a name has one value per
        # iteration and in a cond perhaps none, so there is no one value to differentiate by; to
        # stop at all of them is possible.
        passed = {*CALLS, *REMATS, *(() if name in wanted else ("scan", "while", "cond"))}
        bad = sorted({eqn.primitive.name for eqn in found[0].around} - passed)
        if bad:
            raise _misplaced(
                name,
                "one value" if name in wanted else "it outside of custom rules",
                f"it inside {', '.join(bad)}",
                "return the value from there and tag it outside",
            )
    return sites


def _misplaced(name: str, expected: str, got: str, remedy: str) -> ValueError:
    what = f"gradients: tag {name!r}"
    return ValueError(message(what, expected=expected, got=got, remedy=remedy))


# -- the primitive --------------------------------------------------------------------------------


def _tag_tangent(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple:
    return tag_p.bind(*primals, **params), list(tangents)


def _tag_batched(values: Sequence[Any], dims: Sequence[int | None], **params: Any) -> tuple:
    """Name the whole batch, with the batch axis moved to the front."""
    # dim is the batch axis of a value, None if the value is not batched.
    pairs = zip(values, dims, strict=True)
    moved = [value if dim is None else jnp.moveaxis(value, dim, 0) for value, dim in pairs]
    return tag_p.bind(*moved, **params), [None if dim is None else 0 for dim in dims]


tag_p = Primitive("tag")
"""The identity of the leaves of a value; the parameters `name` and `structure` describe it."""

# The identity must survive jit, lowering, vmap and both modes of differentiation.
tag_p.multiple_results = True
tag_p.def_impl(lambda *values, **_: list(values))
tag_p.def_abstract_eval(lambda *avals, **_: list(avals))
mlir.register_lowering(tag_p, lambda context, *values, **_: list(values))
batching.primitive_batchers[tag_p] = _tag_batched
ad.primitive_jvps[tag_p] = _tag_tangent
ad.primitive_transposes[tag_p] = lambda cotangents, *_, **__: list(cotangents)

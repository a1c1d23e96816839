"""Names for intermediate values of a function, so that it can be differentiated by them.

`tag` is the identity and leaves a mark in the jaxpr. The jaxpr can then be run again with a *tap*
at some of the marks: an extra input that does not change the value, but has its derivative.

Input: values to name; later a jaxpr in which they are named, and taps by name.
Output: the same values; later the results of the jaxpr, differentiable by the taps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir

from tpu_embed._checks import message
from tpu_embed._jaxprs import CALLS, REMATS, Path, Site, inner_jaxprs, rerun
from tpu_embed._snapshot import as_array
from tpu_embed._types import Array, PyTree
from tpu_embed.kernels.varying import as_varying, axes_of


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
            expected, remedy = "a non-empty string", "use the name given to tag"
            raise ValueError(
                message("Tag.name", expected=expected, got=repr(self.name), remedy=remedy)
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


class TagFound(Site):
    """A place in a jaxpr where a name was given."""

    @property
    def name(self) -> str:
        """The name."""
        return self.eqn.params["name"]

    @property
    def structure(self) -> Any:
        """The structure of the value."""
        return self.eqn.params["structure"]

    @property
    def avals(self) -> list[Any]:
        """The shapes and dtypes of its leaves."""
        return [atom.aval for atom in self.eqn.invars]

    @property
    def places(self) -> frozenset[str]:
        """The names of the primitives around it (scan, cond, …), without calls such as jit."""
        # A jit or remat runs its jaxpr once per call, so it does not count as a place; a scan does.
        return frozenset(eqn.primitive.name for eqn in self.around) - {*CALLS, *REMATS}

    def nothing(self) -> None:
        """Return no note: a tap leaves none."""


class Tap(NamedTuple):
    """Extra inputs that are attached to a named value.

    Attributes:
      arrays: one array per inexact leaf of the value: zeros of the leaf's shape if `own`, otherwise
        scalars.
      own: whether the gradient by `arrays` is the gradient by the value.
      stop: whether the value counts as a constant in all other gradients.
    """

    arrays: Sequence[Array]
    own: bool
    stop: bool


def find_tags(jaxpr: Any, around: Path = ()) -> Iterator[TagFound]:
    """Yield the names given in a jaxpr, in program order.

    Args:
      jaxpr: an open jaxpr.
      around: the equations around it.
    """
    for eqn in jaxpr.eqns:
        if eqn.primitive is tag_p:
            yield TagFound((*around, (eqn, 0)))
        for number, inner in enumerate(inner_jaxprs(eqn)):
            yield from find_tags(inner.jaxpr, (*around, (eqn, number)))


def full(aval: Any, number: float) -> Array:
    """Return an array filled with a number, in an aval's shape, dtype and varying mesh axes."""
    return as_varying(jnp.full(aval.shape, number, aval.dtype), axes_of(aval))


def run_with_tag_taps(
    closed: ClosedJaxpr, args: Sequence[Any], taps: Mapping[str, Tap]
) -> list[Any]:
    """Run a jaxpr with taps at some of the values named in it.

    Args:
      closed: the jaxpr.
      args: the values of its inputs.
      taps: the taps by name. A name whose tap has `own` may stand inside of calls only; other names
        may stand inside of calls, scans, whiles and conds.
    """

    def at(found: TagFound, values: list[Any], _: None) -> tuple[Sequence[Any], None]:
        return tag_p.bind(*_tapped(values, taps[found.name]), **found.eqn.params), None

    sites = [one for one in find_tags(closed.jaxpr) if one.name in taps]
    return rerun(at, closed, args, sites, [None] * len(sites))[0]


def _tapped(values: Sequence[Array], tap: Tap) -> list[Array]:
    # values (float, int, float) with the tap's arrays (a, b): a goes to the first, b to the third.
    arrays = iter(tap.arrays)
    return [
        tapped_p.bind(value, next(arrays), own=tap.own, stop=tap.stop)
        if jnp.issubdtype(value.dtype, jnp.inexact)
        else value
        for value in values
    ]


# -- the primitives --------------------------------------------------------------------------------


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


def _tapped_tangent(
    primals: Sequence[Any], tangents: Sequence[Any], *, own: bool, stop: bool
) -> tuple[Any, Any]:
    """Return the value, and the sum of those tangents that pass.

    The tangent of the value passes unless `stop`; the tangent of the tap passes if `own`.

    The value is returned as it is, without binding the primitive again: the tap is an input of this
    differentiation only, so a differentiation around it must see the identity.
    """
    value, passed = primals[0], [*([] if stop else tangents[:1]), *(tangents[1:] if own else [])]
    passed = [tangent for tangent in passed if type(tangent) is not ad.Zero]
    if not passed:
        return value, ad.Zero(jax.typeof(value).to_tangent_aval())
    return value, passed[0] if len(passed) == 1 else jax.lax.add(*passed)


def _tapped_batched(
    arrays: Sequence[Any], dims: Sequence[Any], **params: Any
) -> tuple[Array, int | None]:
    return tapped_p.bind(*arrays, **params), dims[0]


tapped_p = Primitive("tapped")
"""Maps a value and its tap to the value; only derivatives read the tap."""

tapped_p.def_impl(lambda value, tap, **_: value)
tapped_p.def_abstract_eval(lambda value, tap, **_: value)
mlir.register_lowering(tapped_p, lambda context, value, tap, **_: [value])
batching.primitive_batchers[tapped_p] = _tapped_batched
ad.primitive_jvps[tapped_p] = _tapped_tangent

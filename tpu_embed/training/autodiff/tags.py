"""Names for intermediate values, and the function run again with a tap at some of them.

Enters: values to name; later a jaxpr in which they are named. Leaves: the same values; the jaxpr's
results, with an input more a named value, whose gradient is that of the value. Called by users and
by `gradients.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from tpu_embed._checks import message
from tpu_embed._jaxprs import CALLS, REMATS, evaluate, inner_jaxpr, scan_counts
from tpu_embed._snapshot import as_array
from tpu_embed._types import Array, PyTree
from tpu_embed.kernels.varying import as_varying, axes_of

__all__ = ["Tag", "TagFound", "Tap", "find_tags", "full", "run_with_tag_taps", "tag"]


@dataclasses.dataclass(frozen=True)
class Tag:
    """Stand for the value that `tag` gave this name, among the xs of `gradients`.

    Args:
      name: as given to `tag`.

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
    """Name an intermediate value, and return it.

    The identity, whatever transformation it stands in. Under `vmap` the named value is the whole
    batch.

    Args:
      value: an array or a pytree of them.
      name: once in a function.

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


class TagFound(NamedTuple):
    """Where a name was given.

    Attributes:
      structure: of the value.
      avals: of its leaves.
      places: the primitives it stands in, calls excepted.
    """

    structure: Any
    avals: list[Any]
    places: frozenset[str]


class Tap(NamedTuple):
    """What is put at a named value.

    Attributes:
      arrays: one for each inexact leaf: zeros of its shape where `own`, otherwise scalars.
      own: whether the gradient of `arrays` is that of the value.
      stop: whether the value is constant otherwise.
    """

    arrays: Sequence[Array]
    own: bool
    stop: bool


def find_tags(jaxpr: Any, places: frozenset[str] = frozenset()) -> Iterator[tuple[str, TagFound]]:
    """Yield the names given in a jaxpr, in program order.

    Args:
      jaxpr: an open jaxpr.
      places: the primitives around it.
    """
    for eqn in jaxpr.eqns:
        if eqn.primitive is tag_p:
            avals = [atom.aval for atom in eqn.invars]
            yield eqn.params["name"], TagFound(eqn.params["structure"], avals, places)
        yield from _tags_inside(eqn, places)


def _tags_inside(eqn: Any, places: frozenset[str]) -> Iterator[tuple[str, TagFound]]:
    name = eqn.primitive.name
    around = places if name in _CALLS else places | {name}
    for value in eqn.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(one, "jaxpr", one)
            if hasattr(inner, "eqns"):
                yield from find_tags(inner, around)


def full(aval: Any, number: float) -> Array:
    """Return an array of one number, of an aval's shape, dtype and, in a `shard_map`, variance."""
    return as_varying(jnp.full(aval.shape, number, aval.dtype), axes_of(aval))


def run_with_tag_taps(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], taps: Mapping[str, Tap]
) -> list[Any]:
    """Return the results of a jaxpr.

    Args:
      jaxpr: an open jaxpr.
      consts: values of its constants.
      args: of its inputs.
      taps: by name; a name with an own tap stands in calls only, any in calls, scans, whiles and
        conds only.
    """
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    run = functools.partial(run_with_tag_taps, taps=taps)
    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        if eqn.primitive is tag_p and eqn.params["name"] in taps:
            values = _tapped(values, taps[eqn.params["name"]])
            results = tag_p.bind(*values, **eqn.params)
        elif any(name in taps for name, _ in _tags_inside(eqn, frozenset())):
            results = _STEPS[eqn.primitive.name](run, eqn, values)
        else:
            results = evaluate(jaxpr, eqn, values)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _tapped(values: Sequence[Array], tap: Tap) -> list[Array]:
    arrays = iter(tap.arrays)
    return [
        tapped_p.bind(value, next(arrays), own=tap.own, stop=tap.stop)
        if jnp.issubdtype(value.dtype, jnp.inexact)
        else value
        for value in values
    ]


# -- equations with a program inside ---------------------------------------------------------------

Run = Callable[[Any, Sequence[Any], Sequence[Any]], list[Any]]


def _call(run: Run, eqn: Any, values: list[Any]) -> list[Any]:
    return run(*inner_jaxpr(eqn), values)


def _remat(run: Run, eqn: Any, values: list[Any]) -> list[Any]:
    keep = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
    return jax.checkpoint(functools.partial(run, *inner_jaxpr(eqn)), **keep)(values)


def _scan(run: Run, eqn: Any, values: list[Any]) -> list[Any]:
    params, closed = eqn.params, eqn.params["jaxpr"]
    fixed, carried = scan_counts(eqn)

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        results = run(closed.jaxpr, closed.consts, [*values[:fixed], *carry, *xs])
        return results[:carried], results[carried:]

    first, rest = values[fixed : fixed + carried], values[fixed + carried :]
    keep = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(body, first, rest, **keep)
    return [*carry, *ys]


def _while(run: Run, eqn: Any, values: list[Any]) -> list[Any]:
    params, body, cond = eqn.params, eqn.params["body_jaxpr"], eqn.params["cond_jaxpr"]
    start = params["cond_nconsts"]
    first = start + params["body_nconsts"]

    def more(carry: list[Any]) -> Any:
        return jaxpr_as_fun(cond)(*values[:start], *carry)[0]

    def once(carry: list[Any]) -> list[Any]:
        return run(body.jaxpr, body.consts, [*values[start:first], *carry])

    return jax.lax.while_loop(more, once, values[first:])


def _cond(run: Run, eqn: Any, values: list[Any]) -> list[Any]:
    index, *operands = values
    closed = eqn.params["branches"]
    branches = [functools.partial(run, branch.jaxpr, branch.consts) for branch in closed]
    return jax.lax.switch(index, branches, operands)


_CALLS: Mapping[str, Callable[[Run, Any, list[Any]], list[Any]]] = {
    **dict.fromkeys(CALLS, _call),
    **dict.fromkeys(REMATS, _remat),
}
_STEPS = {**_CALLS, "scan": _scan, "while": _while, "cond": _cond}


# -- the primitives --------------------------------------------------------------------------------


def _tag_tangent(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple:
    return tag_p.bind(*primals, **params), list(tangents)


def _tag_batched(values: Sequence[Any], dims: Sequence[int | None], **params: Any) -> tuple:
    """Tag the whole batch, its axis first."""
    pairs = zip(values, dims, strict=True)
    moved = [value if dim is None else jnp.moveaxis(value, dim, 0) for value, dim in pairs]
    return tag_p.bind(*moved, **params), [None if dim is None else 0 for dim in dims]


tag_p = Primitive("tag")
"""Any number of arrays to themselves; `name` and `structure` say what they are."""

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
    """Add the tap's tangent, drop the value's.

    The value itself is returned, not bound again: a differentiation around this one sees the
    identity, since the tap is an input of this one alone.
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
"""A value and its tap to the value; the tap is read by derivatives only."""

tapped_p.def_impl(lambda value, tap, **_: value)
tapped_p.def_abstract_eval(lambda value, tap, **_: value)
mlir.register_lowering(tapped_p, lambda context, value, tap, **_: [value])
batching.primitive_batchers[tapped_p] = _tapped_batched
ad.primitive_jvps[tapped_p] = _tapped_tangent

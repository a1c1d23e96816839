"""Gradients of a function by its arguments and by values inside it, None where nothing connects.

Enters: a function of arrays and pytrees. Leaves: a gradient each, an `IndexedSlices` for an
argument that is only looked up in. `program.py` makes the function one jaxpr, `TappedProgram` says
what is connected, `jax.vjp` gives the numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from tpu_embed._checks import check_choice, message
from tpu_embed._snapshot import as_array
from tpu_embed._types import Array, PyTree
from tpu_embed.kernels.varying import as_varying, axes_of
from tpu_embed.sparse import Reached, TappedProgram, differentiable, tap_lookups, with_slices
from tpu_embed.training.autodiff.program import Program, Target, as_list, trace
from tpu_embed.training.autodiff.tags import full

__all__ = [
    "Aggregation",
    "AggregationMethod",
    "Gate",
    "Unconnected",
    "UnconnectedGradients",
    "gradients",
    "value_and_gradients",
]


class AggregationMethod(enum.StrEnum):
    """How the gradients of several ys are added up.

    DEFAULT and ADD_N: one pull-back of all cotangents. TREE and ACCUMULATE_N: one pull-back a y,
    summed in the order of ys.
    """

    DEFAULT = "default"
    ADD_N = "add_n"
    TREE = "tree"
    ACCUMULATE_N = "accumulate_n"


class UnconnectedGradients(enum.StrEnum):
    """What stands for the gradient of an x that reaches no y: NONE, or ZERO for zeros like x."""

    NONE = "none"
    ZERO = "zero"


Aggregation = AggregationMethod | Literal["default", "add_n", "tree", "accumulate_n"]
Unconnected = UnconnectedGradients | Literal["none", "zero"]
Gate = Literal["none", "op", "graph"]


def _gate_each(found: list[Any]) -> list[Any]:
    return [None if g is None else jax.lax.optimization_barrier(g) for g in found]


_GATES: Mapping[Gate, Callable[[list[Any]], list[Any]]] = {
    "none": list,
    "op": _gate_each,
    "graph": jax.lax.optimization_barrier,
}
_ONE_BY_ONE = (AggregationMethod.TREE, AggregationMethod.ACCUMULATE_N)


def gradients(
    fn: Callable[..., PyTree],
    xs: PyTree,
    *,
    grad_ys: PyTree = None,
    stop_gradients: Sequence[Any] = (),
    unconnected_gradients: Unconnected = "none",
    aggregation_method: Aggregation | None = None,
    gate_gradients: Gate = "none",
) -> list[Any]:
    """Return Σ over ys of dy/dx for every x.

    With ys = fn(*xs) and their cotangents c: Σ_y c_y ∂y/∂x. An x is connected to a y if a path
    leads from it to y along operations on floats (or complex numbers), into jit, remat, scan and
    any branch of a cond. Integers, booleans, `stop_gradient`, floor, ceil and round cut; `sign` and
    a product with zero don't: their gradient is zeros. A function with a custom rule connects each
    of its arguments with each of its results.

    Args:
      fn: of as many arguments as xs has, `Tag`s left out; returns ys, an array or a pytree.
      xs: a list or tuple of arrays and pytrees; after them a `Tag` for every value inside fn whose
        gradient is wanted too: its total derivative, whatever other x it depends on. A single array
        is a list of one.
      grad_ys: c, shaped and nested as ys; None there is ones, and None as a whole. A complex y
        needs one. The numbers for an integer y are ignored: nothing reaches it.
      stop_gradients: names or `Tag`s of values inside fn through which nothing is differentiated;
        their own gradient stays.
      unconnected_gradients: of an x that no path connects: "none" gives None, "zero" zeros like x.
      aggregation_method: None or a word of `AggregationMethod`.
      gate_gradients: "none", "op" (a barrier to optimization at each gradient) or "graph" (one at
        all of them together): when they are computed, never what they are.

    Returns:
      one gradient an x, in order, nested as x, of its leaves' shapes and dtypes. For a leaf that fn
      uses only as the table of `embedding_lookup`, an `IndexedSlices`: duplicates kept, ordered by
      y where each is pulled back by itself, then lookup in program order, then position. It has the
      lookups that are connected to a y (where each y is pulled back by itself: to that one), zero
      gradients included; uses of the table that are not connected don't count. Complex gradients
      follow `jax.grad`'s convention.

    Raises:
      TypeError: xs of no such kind; a cotangent of another kind than its y (for a float one a
        float, for a complex one a complex, for an integer one either of float and integer), or none
        for a complex y.
      ValueError: an unknown word; cotangents nested or shaped otherwise than ys; a tag that fn
        doesn't have, has twice or has where it can't be differentiated by: an x in a scan, while
        or cond, any in a custom rule; an x that a `while` of unknown trip count connects to a y.

    Example:
      >>> def fn(w, b):
      ...     return {"y": w * jnp.arange(2.0), "n": jnp.floor(b)}
      >>> gradients(fn, [jnp.ones(2), jnp.ones(2)])
      [Array([0., 1.], dtype=float32), None]
    """
    _, found = value_and_gradients(
        lambda *arguments: (fn(*arguments), None),
        xs,
        grad_ys=grad_ys,
        stop_gradients=stop_gradients,
        unconnected_gradients=unconnected_gradients,
        aggregation_method=aggregation_method,
        gate_gradients=gate_gradients,
    )
    return found


def value_and_gradients(
    fn: Callable[..., tuple[PyTree, PyTree]],
    xs: PyTree,
    *,
    grad_ys: PyTree = None,
    stop_gradients: Sequence[Any] = (),
    unconnected_gradients: Unconnected = "none",
    aggregation_method: Aggregation | None = None,
    gate_gradients: Gate = "none",
) -> tuple[tuple[PyTree, PyTree], list[Any]]:
    """Return what fn returns, and the gradients of the first part of it.

    Args:
      fn: returns ys and a pytree of arrays that are not differentiated.
      xs: as in `gradients`, and so is all else.

    Returns:
      (ys, aux), then the gradients; without any x, nothing is computed and they are (None, None).
    """
    words, methods = tuple(map(str, UnconnectedGradients)), tuple(map(str, AggregationMethod))
    check_choice("gradients: unconnected_gradients", unconnected_gradients, words)
    check_choice("gradients: aggregation_method", aggregation_method, (None, *methods))
    check_choice("gradients: gate_gradients", gate_gradients, tuple(_GATES))
    xs = as_list(xs)
    if not xs:
        return (None, None), []
    program = trace(fn, xs, stop_gradients)
    results, total = _aggregate(program, _cotangents(program, grad_ys), aggregation_method)
    n = program.ys.num_leaves
    values = program.ys.unflatten(results[:n]), program.aux.unflatten(results[n:])
    zero = unconnected_gradients == UnconnectedGradients.ZERO
    nested = [
        structure.unflatten([_gradient(target, total, zero) for target in targets])
        for structure, targets in program.xs
    ]
    return values, _GATES[gate_gradients](nested)


def _gradient(target: Target, total: Mapping[int, Any], zero: bool) -> Any:
    if target.place is not None and target.place in total:
        return total[target.place]
    return full(target.aval, 0) if zero else None


def _cotangents(program: Program, grad_ys: PyTree) -> list[Array | None]:
    """Return the cotangent of every y; None for an integer one.

    Raises:
      TypeError: of another kind than its y.
      ValueError: nested or shaped otherwise.
    """
    avals = program.closed.out_avals[: program.ys.num_leaves]
    given = [None] * len(avals)
    if grad_ys is not None:
        try:
            given = program.ys.flatten_up_to(grad_ys)
        except (ValueError, TypeError) as error:
            got = str(jax.tree.structure(grad_ys, is_leaf=lambda x: x is None))
            expected = f"the structure of ys, {program.ys}"
            what, remedy = "gradients: grad_ys", "nest them as fn's result, None for ones"
            raise ValueError(message(what, expected=expected, got=got, remedy=remedy)) from error
    paths = jax.tree_util.tree_flatten_with_path(program.ys.unflatten(range(len(avals))))[0]
    names = [f"gradients: grad_ys{jax.tree_util.keystr(path)}" for path, _ in paths]
    return [_cotangent(*one) for one in zip(names, avals, given, strict=True)]


def _cotangent(what: str, aval: Any, given: Any) -> Array | None:
    kind = _kind(aval.dtype)
    if given is None:
        if kind == "complex":
            remedy = "give one: a complex y has no cotangent by default"
            raise TypeError(message(what, expected="complex numbers", got="None", remedy=remedy))
        return full(aval, 1) if kind == "float" else None
    given = as_array(given)
    kinds = ("float", "integer") if kind == "integer" else (kind,)
    if _kind(given.dtype) not in kinds:
        expected = f"{' or '.join(kinds)} numbers for a y of {aval.dtype}"
        got, remedy = str(given.dtype), f"convert it: .astype({aval.dtype.name!r})"
        raise TypeError(message(what, expected=expected, got=got, remedy=remedy))
    if given.shape != aval.shape:
        expected, got = f"y's shape {aval.shape}", f"{given.shape}"
        remedy = "jnp.broadcast_to spreads one number"
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))
    if kind == "integer":
        return None
    return as_varying(given.astype(aval.dtype), axes_of(aval))


def _kind(dtype: Any) -> str:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return "complex"
    return "float" if jnp.issubdtype(dtype, jnp.floating) else "integer"


def _aggregate(
    program: Program, cotangents: Sequence[Array | None], method: Aggregation | None
) -> tuple[list[Any], dict[int, Any]]:
    """Return the program's results, and the gradient of each input that reaches one of the ys."""
    tables = differentiable(program.inputs[: program.arguments])
    tapped = tap_lookups(program.closed, program.inputs, tables)
    reached = _connected(program, tapped)
    ys = [i for i, one in enumerate(reached) if one != Reached()]
    if not ys:
        return jaxpr_as_fun(program.closed)(*program.inputs), {}
    results: list[Any] = []
    total: dict[int, Any] = {}
    for group in [[i] for i in ys] if method in _ONE_BY_ONE else [ys]:
        wanted = Reached.any_of(reached[i] for i in group)
        seeds = {i: cotangents[i] for i in group}
        results, found = _pull_back(program, tapped, wanted, seeds)
        for place, gradient in found.items():
            total[place] = total[place] + gradient if place in total else gradient
    return results, total


def _connected(program: Program, tapped: TappedProgram) -> list[Reached]:
    """Return for every y what reaches it: inputs that are xs, and lookups.

    A table that is used otherwise too, for any of the ys, is among the inputs for each y that its
    lookups reach: its gradient is dense.

    Raises:
      ValueError: an x reaches a y through a `while`.
    """
    targets = [target for _, targets in program.xs for target in targets]
    names = {target.place: target.name for target in targets if target.place is not None}
    found = tapped.reach(names)[: program.ys.num_leaves]
    for one in found:
        if one.looped:
            raise ValueError(
                message(
                    f"gradients: {', '.join(names[i] for i in sorted(one.looped))}",
                    expected="a path to ys that can be differentiated backwards",
                    got="one through a while loop, whose trip count is not known",
                    remedy="use jax.lax.scan, or a fori_loop with bounds known when tracing",
                )
            )
    dense = Reached.any_of(found).inputs
    looked_up = [{tapped.lookups[k].table for k in one.lookups} for one in found]
    both = zip(found, looked_up, strict=True)
    return [one._replace(inputs=one.inputs | (dense & tables)) for one, tables in both]


def _pull_back(
    program: Program,
    tapped: TappedProgram,
    wanted: Reached,
    cotangents: Mapping[int, Array | None],
) -> tuple[list[Any], dict[int, Any]]:
    """Return the program's results, and gradients.

    Args:
      program: the function.
      tapped: the same, its lookups tapped.
      wanted: by which inputs and lookups.
      cotangents: of some of the results, by place.
    """

    def run(inputs: dict[int, Array], taps: dict[int, Array]) -> tuple[list[Any], tuple]:
        results, asked = tapped.run(inputs, taps)
        return [results[i] for i in cotangents], (results, asked)

    stops = range(program.arguments, len(program.inputs))  # a stop acts where its tap is perturbed
    inputs = {i: program.inputs[i] for i in sorted(wanted.inputs.union(stops))}
    _, back, (results, asked) = jax.vjp(run, inputs, tapped.taps(wanted.lookups), has_aux=True)
    by_input, by_lookup = back(list(cotangents.values()))
    dense = {i: by_input[i] for i in wanted.inputs}
    return results, with_slices(dense, tapped, asked, by_lookup)

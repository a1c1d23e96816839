"""Gradients of a function by its arguments and inner values, None where no path connects the two.

`jax.grad` gives zeros both for an argument that does not matter and for one whose gradient happens
to be zero. Here the function is first traced into one `Program`, whose inputs are the leaves of the
arguments and a tap for each lookup and each named value. It tells what is connected with what;
`pull_back` then computes the numbers.

An inner value gets a name from `tag`, which is the identity and leaves a mark in the jaxpr. The
jaxpr can then be run again with a *tap* at some of the marks: an extra input that does not change
the value, but has its derivative.

Input: a function of arrays and pytrees, and what to differentiate it by.
Output: one gradient per argument or named value; an `IndexedSlices` for an argument that is only
looked up in.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from tpu_embed._checks import check_choice, check_type, is_number, message, refuse
from tpu_embed._jaxprs import CALLS, REMATS, Site
from tpu_embed._types import Array, PyTree, as_array
from tpu_embed.kernels.tracing import as_varying, axes_of
from tpu_embed.sparse import (
    Program,
    find_sites,
    full,
    pull_back,
    stopped_p,
    tap,
    tapped,
)


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
            refuse(
                "Tag.name",
                expected="a non-empty string",
                got=repr(self.name),
                remedy="use the name given to tag",
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
    return structure.unflatten(
        tag_p.bind(*arrays, name=Tag(name).name, structure=structure)
    )


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


def find_asked(
    jaxpr: Any, wanted: Collection[str], stops: Collection[str]
) -> list[Any]:
    """Return the lookups of a jaxpr, and the values whose names are given, in program order.

    Args:
      jaxpr: an open jaxpr.
      wanted: the names of values whose gradients are wanted.
      stops: the names at which differentiation stops.

    Raises:
      ValueError: a name is not in the jaxpr, is in it twice, or is where it cannot be tapped.
    """
    by_name: dict[str, list[Tagged]] = collections.defaultdict(list)

    def enter(path):
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
                "give each value a name of its own"
                if found
                else "tag(value, name) names one",
            )
        # A jit or remat runs its jaxpr once per call. In a scan or while a name has one value per
        # iteration and in a cond perhaps none, so there is no one value to differentiate by; to
        # stop at all of them is possible.
        passed = {
            *CALLS,
            *REMATS,
            *(() if name in wanted else ("scan", "while", "cond")),
        }
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


def _tag_batched(
    values: Sequence[Any], dims: Sequence[int | None], **params: Any
) -> tuple:
    """Name the whole batch, with the batch axis moved to the front."""
    # dim is the batch axis of a value, None if the value is not batched.
    pairs = zip(values, dims, strict=True)
    moved = [
        value if dim is None else jnp.moveaxis(value, dim, 0) for value, dim in pairs
    ]
    return tag_p.bind(*moved, **params), [None if dim is None else 0 for dim in dims]


tag_p = Primitive("tag")
"""The identity of the leaves of a value; the parameters `name` and `structure` describe it."""

# The identity must survive jit, lowering, vmap and both modes of differentiation.
tag_p.multiple_results = True
tag_p.def_impl(lambda *values, **_: list(values))
tag_p.def_abstract_eval(lambda *avals, **_: list(avals))
mlir.register_lowering(tag_p, lambda context, *values, **_: list(values))
batching.primitive_batchers[tag_p] = _tag_batched
ad.primitive_jvps[tag_p] = lambda values, by, **named: (
    tag_p.bind(*values, **named),
    list(by),
)
ad.primitive_transposes[tag_p] = lambda cotangents, *_, **__: list(cotangents)


class AggregationMethod(enum.StrEnum):
    """How the gradients of several ys are added up.

    DEFAULT and ADD_N: one pull-back of all cotangents. TREE and ACCUMULATE_N: one pull-back per y;
    their results are summed in the order of ys.
    """

    DEFAULT = "default"
    ADD_N = "add_n"
    TREE = "tree"
    ACCUMULATE_N = "accumulate_n"


class UnconnectedGradients(enum.StrEnum):
    """What is returned for an x that no path connects to a y: NONE, or ZERO for zeros like x."""

    NONE = "none"
    ZERO = "zero"


Aggregation = AggregationMethod | Literal["default", "add_n", "tree", "accumulate_n"]
Unconnected = UnconnectedGradients | Literal["none", "zero"]
Gate = Literal["none", "op", "graph"]


_GATES = {
    "none": list,
    "op": lambda found: [
        g if g is None else jax.lax.optimization_barrier(g) for g in found
    ],
    # The barrier takes the whole nested list: no gradient is used before all are computed.
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
    leads from it to y along operations on floats (or complex numbers). Paths go through jit, remat,
    scan and every branch of a cond. Integers, booleans, `stop_gradient`, floor, ceil and round cut
    a path; `sign` and a product with zero do not: their gradient is zeros. A function with a custom
    rule connects each of its arguments with each of its results.

    Args:
      fn: a function with one argument for each x that is not a `Tag`. It returns ys, an array or a
        pytree.
      xs: a list or tuple of arrays and pytrees, followed by a `Tag` for every value inside fn whose
        gradient is wanted too. The gradient by a `Tag` is the total derivative by that value, also
        where the value itself depends on another x. A single array counts as a list of one.
      grad_ys: the cotangents c, in the shapes and the nesting of ys. None, for one y or as a whole,
        means ones. A complex y needs a cotangent. The numbers for an integer y are ignored, since
        no path leads to it.
      stop_gradients: names or `Tag`s of values inside fn. Nothing is differentiated through these
        values; the gradient by such a value itself can still be asked for.
      unconnected_gradients: what an x without a path to any y gets: "none" gives None, "zero" zeros
        like x.
      aggregation_method: None or a word of `AggregationMethod`.
      gate_gradients: "none", "op" (an optimization barrier at each gradient) or "graph" (one
        barrier for all gradients together). It decides when gradients are computed and never
        changes their values.

    Returns:
      one gradient per x, in the order and nesting of xs, with the shapes and dtypes of the leaves.
      A leaf that fn uses only as the table of `embedding_lookup` gets an `IndexedSlices`. It keeps
      duplicates and is ordered by lookup in program order, then by position; where each y is pulled
      back by itself, first by y. It holds the lookups that are connected to a y (where each y is
      pulled back by itself: to that y), also where their gradient is zero. Other uses of the table
      only count if they are connected to a y. Complex gradients follow the convention of
      `jax.grad`.

    Raises:
      TypeError: xs that is neither a list, a tuple nor an array; a cotangent of another kind than
        its y (a float y takes floats, a complex y complex numbers, an integer y integers or
        floats); no cotangent for a complex y.
      ValueError: an unknown word; cotangents of another nesting or shape than ys; a tag that is not
        in fn, is in it twice, or is where fn cannot be differentiated by it (an x in a scan, while
        or cond; any tag in a custom rule); an x that a `while` of unknown trip count connects to a
        y.

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
    """Return the results of fn, and the gradients of the first of them.

    Args:
      fn: a function that returns (ys, aux); aux is a pytree of arrays that are not differentiated.
      xs: as in `gradients`, like all other arguments.

    Returns:
      (ys, aux), and one gradient per x. With no xs fn is not run: (None, None) and [].
    """
    words, methods = (
        tuple(map(str, UnconnectedGradients)),
        tuple(map(str, AggregationMethod)),
    )
    check_choice("gradients: unconnected_gradients", unconnected_gradients, words)
    check_choice("gradients: aggregation_method", aggregation_method, (None, *methods))
    check_choice("gradients: gate_gradients", gate_gradients, tuple(_GATES))
    xs = _as_list(xs)
    if not xs:
        return (None, None), []
    arguments = [x for x in xs if not isinstance(x, Tag)]
    paths, structure = jax.tree_util.tree_flatten_with_path(arguments)
    names = [f"xs{jax.tree_util.keystr(path)}" for path, _ in paths]
    leaves = [
        _as_array(name, leaf) for name, (_, leaf) in zip(names, paths, strict=True)
    ]

    def flat(*leaves):
        return fn(*structure.unflatten(leaves))

    # Trace twice: tags and lookups are only known once the function is traced; then `tap` traces
    # the function with their taps.
    closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
    tags = [x.name for x in xs if isinstance(x, Tag)]
    sites = find_asked(closed.jaxpr, tags, _stop_names(stop_gradients))
    program = tap(closed, leaves, sites)
    # xs = [{"a": u, "b": v}, w, Tag("h")]: places [{"a": 0, "b": 1}, 2, 3], if the value h has the
    # first tap.
    tagged = {
        one.eqn.params["name"]: one.eqn.params["structure"].unflatten(mine)
        for one, mine in zip(sites, program.taps, strict=True)
        if isinstance(one, Tagged) and one.own
    }
    places = [
        *structure.unflatten(range(len(leaves))),
        *(tagged[name] for name in tags),
    ]
    named = dict(enumerate(names))
    for name, mine in tagged.items():
        named |= dict.fromkeys(jax.tree.leaves(mine), f"Tag({name!r})")
    # The program returns one flat list: [leaves of ys, leaves of aux].
    ys, aux = map(jax.tree.structure, shapes)
    cotangents = _cotangents(ys, closed.out_avals[: ys.num_leaves], grad_ys)
    results, total = _aggregate(program, named, cotangents, aggregation_method)

    def gradient(place):
        # An absent place means "not connected"; a connected one with zero gradient has zeros.
        if place not in total and unconnected_gradients == UnconnectedGradients.ZERO:
            return full(jax.typeof(program.values[place]), 0)
        return total.get(place)

    values = (
        ys.unflatten(results[: ys.num_leaves]),
        aux.unflatten(results[ys.num_leaves :]),
    )
    return values, _GATES[gate_gradients](jax.tree.map(gradient, places))


def checked_loss(loss: Any) -> Array:
    """Return what a loss function returned, as an array.

    Raises:
      ValueError: it is not an array of floats.
    """
    # A pair (loss, aux) would become an array of two numbers where both are scalars: refuse it.
    if not hasattr(loss, "dtype") and not is_number(loss):
        refuse(
            "loss",
            expected="a float array",
            got=type(loss).__name__,
            remedy="return the loss alone: there is no aux",
        )
    array = as_array(loss)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        refuse(
            "loss",
            expected="a float array",
            got=f"{array.dtype} of shape {array.shape}",
            remedy="return real floats",
        )
    return array


def _as_list(xs: Any) -> list[Any]:
    """Return xs as a list; a single array or `Tag` becomes a list of one.

    Raises:
      TypeError: `xs` is neither a list, a tuple nor an array.
      ValueError: an argument stands after a `Tag`.
    """
    if (
        isinstance(xs, Tag)
        or hasattr(xs, "dtype")
        or isinstance(xs, (int, float, complex))
    ):
        xs = [xs]
    check_type(
        "gradients: xs",
        xs,
        (list, tuple),
        expected="a list or tuple of the function's arguments",
        remedy="give one pytree as [tree]",
    )
    # False < True, so the list is sorted exactly if all Tags stand after the arguments.
    are_tags = [isinstance(x, Tag) for x in xs]
    if are_tags != sorted(are_tags):
        refuse(
            "gradients: xs",
            expected="Tags after the arguments",
            got=f"an argument after {xs[are_tags.index(True)]}",
            remedy="put the Tags last",
        )
    return list(xs)


def _as_array(name: str, leaf: Any) -> Array:
    what, got = f"gradients: {name}", type(leaf).__name__
    remedy = "close over it: xs holds only what to differentiate by"
    if isinstance(leaf, Tag):
        got, remedy = leaf, "put the Tag into xs directly, not inside a pytree"
    try:
        return as_array(leaf)
    except (TypeError, ValueError) as error:
        refuse(
            what,
            expected="an array",
            got=got,
            remedy=remedy,
            error=TypeError,
            cause=error,
        )


def _stop_names(stops: Any) -> list[str]:
    stops = [stops] if isinstance(stops, (str, Tag)) else list(stops)
    for stop in stops:
        check_type(
            "gradients: stop_gradients",
            stop,
            (str, Tag),
            expected="names of tags or Tags",
            remedy="name the value with tag inside the function",
        )
    return [stop.name if isinstance(stop, Tag) else stop for stop in stops]


def _cotangents(ys: Any, avals: Sequence[Any], grad_ys: PyTree) -> list[Array | None]:
    """Return the cotangent of every y, None for an integer y.

    Args:
      ys: the structure of ys.
      avals: of its leaves.
      grad_ys: the cotangents that a user gives.

    Raises:
      TypeError: a cotangent is of another kind than its y.
      ValueError: `grad_ys` has another nesting or other shapes than ys.
    """
    # ys {"n": int, "y": float} with grad_ys {"n": None, "y": c} -> given [None, c]: flatten_up_to
    # stops at the leaves of ys, so that a None stays an entry of its own.
    given = [None] * len(avals)
    if grad_ys is not None:
        try:
            given = ys.flatten_up_to(grad_ys)
        except (ValueError, TypeError) as error:
            refuse(
                "gradients: grad_ys",
                expected=f"the structure of ys, {ys}",
                got=str(jax.tree.structure(grad_ys, is_leaf=lambda x: x is None)),
                remedy="nest them as fn's result, None for ones",
                cause=error,
            )
    paths = jax.tree_util.tree_flatten_with_path(ys.unflatten(range(len(avals))))[0]
    names = [f"gradients: grad_ys{jax.tree_util.keystr(path)}" for path, _ in paths]
    return [_cotangent(*one) for one in zip(names, avals, given, strict=True)]


def _cotangent(what: str, aval: Any, given: Any) -> Array | None:
    kind = _kind(aval.dtype)
    if given is None:
        if kind == "complex":
            refuse(
                what,
                expected="complex numbers",
                got="None",
                remedy="give one: a complex y has no cotangent by default",
                error=TypeError,
            )
        return full(aval, 1) if kind == "float" else None
    given = as_array(given)
    kinds = ("float", "integer") if kind == "integer" else (kind,)
    if _kind(given.dtype) not in kinds:
        refuse(
            what,
            expected=f"{' or '.join(kinds)} numbers for a y of {aval.dtype}",
            got=str(given.dtype),
            remedy=f"convert it: .astype({aval.dtype.name!r})",
            error=TypeError,
        )
    if given.shape != aval.shape:
        refuse(
            what,
            expected=f"y's shape {aval.shape}",
            got=f"{given.shape}",
            remedy="jnp.broadcast_to makes this shape of one number",
        )
    if kind == "integer":
        return None
    # In a shard_map a cotangent must vary over the same mesh axes as its y.
    return as_varying(given.astype(aval.dtype), axes_of(aval))


def _kind(dtype: Any) -> str:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return "complex"
    return "float" if jnp.issubdtype(dtype, jnp.floating) else "integer"


def _aggregate(
    program: Program,
    names: Mapping[int, str],
    cotangents: Sequence[Array | None],
    method: Aggregation | None,
) -> tuple[list[Any], dict[int, Any]]:
    """Return the results of the program, and the gradients by place.

    Only places that reach at least one of the ys are among the gradients.

    Args:
      program: the program.
      names: the name of each place that is not the tap of a lookup, for messages.
      cotangents: the cotangent of each y.
      method: how the gradients of several ys are added up.

    Raises:
      ValueError: a place reaches a y through a `while`.
    """
    every, looped = program.reaching(range(len(cotangents)))
    if looped:
        # The tap of a lookup stands for the table.
        bad = sorted({program.tables.get(i, i) for i in looped})
        refuse(
            f"gradients: {', '.join(names[i] for i in bad)}",
            expected="a path to ys that can be differentiated backwards",
            got="one through a while loop, whose trip count is not known",
            remedy="use jax.lax.scan, or a fori_loop with bounds known when tracing",
        )
    results, total = [], {}
    # ys 0 and 2 are connected: one pull-back of [0, 2], or two, of [0] and of [2].
    ys = [i for i in range(len(cotangents)) if program.reached[i].reached]
    for part in [[i] for i in ys] if ys and method in _ONE_BY_ONE else [ys]:
        wanted, _ = program.reaching(part)
        # y0 = lookup(w), y1 = w.sum(): w is dense for both, as a gradient that is sparse for y0 and
        # dense for y1 could not be added up.
        wanted |= every & {program.tables.get(i) for i in wanted}
        results, found = pull_back(program, wanted, {i: cotangents[i] for i in part})
        for place, gradient in found.items():
            # IndexedSlices + IndexedSlices concatenates their entries.
            total[place] = total[place] + gradient if place in total else gradient
    return results, total

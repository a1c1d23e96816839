"""A user's function as one flat jaxpr whose inputs are everything it is differentiated by.

Each leaf of an argument is an input. To differentiate by a value inside the function, or to stop at
it, the value gets a *tap*: a further input whose derivative is that of the value.

Input: the function, its xs (arguments and `Tag`s), and the names at which differentiation stops.
Output: a `Program`: the jaxpr, the values of its inputs, and which inputs belong to which x.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from tpu_embed._checks import message
from tpu_embed._snapshot import as_array
from tpu_embed._types import Array
from tpu_embed.training.autodiff.tags import Tag, TagFound, Tap, find_tags, full, run_with_tag_taps


class Target(NamedTuple):
    """A leaf of an x, and the input of the program that stands for it.

    Attributes:
      name: the leaf's name, for messages.
      aval: the leaf's shape and dtype.
      place: its position among the program's inputs; None for an integer in a tagged value.
    """

    name: str
    aval: Any
    place: int | None


class Program(NamedTuple):
    """A traced function.

    Attributes:
      closed: maps `inputs` to the leaves of ys, followed by those of aux.
      inputs: the values of the inputs.
      arguments: how many of the inputs are leaves of arguments; the rest are taps.
      xs: for each x its structure and its leaves.
      ys: the structure of ys.
      aux: the structure of aux.
    """

    closed: ClosedJaxpr
    inputs: list[Array]
    arguments: int
    xs: list[tuple[Any, list[Target]]]
    ys: Any
    aux: Any


def as_list(xs: Any) -> list[Any]:
    """Return xs as a list; a single array or `Tag` becomes a list of one.

    Raises:
      TypeError: `xs` is neither a list, a tuple nor an array.
      ValueError: an argument stands after a `Tag`.
    """
    if isinstance(xs, Tag) or hasattr(xs, "dtype") or isinstance(xs, (int, float, complex)):
        xs = [xs]
    if not isinstance(xs, (list, tuple)):
        expected, got = "a list or tuple of the function's arguments", type(xs).__name__
        raise TypeError(
            message("gradients: xs", expected=expected, got=got, remedy="give one pytree as [tree]")
        )
    # False < True, so the list is sorted exactly if all Tags stand after the arguments.
    are_tags = [isinstance(x, Tag) for x in xs]
    if are_tags != sorted(are_tags):
        expected, got = "Tags after the arguments", f"an argument after {xs[are_tags.index(True)]}"
        remedy = "put the Tags last"
        raise ValueError(message("gradients: xs", expected=expected, got=got, remedy=remedy))
    return list(xs)


def trace(fn: Callable[..., Any], xs: Sequence[Any], stops: Iterable[Any]) -> Program:
    """Trace a function into a `Program`.

    The inputs are the leaves of the arguments, then the taps in the order of the names: with
    xs = [{"a": u, "b": v}, w, Tag("h")] they are u, v, w and the tap of h, at the places 0 to 3.

    Args:
      fn: a function of the xs that are not Tags; it returns (ys, aux).
      xs: as `as_list` returns them.
      stops: the names or Tags at which differentiation stops.

    Raises:
      TypeError: a leaf of an argument is not an array, or a stop is neither a name nor a Tag.
      ValueError: a name is not in the function, is in it twice, or is where it cannot be tapped.
    """
    arguments = [x for x in xs if not isinstance(x, Tag)]
    wanted = [x.name for x in xs if isinstance(x, Tag)]
    leaves, structure = jax.tree.flatten(arguments)
    names = [f"xs{jax.tree_util.keystr(path)}" for path, _ in _leaves_of(arguments)]
    leaves = [_as_array(name, leaf) for name, leaf in zip(names, leaves, strict=True)]

    def flat(*leaves: Any) -> Any:
        return fn(*structure.unflatten(leaves))

    # Trace twice: names are only known once the function is traced; then the taps are added.
    closed, (ys, aux) = jax.make_jaxpr(flat, return_shape=True)(*leaves)
    found = _find(closed.jaxpr, wanted, _stop_names(stops))
    taps = {name: _tap(one, name in wanted, stop) for name, (one, stop) in found.items()}
    closed = _with_taps(closed, leaves, taps)

    targets = [
        Target(name, jax.typeof(leaf), i)
        for i, (name, leaf) in enumerate(zip(names, leaves, strict=True))
    ]
    of_tags = _tag_targets(found, taps, len(leaves))
    inputs = [*leaves, *(array for tap in taps.values() for array in tap.arrays)]
    # Deal the targets out to the arguments: {"a": u, "b": v} takes two, w takes one.
    places, result = iter(targets), []
    for x in xs:
        if isinstance(x, Tag):
            result.append((found[x.name][0].structure, of_tags[x.name]))
        else:
            own = jax.tree.structure(x)
            result.append((own, [next(places) for _ in range(own.num_leaves)]))
    structures = jax.tree.structure(ys), jax.tree.structure(aux)
    return Program(closed, inputs, len(leaves), result, *structures)


def _leaves_of(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def _as_array(name: str, leaf: Any) -> Array:
    if isinstance(leaf, Tag):
        remedy = "put the Tag into xs directly, not inside a pytree"
        raise TypeError(message(f"gradients: {name}", expected="an array", got=leaf, remedy=remedy))
    try:
        return as_array(leaf)
    except (TypeError, ValueError) as error:
        what, got = f"gradients: {name}", type(leaf).__name__
        remedy = "close over it: xs holds only what to differentiate by"
        raise TypeError(message(what, expected="an array", got=got, remedy=remedy)) from error


def _stop_names(stops: Any) -> list[str]:
    stops = [stops] if isinstance(stops, (str, Tag)) else list(stops)
    for stop in stops:
        if not isinstance(stop, (str, Tag)):
            expected, got = "names of tags or Tags", repr(stop)
            remedy = "name the value with tag inside the function"
            raise TypeError(
                message("gradients: stop_gradients", expected=expected, got=got, remedy=remedy)
            )
    return [stop.name if isinstance(stop, Tag) else stop for stop in stops]


def _find(
    jaxpr: Any, wanted: Sequence[str], stops: Sequence[str]
) -> dict[str, tuple[TagFound, bool]]:
    """Return for each name in xs or stops where it was given, and whether it is a stop."""
    by_name: dict[str, list[TagFound]] = collections.defaultdict(list)
    for one in find_tags(jaxpr):
        by_name[one.name].append(one)
    result = {}
    for name in dict.fromkeys([*wanted, *stops]):
        what, places = f"gradients: tag {name!r}", by_name.get(name, [])
        if len(places) != 1:
            got = f"it {len(places)} times" if places else f"only {sorted(by_name)}"
            remedy = "give each value a name of its own" if places else "tag(value, name) names one"
            expected = "it once in the function"
            raise ValueError(message(what, expected=expected, got=got, remedy=remedy))
        _check_places(what, places[0].places, name in wanted)
        result[name] = (places[0], name in stops)
    return result


def _check_places(what: str, places: frozenset[str], is_x: bool) -> None:
    # In a scan or while a name has one value per iteration and in a cond perhaps none, so there is
    # no one value to differentiate by; to stop at all of them is possible.
    loops = {"scan", "while", "cond"}
    expected = "one value" if is_x else "it outside of custom rules"
    bad = sorted(places if is_x else places - loops)
    if bad:
        remedy = "return the value from there and tag it outside"
        got = f"it inside {', '.join(bad)}"
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))


def _inexact(found: TagFound) -> list[Any]:
    return [aval for aval in found.avals if jnp.issubdtype(aval.dtype, jnp.inexact)]


def _tap(found: TagFound, own: bool, stop: bool) -> Tap:
    # The derivative of a tap of its own has the shape of the value. A tap that only stops is a
    # scalar: it is an input so that JAX applies the derivative rule, and costs no memory.
    avals = _inexact(found)
    arrays = [full(a, 0) if own else jnp.zeros((), a.dtype) for a in avals]
    return Tap(arrays, own, stop)


def _with_taps(closed: ClosedJaxpr, leaves: list[Array], taps: Mapping[str, Tap]) -> ClosedJaxpr:
    """Return the program with the arrays of the taps as further inputs after its own."""
    if not taps:
        return closed

    def run(leaves: list[Array], arrays: dict[str, Sequence[Array]]) -> list[Any]:
        given = {name: tap._replace(arrays=arrays[name]) for name, tap in taps.items()}
        return run_with_tag_taps(closed, leaves, given)

    # make_jaxpr sorts the keys of a plain dict; an OrderedDict keeps the order of `taps`, in which
    # `trace` appends the same arrays to the inputs.
    order = collections.OrderedDict((name, tap.arrays) for name, tap in taps.items())
    return jax.make_jaxpr(run)(leaves, order)


def _tag_targets(
    found: Mapping[str, tuple[TagFound, bool]], taps: Mapping[str, Tap], place: int
) -> dict[str, list[Target]]:
    """Return the leaves of every tagged value; `place` is the position of the first tap."""
    # h = (float, int) and k = float from place 3: h has the places [3, None] and k has [4].
    result = {}
    for name, (one, _) in found.items():
        places = iter(range(place, place + len(taps[name].arrays)))
        place += len(taps[name].arrays)
        result[name] = [
            Target(
                f"Tag({name!r})",
                aval,
                next(places) if jnp.issubdtype(aval.dtype, jnp.inexact) else None,
            )
            for aval in one.avals
        ]
    return result

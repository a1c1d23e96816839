"""A function of nnx models as a program of their variables, run with a tap at every lookup.

Enters: the function, its arguments, which of them are models to differentiate by. Leaves: value,
aux, gradients of variables, and of the activations of every layer; what the function changed in its
models is changed. Called by `gradients.py`.

A layer is known in the program by its step counter: every `engine_lookup` equation that the counter
reaches is a lookup of that layer.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import jax
from flax import nnx

from tpu_embed._checks import message
from tpu_embed._types import Array
from tpu_embed.nn.variables import TOKEN, Counter, Table
from tpu_embed.sparse import (
    Call,
    Lookup,
    Reached,
    Sources,
    count_lookups,
    engine_lookup_p,
    level_of_caller,
    propagate,
    tap_lookups,
)

__all__ = ["ActivationGradient", "Gradients", "Path", "differentiate", "is_node", "path_of"]

Path = tuple[Any, ...]
"""Keys from a model to a layer."""

_CONTEXT = "tpu_embed.nn"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ActivationGradient:
    """The gradient of the activations of one lookup.

    Attributes:
      ids: int32 or int64 `[…]`, those looked up, or a placed batch's array.
      weights: floats of the ids' shape, or None.
      gradient: of the activations, in their shape and dtype.
      call: which lookup it was.
    """

    ids: Array
    weights: Array | None
    gradient: Array
    call: Call = dataclasses.field(metadata={"static": True})


class Gradients(NamedTuple):
    """What `differentiate` finds.

    Attributes:
      value: of the function.
      aux: beside it.
      variables: a state a model.
      tables: for every model, path of a layer -> its lookups that are connected to the value, in
        program order.
    """

    value: Any
    aux: Any
    variables: list[Any]
    tables: list[dict[Path, list[ActivationGradient]]]


def is_node(value: Any) -> bool:
    """Tell whether a value is an nnx module, variable or the like."""
    return isinstance(value, (nnx.Pytree, nnx.Variable))


def path_of(keys: Path) -> str:
    """Return the keys joined by slashes."""
    return "/".join(str(key) for key in keys)


def differentiate(
    f: Callable[..., tuple[Any, Any]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    which: Sequence[int],
    wrt: Any,
) -> Gradients:
    """Return a function's value and aux, and gradients by some of its arguments.

    Args:
      f: returns value and aux.
      args: its positional arguments.
      kwargs: its other arguments.
      which: places of the models to differentiate by.
      wrt: an nnx filter: by which of their variables.

    Returns:
      gradients in the order of `which`.

    Raises:
      TypeError: a value that is no float scalar.
      ValueError: a lookup of one of the models whose gradient is not found.
    """
    with nnx.update_context(_CONTEXT):
        program = _trace(f, args, kwargs, which, wrt)
        (value, state), variables, tables = _run(program)
        with nnx.merge_context(_CONTEXT, inner=False) as context:
            merged = context.merge(program.graphdef, state)
    aux = program.aux.unflatten([merged["aux"][i] for i in range(len(merged["aux"]))])
    parts = [variables[i] if i in variables else nnx.State({}) for i in range(len(which))]
    return Gradients(value, aux, parts, tables)


class _Program(NamedTuple):
    """A function of models as a jaxpr of their variables.

    Attributes:
      closed: the jaxpr.
      inputs: variables to differentiate by, and the others.
      outputs: the structure of its results: (value, state after it).
      of_value: how many of them are the value's.
      graphdef: what is static of the models after it, and of aux.
      aux: the structure of aux.
      models: how many are differentiated by.
      layers: number of a layer's counter among the inputs -> place of its model, keys to it.
      rows: number of a layer's table among the inputs -> the same.
    """

    closed: Any
    inputs: tuple[Any, Any]
    outputs: Any
    of_value: int
    graphdef: Any
    aux: Any
    models: int
    layers: dict[int, Path]
    rows: dict[int, Path]


def _trace(
    f: Callable[..., tuple[Any, Any]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    which: Sequence[int],
    wrt: Any,
) -> _Program:
    leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)), is_leaf=is_node)
    chosen = [len(jax.tree.leaves(tuple(args[:i]), is_leaf=is_node)) for i in which]
    others = [i for i, leaf in enumerate(leaves) if is_node(leaf) and i not in chosen]
    places = [*chosen, *others]  # a layer that two of them share belongs to the first
    wanted = nnx.filterlib.to_predicate(wrt)
    with nnx.split_context(_CONTEXT) as context:
        by = lambda path, value: path[0] < len(which) and wanted(path[1:], value)  # noqa: E731
        nodes = {key: leaves[i] for key, i in enumerate(places)}
        graphdef, inputs, rest = context.split(nodes, by, ...)
    static = {}

    def pure(*states: Any) -> tuple[Any, Any]:
        with nnx.merge_context(_CONTEXT, inner=True) as context:
            merged = context.merge(graphdef, *states)
        given = list(leaves)
        for key, i in enumerate(places):
            given[i] = merged[key]
        new_args, new_kwargs = jax.tree.unflatten(structure, given)
        value, aux = f(*new_args, **new_kwargs)
        parts, static["aux"] = jax.tree.flatten(aux, is_leaf=is_node)
        with nnx.split_context(_CONTEXT) as context:
            after = context.split({"models": merged, "aux": dict(enumerate(parts))})
        static["graphdef"], state = after
        return value, state

    closed, shapes = jax.make_jaxpr(pure, return_shape=True)(inputs, rest)
    outputs, found = jax.tree.structure(shapes), _layers(inputs, rest, len(which))
    both = (static["graphdef"], static["aux"])
    of_value = len(jax.tree.leaves(shapes[0]))
    return _Program(closed, (inputs, rest), outputs, of_value, *both, len(which), *found)


def _layers(inputs: Any, rest: Any, models: int) -> tuple[dict[int, Path], dict[int, Path]]:
    """Return which inputs of a program are counters, and tables, of layers of the models."""
    first, structure = len(jax.tree.leaves(inputs)), jax.tree.structure(rest)
    numbers = structure.unflatten(range(first, first + structure.num_leaves))
    counters, tables = {}, {}
    for path, variable in nnx.to_flat_state(numbers):
        if not isinstance(path[0], int) or path[0] >= models:
            continue
        if isinstance(variable, Counter) and path[-1] == TOKEN:
            counters[variable.get_raw_value()] = path[:-1]
        elif isinstance(variable, Table):
            tables[variable.get_raw_value()] = path[:-2]  # …/tables/<stack>
    return counters, tables


def _run(program: _Program) -> tuple[Any, Any, list[dict[Path, list[ActivationGradient]]]]:
    """Return value and state after the function, gradients of variables and of activations."""
    chosen, _ = program.inputs
    tapped = tap_lookups(program.closed, jax.tree.leaves(program.inputs), program.layers)
    _check_found(program, tapped.lookups)
    _warn_of_other_uses(program)
    reached = Reached.any_of(tapped.reach(())[: program.of_value])

    def value_of(chosen: Any, taps: dict[int, Array]) -> tuple[Any, Any]:
        results, asked = tapped.run(dict(enumerate(jax.tree.leaves(chosen))), taps)
        value, state = jax.tree.unflatten(program.outputs, results)
        return value, (state, asked)

    both = jax.value_and_grad(value_of, argnums=(0, 1), has_aux=True)
    (value, (state, asked)), (gradients, by_lookup) = both(chosen, tapped.taps(reached.lookups))
    tables: list[dict[Path, list[ActivationGradient]]] = [{} for _ in range(program.models)]
    for k in sorted(by_lookup):
        (ids, *weights), call = asked[k], tapped.lookups[k].eqn.params["call"]
        model, *keys = program.layers[tapped.lookups[k].table]
        found = ActivationGradient(ids, weights[0] if weights else None, by_lookup[k], call)
        tables[model].setdefault(tuple(keys), []).append(found)
    return (value, state), gradients, tables


def _check_found(program: _Program, lookups: Sequence[Lookup]) -> None:
    jaxpr = program.closed.jaxpr
    counts = count_lookups(jaxpr, {jaxpr.invars[i]: i for i in program.layers})
    for number, count in counts.items():
        known = sum(lookup.table == number for lookup in lookups)
        if known < count:
            raise ValueError(
                message(
                    f"layer {path_of(program.layers[number][1:])!r}",
                    expected="lookups in plain code, jit, vmap, remat, scan or cond",
                    got=f"{count - known} where its gradient is not found",
                    remedy="look up outside of custom_jvp, custom_vjp, while, shard_map, and of "
                    "what differentiates by weights; let a scan close over the layer",
                )
            )


def _warn_of_other_uses(program: _Program) -> None:
    """Warn of tables that the value is computed from otherwise than by a lookup."""
    jaxpr = program.closed.jaxpr
    sources = [Sources(1 << i if i in program.rows else 0) for i in range(len(jaxpr.invars))]
    found = propagate(jaxpr, sources, cut=frozenset([engine_lookup_p.name]))[: program.of_value]
    read = functools.reduce(operator.or_, (one.reached for one in found), 0)
    for number in sorted(program.rows):
        if read >> number & 1:
            warnings.warn(
                f"layer {path_of(program.rows[number][1:])!r}: its table is a constant where the "
                "function reads it otherwise than by a lookup, and gets no gradient from there",
                stacklevel=level_of_caller(str(FilePath(__file__).parent)),
            )

"""A function of nnx models as a program of their variables, run with a tap at every lookup.

nnx models are objects that a function may change. Here they are split into static structure and
arrays, and the function is traced as a pure function of the arrays. A layer is identified in the
program by its step counter: an `engine_lookup` equation whose first operand is that counter is a
lookup of that layer.

Input: the function, its arguments, and which of them are models to differentiate by.
Output: value, aux, the gradients of variables, and those of the activations of every layer. Changes
that the function makes to its models are kept.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from tpu_embed._checks import message, warn_user
from tpu_embed._types import Array
from tpu_embed.nn.variables import TOKEN, Counter, Table
from tpu_embed.sparse import (
    Call,
    Lookup,
    Reached,
    Sources,
    count_lookups,
    engine_lookup_p,
    propagate,
    tap_lookups,
)

Path = tuple[Any, ...]
"""The keys that lead from a model to a layer."""

_CONTEXT = "tpu_embed.nn"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ActivationGradient:
    """The gradient of the activations of one lookup.

    Attributes:
      ids: the ids looked up, int32 or int64 `[…]`, or the array of a placed batch.
      weights: floats in the shape of the ids, or None; of a placed batch of keys the states that it
        may be looked up in, int32 `[3]`.
      gradient: the gradient of the activations, in their shape and dtype. Of a `Jagged` it is that
        of its values: `[S, C, D]` for a placed batch; padded, `[B, L, D]`, for dense ids.
      call: the static part of the lookup.
    """

    ids: Array
    weights: Array | None
    gradient: Array
    call: Call = dataclasses.field(metadata={"static": True})


class Gradients(NamedTuple):
    """The result of `differentiate`.

    Attributes:
      value: the value of the function.
      aux: the function's second result.
      variables: for each model, the state of gradients of its variables.
      tables: for each model, path of a layer -> the gradients of its lookups that are connected to
        the value, in program order.
    """

    value: Any
    aux: Any
    variables: list[Any]
    tables: list[dict[Path, list[ActivationGradient]]]


def is_node(value: Any) -> bool:
    """Return whether a value is an nnx module, variable or another nnx node."""
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
    """Return a function's value and aux, and the gradients by some of its arguments.

    Args:
      f: a function that returns (value, aux).
      args: its positional arguments.
      kwargs: its keyword arguments.
      which: the positions of the models to differentiate by.
      wrt: an nnx filter for the variables to differentiate by.

    Returns:
      gradients in the order of `which`.

    Raises:
      TypeError: the value is not a float scalar.
      ValueError: one of the models has a lookup whose gradient cannot be found.
    """
    # The context remembers which objects were split, so that merging the state after the function
    # writes its changes into the user's own models.
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
      inputs: the variables to differentiate by, and the other variables.
      outputs: the structure of the results, (value, state after the function).
      of_value: how many of the results belong to the value.
      graphdef: the static part of the models after the function, and of aux.
      aux: the structure of aux.
      models: how many models are differentiated by.
      layers: number of the input that is a layer's counter -> position of the model, then the keys
        to the layer.
      rows: number of the input that is a layer's table -> the same.
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
    # The models to differentiate by come first: nnx gives a layer that two of them share to the
    # first, so its gradient is not lost to a model that is not differentiated.
    places = [*chosen, *others]
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
    """Return which inputs of a program are counters, and which are tables, of the models' layers.

    Only `rest` is searched, since a filter for parameters selects neither counters nor tables. The
    inputs of the program are the leaves of `inputs`, then those of `rest`: if `inputs` has 3
    leaves, the first leaf of `rest` has the number 3.
    """
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
    """Return (value, state after the function), the gradients of variables, those of lookups."""
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
    # count_lookups counts them anywhere, `lookups` are those that can be tapped.
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
    """Warn about tables that the value is computed from in another way than by a lookup."""
    # One bit per table; paths through lookups are cut, so any bit that remains is another use.
    jaxpr = program.closed.jaxpr
    sources = [Sources(1 << i if i in program.rows else 0) for i in range(len(jaxpr.invars))]
    found = propagate(jaxpr, sources, cut=frozenset([engine_lookup_p.name]))[: program.of_value]
    read = functools.reduce(operator.or_, (one.reached for one in found), 0)
    for number in sorted(program.rows):
        if read >> number & 1:
            warn_user(
                f"layer {path_of(program.rows[number][1:])!r}: its table is a constant where the "
                "function reads it in another way than by a lookup, and gets no gradient there"
            )

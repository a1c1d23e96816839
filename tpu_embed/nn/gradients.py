"""Gradients of a model whose layers have tables: its parameters' as by nnx, its tables' sparse.

Enters: a function of a model. Leaves: its value, the gradients of the model's parameters, and those
of the activations of every table, which `apply_table_gradients` gives to the tables' optimizers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from tpu_embed._checks import is_int, message
from tpu_embed._types import Array
from tpu_embed.core.engine_lookup import Call, LookedUp, engine_update
from tpu_embed.core.taps import Lookup, Taps, find_lookups, lookups_reached, run_with_taps
from tpu_embed.nn.variables import Counter, Slot, Table, held, state_of

__all__ = [
    "TableGradients",
    "apply_table_gradients",
    "fused_value_and_grad",
    "sparse_value_and_grad",
]

Path = tuple[Any, ...]
"""Keys from a model to a layer."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ActivationGradient:
    """The gradient of the activations of one lookup.

    Attributes:
      ids: that were looked up: `[…]`, or a placed batch's array.
      weights: of the ids, or None.
      gradient: of the activations, in their shape.
      call: which lookup it was.
    """

    ids: Array
    weights: Array | None
    gradient: Array
    call: Call = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TableGradients:
    """The gradients of a model's tables: as long as the ids of the step.

    Attributes:
      lookups: path of a layer, its keys joined by slashes -> an `ActivationGradient` a lookup, in
        program order.
    """

    lookups: dict[str, tuple[ActivationGradient, ...]]

    def map(self, fn: Callable[[Array], Array]) -> TableGradients:
        """Return these with `fn` of every activation's gradient: scaled or clipped."""
        return TableGradients(
            {
                path: tuple(dataclasses.replace(one, gradient=fn(one.gradient)) for one in some)
                for path, some in self.lookups.items()
            }
        )


def sparse_value_and_grad(
    f: Callable[..., Any],
    *,
    argnums: int | Sequence[int] = 0,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, tuple[Any, Any]]]:
    """Return a function that gives `f`'s value, a model's gradients and those of its tables.

    As `nnx.value_and_grad`, with the gradients of all tables that `f` looks up beside those of the
    parameters. Lookups are found through jit, vmap, remat, scan and cond; what `f` changes in the
    model (statistics, keys) is changed.

    Args:
      f: returns a float scalar; with `has_aux` a pair of that and anything.
      argnums: which positional arguments are models to differentiate by.
      wrt: an nnx filter: which of their variables.
      has_aux: whether `f` returns a pair.

    Returns:
      a function that returns (value, (gradients, table gradients)), value being (value, aux) with
      `has_aux`: an `nnx.State` and a `TableGradients`, or tuples of them when `argnums` is a
      sequence. Jit it: it traces `f` anew at every call.

    Raises:
      TypeError: an argument that is no nnx module; a value that is no float.
      ValueError: argnums that name no argument, or one twice; a lookup where it is not found: in a
        `custom_vjp` function, a `while`, a `shard_map`, or by a layer that a scan carries along.
    """

    @functools.wraps(f)
    def value_and_gradients(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, Any]]:
        which = _models(argnums, args)
        with nnx.update_context(_CONTEXT):
            program = _trace(functools.partial(_pair, f, has_aux), args, kwargs, which, wrt)
            value, gradients, tables, out = _run(program)
            with nnx.merge_context(_CONTEXT, inner=False) as context:
                merged = context.merge(program.graphdef, out)
        aux = program.aux.unflatten([merged["aux"][i] for i in range(len(merged["aux"]))])
        by_model = [(_under(gradients, i), _select(tables, i)) for i in which]
        found = (tuple(g for g, _ in by_model), tuple(t for _, t in by_model))
        result = (value, aux) if has_aux else value
        return result, found if isinstance(argnums, Sequence) else by_model[0]

    return value_and_gradients


def fused_value_and_grad(
    f: Callable[..., Any],
    *,
    argnums: int | Sequence[int] = 0,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Return a function that gives `f`'s value and gradients, and trains the tables it looked up.

    In place of `nnx.value_and_grad` in a training step: each table's optimizer is applied where
    its gradient is made, once, with the sum of all its lookups; what is returned are the gradients
    of the other parameters, for `nnx.Optimizer`. Evaluate with the model itself, not with this.

    Args:
      f: see `sparse_value_and_grad`.
      argnums: see there.
      wrt: see there.
      has_aux: see there.

    Returns:
      a function that returns (value, gradients), or ((value, aux), gradients).

    Raises:
      TypeError: see `sparse_value_and_grad`.
      ValueError: see there; a table without an optimizer that was looked up. No table changes then.

    Example:
      >>> import jax.numpy as jnp, tpu_embed
      >>> rule = tpu_embed.optimizers.SGD(1.0)
      >>> films = tpu_embed.nn.Embed(10, 2, optimizer=rule, rngs=nnx.Rngs(0))
      >>> films.load(jnp.ones((10, 2)))
      >>> loss, _ = fused_value_and_grad(lambda model: model(jnp.array([3, 3])).sum())(films)
      >>> float(loss), films.embedding[2:4].tolist()
      (4.0, [[1.0, 1.0], [-1.0, -1.0]])
    """
    inner = sparse_value_and_grad(f, argnums=argnums, wrt=wrt, has_aux=has_aux)

    @functools.wraps(f)
    def value_and_gradients(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        result, (gradients, tables) = inner(*args, **kwargs)
        several = isinstance(argnums, Sequence)
        which = _models(argnums, args)
        for i, found in zip(which, tables if several else (tables,), strict=True):
            apply_table_gradients(args[i], found)
        return result, gradients

    return value_and_gradients


def apply_table_gradients(model: Any, gradients: TableGradients) -> None:
    """Give the tables of a model one step of their optimizers; those not looked up none.

    Args:
      model: the layers, or what holds them.
      gradients: of this model.

    Raises:
      ValueError: a table without an optimizer, or not in the model; no table changes then.
    """
    variables = nnx.state(model, (Table, Slot, Counter))
    changed = {}
    for path, some in gradients.lookups.items():
        keys, engine = _find(variables, path), some[0].call.engine
        state = state_of(engine.layout.groups[0].name, _at(keys, variables))
        lookups = [LookedUp(one.call, one.ids, one.weights) for one in some]
        new = engine_update(engine, state, lookups, [one.gradient for one in some])
        changed |= {
            (*keys, *name): value for name, value in nnx.to_flat_state(nnx.State(held(new)))
        }
    nnx.update(model, nnx.from_flat_state(changed))


def _at(keys: Path, node: Any) -> Any:
    for key in keys:
        node = node[key]
    return node


def _find(variables: Any, path: str) -> Path:
    """Return the keys of the layer at a path."""
    for keys, _ in nnx.to_flat_state(variables):
        if keys[-1] == _TOKEN and _joined(keys[:-1]) == path:
            return keys[:-1]
    known = [_joined(keys[:-1]) for keys, _ in nnx.to_flat_state(variables) if keys[-1] == _TOKEN]
    raise ValueError(message("gradients", expected=f"of layers {known}", got=f"of {path!r}"))


def _joined(keys: Path) -> str:
    return "/".join(str(key) for key in keys)


def _pair(f: Callable[..., Any], has_aux: bool, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    result = f(*args, **kwargs)
    if not has_aux:
        return result, None
    if not isinstance(result, tuple) or len(result) != 2:
        got, expected = type(result).__name__, "a pair of the value and aux"
        raise TypeError(message("has_aux=True: f", expected=expected, got=got))
    return result


def _models(argnums: Any, args: Sequence[Any]) -> list[int]:
    """Return the places of the models among the arguments."""
    given = list(argnums) if isinstance(argnums, Sequence) else [argnums]
    wanted = all(is_int(i) and -len(args) <= i < len(args) for i in given)
    which = [int(i) % len(args) for i in given] if wanted else []
    if not wanted or len(set(which)) != len(which):
        expected = f"different places among {len(args)} positional arguments"
        raise ValueError(message("argnums", expected=expected, got=repr(argnums)))
    for i in which:
        if not _is_node(args[i]):
            got = type(args[i]).__name__
            raise TypeError(message(f"argument {i}", expected="an nnx module", got=got))
    return which


def _is_node(value: Any) -> bool:
    return isinstance(value, (nnx.Pytree, nnx.Variable))


# -- the function as a program, and its lookups ----------------------------------------------------

_CONTEXT = "tpu_embed.nn"
_TOKEN = "step"
"""The counter of a layer by which its lookups are known in a program."""


class _Program(NamedTuple):
    """A function of models as a jaxpr of their variables.

    Attributes:
      closed: the jaxpr.
      inputs: variables to differentiate by, and the others.
      outputs: the structure of its results: (value, state after it).
      graphdef: what is static of the models after it, and of aux.
      aux: the structure of aux.
      tokens: number of an input -> path of the layer whose token it is, place of its model first.
    """

    closed: Any
    inputs: tuple[Any, Any]
    outputs: Any
    graphdef: Any
    aux: Any
    tokens: dict[int, Path]


def _trace(
    f: Callable[..., tuple[Any, Any]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    which: Sequence[int],
    wrt: Any,
) -> _Program:
    """Return the program of a function that returns value and aux."""
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
    nodes = {i: leaf for i, leaf in enumerate(leaves) if _is_node(leaf)}
    mine = {len(jax.tree.leaves(args[:i], is_leaf=_is_node)): i for i in which}
    with nnx.split_context(_CONTEXT) as context:
        chosen = nnx.All(wrt, lambda path, _: path[0] in mine)
        graphdef, inputs, others = context.split(nodes, chosen, ...)
    static = {}

    def pure(*states: Any) -> tuple[Any, Any]:
        with nnx.merge_context(_CONTEXT, inner=True) as context:
            merged = context.merge(graphdef, *states)
        given = [merged.get(i, leaf) for i, leaf in enumerate(leaves)]
        new_args, new_kwargs = jax.tree.unflatten(structure, given)
        value, aux = f(*new_args, **new_kwargs)
        parts, static["aux"] = jax.tree.flatten(aux, is_leaf=_is_node)
        with nnx.split_context(_CONTEXT) as context:
            after = context.split({"models": merged, "aux": dict(enumerate(parts))})
        static["graphdef"], state = after
        return value, state

    closed, shapes = jax.make_jaxpr(pure, return_shape=True)(inputs, others)
    return _Program(
        closed,
        (inputs, others),
        jax.tree.structure(shapes),
        static["graphdef"],
        static["aux"],
        _tokens(inputs, others, mine),
    )


def _tokens(inputs: Any, others: Any, models: Mapping[int, int]) -> dict[int, Path]:
    """Return input -> path for the tokens of the layers of some models.

    Args:
      inputs: the variables to differentiate by.
      others: all other variables.
      models: first key of a path -> place of the model.
    """
    first = len(jax.tree.leaves(inputs))
    structure = jax.tree.structure(others)
    numbers = structure.unflatten(range(first, first + structure.num_leaves))
    return {
        counter.get_raw_value(): (models[path[0]], *path[1:-1])  # type: ignore[index]
        for path, counter in nnx.to_flat_state(numbers)
        if isinstance(counter, Counter) and path[-1] == _TOKEN and path[0] in models
    }


def _run(program: _Program) -> tuple[Any, Any, dict[Path, tuple[ActivationGradient, ...]], Any]:
    """Return the value, the gradients of variables and of tables, and the state after it."""
    jaxpr, consts = program.closed.jaxpr, program.closed.consts
    tokens = {jaxpr.invars[i]: i for i in program.tokens}
    lookups = find_lookups(jaxpr, tokens).lookups
    _check_found(program, lookups, lookups_reached(jaxpr, tokens))
    chosen, others = program.inputs

    steps = dict(enumerate(jax.tree.leaves(program.inputs)))

    def value_of(chosen: Any, taps: list[Array]) -> tuple[Any, Any]:
        leaves = jax.tree.leaves((chosen, others))
        results, asked = run_with_taps(jaxpr, consts, leaves, tokens, Taps(taps, steps))
        value, state = jax.tree.unflatten(program.outputs, results)
        return value, (state, asked)

    both = jax.value_and_grad(value_of, argnums=(0, 1), has_aux=True)
    taps = [lookup.tap() for lookup in lookups]
    (value, (state, asked)), (gradients, by_lookup) = both(chosen, taps)
    tables: dict[Path, tuple[ActivationGradient, ...]] = {}
    for lookup, (ids, *weights), gradient in zip(lookups, asked, by_lookup, strict=True):
        path, call = program.tokens[lookup.table], lookup.eqn.params["call"]
        one = ActivationGradient(ids, weights[0] if weights else None, gradient, call)
        tables[path] = (*tables.get(path, ()), one)
    return value, gradients, tables, state


def _check_found(program: _Program, lookups: Sequence[Lookup], reached: Mapping[int, int]) -> None:
    for number, count in reached.items():
        known = sum(lookup.table == number for lookup in lookups)
        if known < count:
            raise ValueError(
                message(
                    f"layer {_joined(program.tokens[number][1:])!r}",
                    expected="lookups in plain code, jit, vmap, remat, scan or cond",
                    got=f"{count - known} where its gradient is not found",
                    remedy="look up outside of custom_vjp, while and shard_map; let a scan close "
                    "over the layer",
                )
            )


def _under(state: Any, place: Any) -> Any:
    """Return the part of a state of one model."""
    return state[place] if place in state else nnx.State({})


def _select(tables: Mapping[Path, tuple[ActivationGradient, ...]], model: int) -> TableGradients:
    found = {_joined(path[1:]): some for path, some in tables.items() if path[0] == model}
    return TableGradients(found)

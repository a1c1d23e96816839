"""Differentiate a function of nnx models by their parameters, and by what their layers look up.

nnx models are objects that a function may change. Here they are split into static structure and
arrays, and the function is traced as a pure function of the arrays: once to learn the shapes of
what is looked up, and once with a tap for each lookup. The second trace also tells which of the
lookups reach the value, and whether a table reaches it in any other way.

Input: the function, its arguments, and which of them are models to differentiate by.
Output: value, aux, the gradients of variables, and those of the activations of every layer. Changes
that the function makes to its models are kept.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import jaxpr_as_fun

from tpu_embed._checks import warn_user
from tpu_embed.nn.layer import TableLayer, count_calls, map_ids, not_found
from tpu_embed.nn.variables import Seen, Table, Tap
from tpu_embed.sparse import NOTHING, Sources, known_after_ids, propagate

Path = tuple[Any, ...]
"""The keys that lead from a model to a layer."""
Layers = Mapping[Path, TableLayer]
"""By the number of a model, followed by the keys to the layer."""

_OfNodes = Callable[[Mapping[int, Any]], tuple[Any, Any]]
"""A function of nnx nodes by number, which returns (value, aux)."""
_CONTEXT = "tpu_embed.nn"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ActivationGradient:
    """The gradient of the activations of one lookup.

    Attributes:
      ids: the ids looked up, or the placed batch; of `Embeddings` in the structure of its features.
      weights: one weight per id in the same structure, or None.
      gradient: the gradient of the activations, in their structure, shapes and dtypes. Of a
        `Jagged` it is that of its values, `[S, C, D]`.
    """

    ids: Any
    weights: Any
    gradient: Any


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


def path_of(keys: Sequence[Any]) -> str:
    """Return the keys joined by slashes."""
    return "/".join(str(key) for key in keys)


def layers_of(models: Sequence[Any]) -> dict[Path, TableLayer]:
    """Return the layers of models, each once, under the first of its paths."""
    found = {
        (number, *keys): node
        for number, model in enumerate(models)
        for keys, node in nnx.iter_graph(model)
        if isinstance(node, TableLayer)
    }
    return {path: one for one, path in {one: path for path, one in [*found.items()][::-1]}.items()}


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
    layers = layers_of([args[i] for i in which])
    call, nodes = _function_of_nodes(f, args, kwargs, which)
    with _noting(layers):
        _add_taps(call, nodes, layers)
        # The context remembers which objects were split, so that merging the state after the
        # function writes its changes into the user's own models.
        with nnx.update_context(_CONTEXT):
            traced = _trace(call, nodes, len(which), wrt)
            (value, state), (by_tap, by_variable) = traced.run()
            with nnx.merge_context(_CONTEXT, inner=False) as context:
                merged = context.merge(traced.graphdef, state)
        tables = _gradients(layers, traced.reached, by_tap, len(which))
    aux = traced.aux.unflatten([merged["aux"][i] for i in range(len(merged["aux"]))])
    variables = [by_variable.get(i, nnx.State({})) for i in range(len(which))]
    return Gradients(value, aux, variables, tables)


def _function_of_nodes(
    f: Callable[..., Any], args: Sequence[Any], kwargs: Any, which: Sequence[int]
) -> tuple[_OfNodes, dict[int, Any]]:
    """Return a user's function of the nodes among its arguments, and these by number.

    The models to differentiate by come first: nnx gives a layer that two of them share to the
    first, so its gradient is not lost to a model that is not differentiated.
    """
    leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)), is_leaf=is_node)
    chosen = [len(jax.tree.leaves(tuple(args[:i]), is_leaf=is_node)) for i in which]
    others = [i for i, leaf in enumerate(leaves) if is_node(leaf) and i not in chosen]
    places = dict(enumerate([*chosen, *others]))

    def call(nodes: Mapping[int, Any]) -> tuple[Any, Any]:
        given = dict(enumerate(leaves)) | {i: nodes[key] for key, i in places.items()}
        args, kwargs = structure.unflatten(given.values())
        return f(*args, **kwargs)

    return call, {key: leaves[i] for key, i in places.items()}


@contextlib.contextmanager
def _noting(layers: Layers) -> Iterator[None]:
    """Let layers note their lookups in this context."""
    try:
        for (_, *keys), layer in layers.items():
            layer.seen = Seen((), layer=path_of(keys), in_jit=layer.in_jit)
        yield
    finally:
        for layer in layers.values():
            for name in {"seen", "tap"} & vars(layer).keys():
                delattr(layer, name)


def _add_taps(call: _OfNodes, nodes: dict[int, Any], layers: Layers) -> None:
    """Give each layer a tap for each lookup that a function makes.

    Raises:
      ValueError: a lookup is made where it is not noted.
    """
    graphdef, state = nnx.split(nodes)

    def shapes(state: Any) -> list[list[Any]]:
        merged = nnx.merge(graphdef, state)
        call(merged)
        every = layers_of([merged[key] for key in sorted(merged)])
        return [[one.values for one in every[path].seen.get_raw_value()] for path in layers]

    with count_calls() as calls:
        try:
            found = jax.eval_shape(shapes, state)
        except (TypeError, ValueError) as error:
            # What transforms of nnx say of a variable that was changed in them.
            if "'seen'" not in str(error):
                raise
            found = [[]] * len(layers)
    lost = collections.Counter(calls)
    for layer, lookups in zip(layers.values(), found, strict=True):
        lost[layer.engine] -= len(lookups)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), lookups)
        layer.tap = Tap(tuple(zeros))
    for (_, *keys), layer in layers.items():
        if lost[layer.engine] > 0:
            raise not_found(path_of(keys))


class _Traced(NamedTuple):
    """A function of models as a jaxpr of their variables.

    Attributes:
      closed: the jaxpr.
      inputs: taps, the variables to differentiate by, and the other variables.
      outputs: the structure of the results, (value, state after the function).
      graphdef: the static part of the models after the function, and of aux.
      aux: the structure of aux.
      reached: which inputs reach the value; a table only if it is read otherwise than by lookups.
    """

    closed: Any
    inputs: tuple[Any, ...]
    outputs: Any
    graphdef: Any
    aux: Any
    reached: tuple[Any, ...]

    def run(self) -> tuple[Any, Any]:
        """Return (value, state after the function), and the gradients of taps and variables."""

        def value_of(*inputs: Any) -> tuple[Any, Any]:
            return self.outputs.unflatten(jaxpr_as_fun(self.closed)(*jax.tree.leaves(inputs)))

        return jax.value_and_grad(value_of, argnums=(0, 1), has_aux=True)(*self.inputs)


def _trace(call: _OfNodes, nodes: dict[int, Any], models: int, wrt: Any) -> _Traced:
    wanted = nnx.filterlib.to_predicate(wrt)
    by = lambda path, value: path[0] < models and wanted(path[1:], value)  # noqa: E731
    with nnx.split_context(_CONTEXT) as context:
        graphdef, *inputs = context.split(nodes, Tap, by, ...)
    static = {}

    def pure(*states: Any) -> tuple[Any, Any]:
        with nnx.merge_context(_CONTEXT, inner=True) as context:
            merged = context.merge(graphdef, *states)
        value, aux = call(merged)
        parts, static["aux"] = jax.tree.flatten(aux, is_leaf=is_node)
        with nnx.split_context(_CONTEXT) as context:
            after = context.split({"models": merged, "aux": dict(enumerate(parts))})
        static["graphdef"], state = after
        return value, state

    with count_calls():
        closed, shapes = jax.make_jaxpr(pure, return_shape=True)(*inputs)
    # One bit per input; the value is the first result.
    numbers = range(len(closed.jaxpr.invars))
    found = propagate(closed.jaxpr, [Sources(1 << i) for i in numbers])
    of_value = functools.reduce(operator.or_, found[: len(jax.tree.leaves(shapes[0]))], NOTHING)
    bits = [of_value.reached >> i & 1 for i in numbers]
    reached = jax.tree.structure(tuple(inputs)).unflatten(bits)
    outputs = jax.tree.structure(shapes)
    return _Traced(closed, tuple(inputs), outputs, **static, reached=reached)


def _gradients(
    layers: Layers, reached: tuple[Any, ...], by_tap: Any, models: int
) -> list[dict[Path, list[ActivationGradient]]]:
    """Return, for each model, the gradients of the lookups of its layers that reach the value."""
    taps, rest = (dict(nnx.to_flat_state(one)) for one in (reached[0], reached[2]))
    # …/tables/<stack>
    read = {path[:-2] for path, x in rest.items() if isinstance(x, Table) and x.get_raw_value()}
    found: list[dict[Path, list[ActivationGradient]]] = [{} for _ in range(models)]
    of_layers: dict[Path, Any] = dict(nnx.to_flat_state(by_tap))
    for whole, gradients in of_layers.items():  # (number of a model, *keys of a layer, "tap")
        (model, *keys, _), layer = whole, layers[whole[:-1]]
        if whole[:-1] in read:
            warn_user(
                f"layer {path_of(keys)!r}: its table is a constant where the function reads it in "
                "another way than by a lookup, and gets no gradient there"
            )
        three = (layer.seen, gradients, taps[whole])
        mine, others = [], []
        for lookup, gradient, bits in zip(*(one.get_raw_value() for one in three), strict=True):
            if any(jax.tree.leaves(bits)):
                mine.append(ActivationGradient(lookup.ids, lookup.weights, gradient))
            else:
                others += jax.tree.leaves(lookup.ids)
        if mine:
            # The update comes after the lookups that it does not use, too.
            after = functools.partial(functools.reduce, known_after_ids, others)
            mine[0] = dataclasses.replace(mine[0], ids=map_ids(after, mine[0].ids))
            found[model][tuple(keys)] = mine
    return found

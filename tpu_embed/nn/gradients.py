"""Gradients of a model that has embedding layers: dense for its parameters, sparse for its tables.

A table's gradient is kept as the gradients of the activations that were looked up, so it is as
large as the ids of a step. The optimizer of the table then updates just the rows of these ids.

nnx models are objects that a function may change. Here they are split into static structure and
arrays, and the function is traced as a pure function of the arrays: once to learn the shapes of
what is looked up, and once with a tap for each lookup. The second trace also tells which of the
lookups reach the value, and whether a table reaches it in any other way.

Input: a function of a model.
Output: its value, the gradients of the model's parameters, and those of its tables; or the model
with updated tables. Changes that the function makes to its models are kept.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import jaxpr_as_fun

from tpu_embed._checks import check_type, refuse, warn_user
from tpu_embed._types import Array
from tpu_embed.nn.embedding import Embed
from tpu_embed.nn.layer import (
    Seen,
    Table,
    TableLayer,
    Tap,
    count_calls,
    map_ids,
    not_found,
    path_of,
    updated,
    warn_once,
)
from tpu_embed.sparse import known_after_ids, positions, propagate, value_and_aux

Layers = Mapping[tuple[Any, ...], TableLayer]
"""By the number of a model, followed by the keys that lead from it to the layer."""

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TableGradients:
    """The gradients of a model's tables, whose size is that of the ids of the step.

    Attributes:
      lookups: path of a layer (its keys joined by slashes) -> one `ActivationGradient` for each of
        its lookups that is connected to the value, in program order. A layer without such lookups
        is absent.
    """

    lookups: dict[str, tuple[ActivationGradient, ...]]

    def map(self, fn: Callable[[Array], Array]) -> TableGradients:
        """Return these gradients with a function applied to each, for example to scale or clip.

        Args:
          fn: a function of one lookup's activation gradient that keeps its shape and dtype.

        Returns:
          new gradients with the same ids and weights.
        """
        changed = {
            path: tuple(
                dataclasses.replace(one, gradient=jax.tree.map(fn, one.gradient))
                for one in lookups
            )
            for path, lookups in self.lookups.items()
        }
        return TableGradients(changed)


def sparse_value_and_grad(
    f: Callable[..., Any],
    *,
    argnums: int | Sequence[int] = 0,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, tuple[Any, Any]]]:
    """Return a function that computes `f`'s value, a model's gradients and those of its tables.

    It works like `nnx.value_and_grad` and also returns the gradients of all tables that `f` looks
    up. (For tables that are plain arrays use `tpu_embed.sparse_value_and_grad`.) `f` looks up in
    plain code, in `nnx.jit` and in `nnx.remat`. Changes that `f` makes to the model (statistics,
    keys) are kept. Only models among `argnums` are differentiated; layers of other models, and
    layers that `f` closes over, get no gradient. If the value is computed from a table in another
    way than by a lookup, the table is a constant there, and a warning is given.

    Only lookups that are connected to the value have a gradient, as `tpu_embed.training.gradients`
    defines it. A lookup is left out if it stands behind `stop_gradient`, or if its activations are
    not used, are used in aux only, or only become integers or comparisons. A lookup whose gradient
    happens to be zero is not left out.

    Args:
      f: a function that returns a float scalar; with `has_aux` a pair of a float scalar and a
        pytree of arrays and modules.
      argnums: which positional arguments are models to differentiate by.
      wrt: an nnx filter for the variables to differentiate by.
      has_aux: whether `f` returns a pair.

    Returns:
      a function that returns (value, (gradients, table gradients)); with `has_aux` the value is
      (value, aux). The gradients are an `nnx.State` and a `TableGradients`, or tuples of them if
      `argnums` is a sequence. Use it inside a jit: it traces `f` again at every call.

    Raises:
      TypeError: an argument is not an nnx module; the value is not a float.
      ValueError: a number in `argnums` is not that of an argument, or two are the same argument; a
        lookup stands where its gradient would be lost: in `jax.jit`, `jax.checkpoint`, `vmap`,
        `scan`, `cond`, `while`, `shard_map` or a custom rule, in a copy of the model, or where `f`
        itself differentiates by its weights.

    Example:
      >>> import jax.numpy as jnp, tpu_embed
      >>> films = tpu_embed.nn.Embed(10, 2, rngs=nnx.Rngs(0))
      >>> loss = lambda model: (2 * model(jnp.array([3, 3]))).sum()
      >>> _, (_, tables) = sparse_value_and_grad(loss)(films)
      >>> tables.lookups["rows"][0].gradient.tolist()
      [[2.0, 2.0], [2.0, 2.0]]
    """

    @functools.wraps(f)
    def value_and_gradients(*args, **kwargs):
        which = _models(argnums, args)
        call, nodes = _function_of_nodes(f, args, kwargs, which, has_aux)
        value, aux, variables, tables = _differentiate(call, nodes, len(which), wrt)
        several = isinstance(argnums, Sequence)
        gradients = (
            (tuple(variables), tuple(tables)) if several else (variables[0], tables[0])
        )
        return ((value, aux) if has_aux else value), gradients

    return value_and_gradients


def fused_value_and_grad(
    f: Callable[..., Any],
    *,
    argnums: int | Sequence[int] = 0,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Return a function that computes `f`'s value and gradients, and trains the tables it looks up.

    Use it in place of `nnx.value_and_grad` in a training step. The optimizer of each table is
    applied once, with the sum of the gradients of all its lookups that are connected to the value.
    The gradients of the other parameters are returned, for `nnx.Optimizer`. For evaluation call the
    model itself, since this function changes its tables.

    Args:
      f: as in `sparse_value_and_grad`.
      argnums: as in `sparse_value_and_grad`.
      wrt: as in `sparse_value_and_grad`.
      has_aux: as in `sparse_value_and_grad`.

    Returns:
      a function that returns (value, gradients), or ((value, aux), gradients).

    Raises:
      TypeError: as in `sparse_value_and_grad`.
      ValueError: as in `sparse_value_and_grad`; a trainable table has a gradient and no optimizer.
        No table changes then.

    Example:
      >>> import jax.numpy as jnp, tpu_embed
      >>> rule = tpu_embed.optimizers.SGD(1.0)
      >>> films = tpu_embed.nn.Embed(10, 2, optimizer=rule, rngs=nnx.Rngs(0))
      >>> films.load(jnp.ones((10, 2)))
      >>> loss, _ = fused_value_and_grad(lambda model: model(jnp.array([3, 3])).sum())(films)
      >>> float(loss), films.embedding[2:4].tolist()
      (4.0, [[1.0, 1.0], [-1.0, -1.0]])

    Reference: FBGEMM's table-batched embeddings, whose backward pass applies the optimizer.
    """
    inner = sparse_value_and_grad(f, argnums=argnums, wrt=wrt, has_aux=has_aux)

    @functools.wraps(f)
    def value_and_gradients(*args, **kwargs):
        result, (gradients, tables) = inner(*args, **kwargs)
        each = tables if isinstance(argnums, Sequence) else (tables,)
        models = [args[i] for i in _models(argnums, args)]
        _apply(zip(models, each, strict=True))
        return result, gradients

    return value_and_gradients


def apply_table_gradients(model: Any, gradients: TableGradients) -> None:
    """Apply one step of their optimizers to those tables of a model that have a gradient.

    Args:
      model: a layer, or a module that holds layers.
      gradients: the gradients of this model.

    Raises:
      TypeError: `gradients` is not a `TableGradients`.
      ValueError: a trainable table has no optimizer, or a layer is not in the model. No table
        changes then.

    Example:
      >>> import jax.numpy as jnp, tpu_embed
      >>> rule = tpu_embed.optimizers.SGD(1.0)
      >>> films = tpu_embed.nn.Embed(10, 2, optimizer=rule, rngs=nnx.Rngs(0))
      >>> loss = lambda model: model(jnp.array([3, 3])).sum()
      >>> _, (_, tables) = sparse_value_and_grad(loss)(films)
      >>> apply_table_gradients(films, tables.map(lambda gradient: jnp.clip(gradient, -0.1, 0.1)))
      >>> int(films.rows.step[...])
      1
    """
    check_type(
        "gradients",
        gradients,
        TableGradients,
        expected="TableGradients",
        remedy="give what sparse_value_and_grad returned",
    )
    _apply([(model, gradients)])


def _apply(pairs: Iterable[tuple[Any, TableGradients]]) -> None:
    """Update the layers of models that have gradients, all or none."""
    changed = []
    for model, gradients in pairs:
        layers = {path_of(path): layer for path, layer in layers_of(model).items()}
        # An Embed without an optimizer has a table that is not trainable; if `trainable` was left
        # True, the user probably forgot the optimizer.
        every = (node for _, node in nnx.iter_graph(model))
        waiting = {
            node.rows for node in every if isinstance(node, Embed) and node.trainable
        }
        for path, lookups in gradients.lookups.items():
            if path not in layers:
                refuse(
                    "gradients",
                    expected=f"layers among {[*layers]}",
                    got=repr(path),
                    remedy="apply them to the model that they were computed for",
                )
            layer = layers[path]
            layer.engine.check_trainable(f"layer {path!r}")
            if lookups and any(stack.optimizer for stack in layer.engine.layout.stacks):
                changed.append((layer, updated(layer, lookups)))
            elif lookups and layer in waiting:
                warn_once(
                    layer.engine,
                    "is not trained: give its layer an optimizer, or trainable=False",
                )
    for layer, state in changed:
        layer.set_state(state)


def _models(argnums: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """Return the positions of the models among the arguments."""
    remedy = "give models by position; wrt= chooses their variables"
    which = positions(argnums, len(args), remedy=remedy)
    for i in which:
        check_type(
            f"argument {i}",
            args[i],
            nnx.Pytree,
            expected="an nnx module",
            remedy="leave it out of argnums, or hold it in a module",
        )
    return which


# -- models and the layers in them -----------------------------------------------------------------


def is_node(value: Any) -> bool:
    """Return whether a value is an nnx module, variable or another nnx node."""
    return isinstance(value, (nnx.Pytree, nnx.Variable))


def layers_of(models: Any) -> Layers:
    """Return the layers of a model, or of models by number, each under the first of its paths."""
    return {
        path: node
        for path, node in nnx.iter_graph(models)
        if isinstance(node, TableLayer)
    }


def _function_of_nodes(
    f: Callable[..., Any], args: Any, kwargs: Any, which: Sequence[int], has_aux: bool
) -> tuple[_OfNodes, dict[int, Any]]:
    """Return a user's function of the nodes among its arguments, and these by number.

    The models to differentiate by come first: nnx gives a layer that two of them share to the
    first, so its gradient is not lost to a model that is not differentiated.
    """
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_node)
    chosen = [len(jax.tree.leaves(args[:i], is_leaf=is_node)) for i in which]
    others = [i for i, leaf in enumerate(leaves) if is_node(leaf) and i not in chosen]
    places = [*chosen, *others]

    def call(nodes):
        given = dict(enumerate(leaves)) | {
            i: nodes[key] for key, i in enumerate(places)
        }
        args, kwargs = structure.unflatten(given.values())
        return value_and_aux(f(*args, **kwargs), has_aux=has_aux)

    return call, dict(enumerate(leaves[i] for i in places))


def _differentiate(
    call: _OfNodes, nodes: dict[int, Any], models: int, wrt: Any
) -> tuple[Any, Any, list[Any], list[TableGradients]]:
    """Return a function's value and aux, and the gradients by its models.

    Args:
      call: a function of nodes, which returns (value, aux).
      nodes: the nodes.
      models: how many of the nodes are models to differentiate by; these come first.
      wrt: an nnx filter for the variables to differentiate by.

    Returns:
      the value; aux; for each model, the gradients of its variables, and those of its tables.

    Raises:
      TypeError: the value is not a float scalar.
      ValueError: one of the models has a lookup whose gradient cannot be found.
    """
    layers = layers_of([nodes[i] for i in range(models)])
    wanted, static = nnx.filterlib.to_predicate(wrt), {}
    by = lambda path, value: path[0] < models and wanted(path[1:], value)  # noqa: E731

    def pure(*states):
        with nnx.merge_context(_CONTEXT, inner=True) as context:
            merged = context.merge(graphdef, *states)
        value, aux = call(merged)
        parts, static["aux"] = jax.tree.flatten(aux, is_leaf=is_node)
        with nnx.split_context(_CONTEXT) as context:
            after = context.split({"models": merged, "aux": dict(enumerate(parts))})
        static["graphdef"], state = after
        return value, state

    def traced(*inputs):
        return jax.tree.structure(shapes).unflatten(
            jaxpr_as_fun(closed)(*jax.tree.leaves(inputs))
        )

    # The context remembers which objects were split, so that merging the state after the function
    # writes its changes into the user's own models.
    with _tapped(call, nodes, layers), nnx.update_context(_CONTEXT):
        with nnx.split_context(_CONTEXT) as context:
            graphdef, *inputs = context.split(nodes, Tap, by, ...)
        with count_calls():
            closed, shapes = jax.make_jaxpr(pure, return_shape=True)(*inputs)
        both = jax.value_and_grad(traced, argnums=(0, 1), has_aux=True)(*inputs)
        (value, state), (by_tap, by_variable) = both
        # The value, which is a scalar, is the first result; its sources have one bit per input.
        of_value = propagate(closed.jaxpr)[0].reached
        leaves, structure = jax.tree.flatten(inputs)
        reached = structure.unflatten([of_value >> i & 1 for i in range(len(leaves))])
        with nnx.merge_context(_CONTEXT, inner=False) as context:
            merged = context.merge(static["graphdef"], state)
        tables = _table_gradients(layers, reached, by_tap, models)
    aux = static["aux"].unflatten([merged["aux"][i] for i in range(len(merged["aux"]))])
    variables = [by_variable.get(i, nnx.State({})) for i in range(models)]
    return value, aux, variables, tables


@contextlib.contextmanager
def _tapped(call: _OfNodes, nodes: dict[int, Any], layers: Layers) -> Iterator[None]:
    """Let layers note their lookups in this context, with a tap for each that a function makes.

    Raises:
      ValueError: a lookup is made where it is not noted.
    """
    try:
        for (_, *keys), layer in layers.items():
            layer.seen = Seen((), layer=path_of(keys), in_jit=layer.in_jit)
        graphdef, state = nnx.split(nodes)

        def shapes(state):
            merged = nnx.merge(graphdef, state)
            call(merged)
            every = layers_of(merged)
            return [every[path].seen.get_raw_value() for path in layers]

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
        yield
    finally:
        for layer in layers.values():
            for name in {"seen", "tap"} & vars(layer).keys():
                delattr(layer, name)


def _table_gradients(
    layers: Layers, reached: Sequence[Any], by_tap: Any, models: int
) -> list[TableGradients]:
    """Return, for each model, the gradients of the lookups of its layers that reach the value.

    Args:
      layers: the layers of the models.
      reached: whether each tap, variable to differentiate by, and other variable reaches the value;
        a table only if it is read otherwise than by lookups.
      by_tap: the gradients of the taps.
      models: how many models there are.

    Raises:
      ValueError: two layers of a model have one path.
    """
    taps, rest = (dict(nnx.to_flat_state(one)) for one in (reached[0], reached[2]))
    # …/tables/<stack>
    read = {
        path[:-2]
        for path, x in rest.items()
        if isinstance(x, Table) and x.get_raw_value()
    }
    found: list[dict[str, tuple[ActivationGradient, ...]]] = [{} for _ in range(models)]
    of_layers: dict[tuple[Any, ...], Any] = dict(nnx.to_flat_state(by_tap))
    for (
        whole,
        gradients,
    ) in of_layers.items():  # (number of a model, *keys of a layer, "tap")
        (model, *keys, _), layer = whole, layers[whole[:-1]]
        path = path_of(keys)
        if whole[:-1] in read:
            warn_user(
                f"layer {path!r}: its table is a constant where the function reads it in another "
                "way than by a lookup, and gets no gradient there"
            )
        three = (x.get_raw_value() for x in (layer.seen, gradients, taps[whole]))
        mine, others = [], []
        for (ids, weights), gradient, bits in zip(*three, strict=True):
            if any(jax.tree.leaves(bits)):
                mine.append(ActivationGradient(ids, weights, gradient))
            else:
                others += jax.tree.leaves(ids)
        if (
            path in found[model] and mine
        ):  # the keys ("a", "b") and ("a/b",) have the same path
            refuse(
                "layers",
                expected="a different path for every layer",
                got=f"two at {path!r}",
                remedy="name the attributes that hold the layers differently",
            )
        if mine:
            # The update comes after the lookups that it does not use, too.
            after = functools.partial(functools.reduce, known_after_ids, others)
            mine[0] = dataclasses.replace(mine[0], ids=map_ids(after, mine[0].ids))
            found[model][path] = tuple(mine)
    return list(map(TableGradients, found))

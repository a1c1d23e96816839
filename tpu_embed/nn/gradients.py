"""Gradients of a model that has embedding layers: dense for its parameters, sparse for its tables.

A table's gradient is kept as the gradients of the activations that were looked up, so it is as
large as the ids of a step. The optimizer of the table then updates just the rows of these ids.

Input: a function of a model.
Output: its value, the gradients of the model's parameters, and those of its tables; or the model
with updated tables.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from tpu_embed._checks import message
from tpu_embed._types import Array
from tpu_embed.core.state import TableState
from tpu_embed.nn.embedding import Embed
from tpu_embed.nn.layer import TableLayer, updated, warn_once
from tpu_embed.nn.program import (
    ActivationGradient,
    Gradients,
    Path,
    differentiate,
    layers_of,
    path_of,
)
from tpu_embed.sparse import positions, value_and_aux


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
        return TableGradients(
            {
                path: tuple(
                    dataclasses.replace(one, gradient=jax.tree.map(fn, one.gradient))
                    for one in lookups
                )
                for path, lookups in self.lookups.items()
            }
        )


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
    def value_and_gradients(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, Any]]:
        def pair(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            return value_and_aux(f(*args, **kwargs), has_aux=has_aux)

        found = differentiate(pair, args, kwargs, which=_models(argnums, args), wrt=wrt)
        result = (found.value, found.aux) if has_aux else found.value
        return result, _of_models(found, several=isinstance(argnums, Sequence))

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
    several = isinstance(argnums, Sequence)
    inner = sparse_value_and_grad(f, argnums=argnums, wrt=wrt, has_aux=has_aux)

    @functools.wraps(f)
    def value_and_gradients(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        result, (gradients, tables) = inner(*args, **kwargs)
        models = [args[i] for i in _models(argnums, args)]
        each = zip(models, tables if several else (tables,), strict=True)
        # Compute all updates first: an error in one of them leaves every model as it was.
        for changed in [_updated(model, found) for model, found in each]:
            _set(changed)
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
    if not isinstance(gradients, TableGradients):
        remedy, got = "give what sparse_value_and_grad returned", type(gradients).__name__
        raise TypeError(message("gradients", expected="TableGradients", got=got, remedy=remedy))
    _set(_updated(model, gradients))


def _updated(model: Any, gradients: TableGradients) -> dict[TableLayer, TableState]:
    """Return the state after their update of the layers that have gradients."""
    layers = {path_of(path[1:]): layer for path, layer in layers_of([model]).items()}
    # An Embed without an optimizer has a table that is not trainable; if `trainable` was left True,
    # the user probably forgot the optimizer.
    embeds = (node for _, node in nnx.iter_modules(model) if isinstance(node, Embed))
    waiting = {node.rows for node in embeds if node.trainable}
    changed = {}
    for path, lookups in gradients.lookups.items():
        if path not in layers:
            remedy = "apply them to the model that they were computed for"
            expected = f"layers among {[*layers]}"
            raise ValueError(message("gradients", expected=expected, got=repr(path), remedy=remedy))
        layer = layers[path]
        layer.engine.check_trainable(f"layer {path!r}")
        if lookups and any(stack.optimizer for stack in layer.engine.layout.stacks):
            changed[layer] = updated(layer, lookups)
        elif lookups and layer in waiting:
            warn_once(
                layer.engine, "is not trained: give its layer an optimizer, or trainable=False"
            )
    return changed


def _set(changed: dict[TableLayer, TableState]) -> None:
    for layer, state in changed.items():
        layer.set_state(state)


def _models(argnums: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """Return the positions of the models among the arguments."""
    remedy = "give models by position; wrt= chooses their variables"
    which = positions(argnums, len(args), remedy=remedy)
    for i in which:
        if not isinstance(args[i], nnx.Pytree):
            got, remedy = type(args[i]).__name__, "leave it out of argnums, or hold it in a module"
            what, expected = f"argument {i}", "an nnx module"
            raise TypeError(message(what, expected=expected, got=got, remedy=remedy))
    return which


def _of_models(found: Gradients, *, several: bool) -> tuple[Any, Any]:
    """Return the gradients of variables and of tables, as tuples if there are several models."""
    tables = [_named(lookups) for lookups in found.tables]
    if several:
        return tuple(found.variables), tuple(tables)
    return found.variables[0], tables[0]


def _named(lookups: dict[Path, list[ActivationGradient]]) -> TableGradients:
    # The keys ("a", "b") and ("a/b",) have the same path.
    named = {path_of(keys): tuple(some) for keys, some in lookups.items()}
    if len(named) < len(lookups):
        paths = sorted(path_of(keys) for keys in lookups)
        remedy = "name the attributes that hold the layers differently"
        expected = "a different path for every layer"
        raise ValueError(message("layers", expected=expected, got=f"{paths}", remedy=remedy))
    return TableGradients(named)

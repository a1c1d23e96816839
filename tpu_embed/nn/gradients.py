"""Gradients of a model whose layers have tables: its parameters' as by nnx, its tables' sparse.

Enters: a function of a model. Leaves: its value, the gradients of the model's parameters, and those
of the activations of every table, which `apply_table_gradients` gives to the tables' optimizers.
Called by users, in their training step.
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
from tpu_embed.nn.embedding import Embed
from tpu_embed.nn.program import (
    ActivationGradient,
    Gradients,
    Path,
    differentiate,
    path_of,
)
from tpu_embed.nn.untrained import warn_without_optimizer
from tpu_embed.nn.variables import TOKEN, Counter, Slot, Table, attributes, state_of
from tpu_embed.sparse import LookedUp, engine_update, positions, value_and_aux

__all__ = [
    "TableGradients",
    "apply_table_gradients",
    "fused_value_and_grad",
    "sparse_value_and_grad",
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TableGradients:
    """The gradients of a model's tables: as long as the ids of the step.

    Attributes:
      lookups: path of a layer, its keys joined by slashes -> an `ActivationGradient` for each of
        its lookups that is connected to the value, in program order. A layer without one is absent.
    """

    lookups: dict[str, tuple[ActivationGradient, ...]]

    def map(self, fn: Callable[[Array], Array]) -> TableGradients:
        """Return these with `fn` of every activation's gradient: scaled or clipped.

        Args:
          fn: keeps shape and dtype.

        Returns:
          new gradients; ids and weights are the same.
        """
        return TableGradients(
            {
                path: tuple(dataclasses.replace(one, gradient=fn(one.gradient)) for one in lookups)
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
    """Return a function that gives `f`'s value, a model's gradients and those of its tables.

    As `nnx.value_and_grad`, with the gradients of all tables that `f` looks up beside those of the
    parameters. (For tables that are plain arrays: `tpu_embed.sparse_value_and_grad`.) Lookups are
    found through jit, vmap, remat, scan and cond; what `f` changes in the model (statistics, keys)
    is changed. Only models among `argnums` are differentiated; to layers of other models, and to
    those that `f` closes over, no gradient flows. A table from which the value is computed
    otherwise than by a lookup is a constant there, with a warning.

    Only lookups that are connected to the value have a gradient, as `tpu_embed.training.gradients`
    defines it: one behind `stop_gradient`, one whose activations are not used, are in aux alone, or
    only become integers or comparisons, is left out. One whose gradient happens to be zero is not.

    Args:
      f: returns a float scalar; with `has_aux` a pair of that and a pytree of arrays and modules.
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
        `custom_jvp` or `custom_vjp` function, a `while`, a `shard_map`, by a layer that a scan
        carries along, or differentiated by its weights inside `f`.

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
    """Return a function that gives `f`'s value and gradients, and trains the tables it looked up.

    In place of `nnx.value_and_grad` in a training step: each table's optimizer is applied where
    its gradient is made, once, with the sum of all its lookups that are connected to the value.
    What is returned are the gradients of the other parameters, for `nnx.Optimizer`. Evaluate with
    the model itself, not with this.

    Args:
      f: see `sparse_value_and_grad`.
      argnums: see there.
      wrt: see there.
      has_aux: see there.

    Returns:
      a function that returns (value, gradients), or ((value, aux), gradients).

    Raises:
      TypeError: see `sparse_value_and_grad`.
      ValueError: see there; a trainable table without an optimizer that has a gradient. No table
        changes then.

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
        changed = [_updated(model, found) for model, found in each]
        for model, state in zip(models, changed, strict=True):
            nnx.update(model, state)
        return result, gradients

    return value_and_gradients


def apply_table_gradients(model: Any, gradients: TableGradients) -> None:
    """Give the tables of a model one step of their optimizers; those without a gradient none.

    Args:
      model: the layers, or what holds them.
      gradients: of this model.

    Raises:
      TypeError: gradients of another kind.
      ValueError: a trainable table without an optimizer, or not in the model; no table changes
        then.

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
    nnx.update(model, _updated(model, gradients))


def _updated(model: Any, gradients: TableGradients) -> Any:
    """Return the state of the layers after their update."""
    variables = nnx.state(model, (Table, Slot, Counter))
    paths = [path[:-1] for path, _ in nnx.to_flat_state(variables) if path[-1] == TOKEN]
    embeds = ((path, node) for path, node in nnx.iter_modules(model) if isinstance(node, Embed))
    waiting = {path for path, node in embeds if node.trainable}  # unless they have an optimizer
    changed = {}
    for name, lookups in gradients.lookups.items():
        keys = _keys_of(name, paths)
        if not lookups:
            continue
        engine = lookups[0].call.engine
        engine.check_trainable(f"layer {name!r}")
        stack = engine.layout.stacks[0]
        if stack.optimizer is None:
            if keys[:-1] in waiting:
                warn_without_optimizer(engine)
            continue
        holder = functools.reduce(lambda node, key: node[key], keys, variables)
        asked = [LookedUp(one.call, one.ids, one.weights) for one in lookups]
        given = [one.gradient for one in lookups]
        new = engine_update(engine, state_of(holder), lookups=asked, gradients=given)
        flat = nnx.to_flat_state(nnx.State(attributes(new)))
        changed |= {(*keys, *path): value for path, value in flat}
    return nnx.from_flat_state(changed)


def _keys_of(name: str, paths: Sequence[Path]) -> Path:
    for keys in paths:
        if path_of(keys) == name:
            return keys
    known = [path_of(keys) for keys in paths]
    remedy = "apply them to the model they were taken of"
    raise ValueError(
        message("gradients", expected=f"layers among {known}", got=repr(name), remedy=remedy)
    )


def _models(argnums: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """Return the places of the models among the arguments."""
    remedy = "give models by position; wrt= chooses their variables"
    which = positions(argnums, len(args), remedy=remedy)
    for i in which:
        if not isinstance(args[i], nnx.Pytree):
            got, remedy = type(args[i]).__name__, "leave it out of argnums, or hold it in a module"
            what, expected = f"argument {i}", "an nnx module"
            raise TypeError(message(what, expected=expected, got=got, remedy=remedy))
    return which


def _of_models(found: Gradients, *, several: bool) -> tuple[Any, Any]:
    """Return the gradients of variables and of tables: of all models, or of the one."""
    tables = [_named(lookups) for lookups in found.tables]
    if several:
        return tuple(found.variables), tuple(tables)
    return found.variables[0], tables[0]


def _named(lookups: dict[Path, list[ActivationGradient]]) -> TableGradients:
    named = {path_of(keys): tuple(some) for keys, some in lookups.items()}
    if len(named) < len(lookups):
        paths = sorted(path_of(keys) for keys in lookups)
        remedy = "name the attributes that hold the layers differently"
        expected = "a different path for every layer"
        raise ValueError(message("layers", expected=expected, got=f"{paths}", remedy=remedy))
    return TableGradients(named)

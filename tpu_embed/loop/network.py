"""The part of a model beside its tables: what an optimizer of optax trains, and what it does not.

    a flax nnx module    parameters | batch statistics, random numbers of dropout
    a pytree of arrays   all of it  | nothing
    no model             nothing    | nothing

Compiled steps take arrays, not modules. So a module is split here, and merged again in the step.

Input: a model and a loss. Output: a `Network` of arrays, and the loss as a function of it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

from tpu_embed._checks import check_type, message, refuse, warn_user
from tpu_embed._types import Array, PyTree
from tpu_embed.core.state import TableState
from tpu_embed.engine_layer import EngineLayer
from tpu_embed.nn import Activations, Counter, Embeddings, MapVersion, Slot, Table

Metrics = dict[str, Array]

KEYWORDS = ("step", "rng")
"""What a loss gets besides if it has a keyword-only parameter of that name."""


_OF_TABLES = (Table, Slot, Counter, MapVersion)
"""The types of the variables that hold the tables of a model."""


class Network(NamedTuple):
    """The arrays of a model.

    Attributes:
      trained: parameters, which the optimizer changes.
      others: what the model itself changes when it is called, such as batch statistics.
    """

    trained: PyTree
    others: PyTree


@dataclasses.dataclass(frozen=True)
class Objective:
    """A loss as a function of arrays.

    Attributes:
      loss: the user's function.
      graph: how a `Network` becomes an nnx module again; None of any other model.
      has_model: whether the loss takes a model.
      keywords: those of `KEYWORDS` that the loss takes.
      tables: shapes in place of the tables that an nnx module has itself.
    """

    loss: Callable[..., Any]
    graph: nnx.GraphDef | None
    has_model: bool
    keywords: tuple[str, ...]
    tables: Any = None

    def model_of(self, network: Network, state: TableState | None = None) -> Any:
        """Return the model with these arrays, and with these tables if it has them itself."""
        if self.graph is None:
            return network.trained if self.has_model else None
        model = nnx.merge(self.graph, self.tables, network.trained, network.others, copy=True)
        if state is not None:
            for layer in _layers_of(model):
                layer.set_state(state)
        return model

    def given(self, step: Any, rng: Any) -> dict[str, Any]:
        """Return those of two values that the loss takes, by their names."""
        values = {"step": step, "rng": rng}
        return {name: values[name] for name in self.keywords}

    def __call__(
        self,
        network: Network,
        activations: PyTree,
        rest: tuple[Any, ...],
        given: Mapping[str, Any],
        *,
        training: bool,
    ) -> tuple[Array, tuple[Metrics, PyTree]]:
        """Return the loss, its metrics, and `others` as the call of the model has left them.

        Args:
          network: the arrays of the model.
          activations: what the lookup returned.
          rest: the other parts of the batch.
          given: a value for each of the `keywords`.
          training: False has an nnx module behave as in evaluation (`module.eval()`).
        """
        model = self.model_of(network)
        if self.graph is not None and not training:
            model.eval()
        before = _drawn(model)
        if jax.tree.leaves(self.tables):  # its layer is given what was looked up in place of ids
            activations = Activations(activations)
        found = self.loss(*([model] if self.has_model else []), activations, *rest, **given)
        loss, metrics = _loss_and_metrics(found)
        if self.graph is None:
            return loss, (metrics, network.others)
        if training and "rng" not in self.keywords:
            _warn_of_repetition(before, _drawn(model))
        return loss, (metrics, nnx.state(model, nnx.Not(nnx.Any(nnx.Param, *_OF_TABLES))))


def split_model(
    loss: Callable[..., Any], model: Any, rows: Embeddings | None = None
) -> tuple[Objective, Network]:
    """Return the loss as a function of arrays, and the arrays of the model.

    Args:
      loss: the user's function.
      model: the user's model.
      rows: the layer of the model that has the tables; None: an engine has them.

    Raises:
      TypeError: the loss is no function, or takes `step` or `rng` in a way that it would not get
        it; the model has other embedding layers than `rows`, or is no tree of floating-point
        arrays.
    """
    check_type(
        "fit: loss",
        loss,
        Callable,
        expected="a function",
        remedy="write a function of the activations and the other parts of a batch",
    )
    keywords = _keywords(loss)
    if not isinstance(model, nnx.Module):
        if rows is not None:
            refuse(
                "fit: model",
                expected="an nnx module that has the layer",
                got=type(model).__name__,
                remedy="give its engine, fit(rows.engine, …, state=rows.state)",
                error=TypeError,
            )
        for path, leaf in jax.tree.leaves_with_path(model):
            _check_parameter(jax.tree_util.keystr(path), leaf)
        return Objective(loss, None, model is not None, keywords), Network(model, None)
    graph, tables, trained, others = nnx.split(model, nnx.Any(*_OF_TABLES), nnx.Param, ...)
    if (layers := _layers_of(model)) != ([] if rows is None else [rows]):
        expected, got = "a model without embedding layers", f"{type(model).__name__} with some"
        remedy = "give the tables of all of them to one nn.Embeddings, and this in place of the "
        remedy += "engine, fit(model.rows, …, model=model); or use nn.fused_value_and_grad"
        if rows is not None:
            expected = "a model with the one layer that stands in place of the engine"
            got = f"{type(model).__name__} with {len(layers)} others"
        refuse("fit: model", expected=expected, got=got, remedy=remedy, error=TypeError)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tables)
    return Objective(loss, graph, True, keywords, shapes), Network(trained, others)


def _layers_of(model: nnx.Module) -> list[Any]:
    """Return the layers of a module that have tables."""
    return [one for _, one in nnx.iter_graph(model) if isinstance(one, EngineLayer)]


def _check_parameter(path: str, leaf: Any) -> None:
    """Refuse a leaf of a model that is no floating-point array, and so has no gradient.

    Raises:
      TypeError: it is none.
    """
    number = isinstance(leaf, int | float | complex)
    dtype = jnp.result_type(leaf) if number else getattr(leaf, "dtype", None)
    named = isinstance(dtype, np.dtype)  # not that of a key of jax.random, or of a torch.Tensor
    if named and jnp.issubdtype(dtype, jnp.inexact):
        return
    got = str(dtype) if named else type(leaf).__name__
    remedy = "give the parameters alone, and use in the loss what else the model has"
    if isinstance(leaf, linen.Module):
        got = f"{got}, a flax linen module, which has no parameters in itself"
        remedy = 'give net.init(…)["params"], and call net.apply({"params": model}, …) in the loss'
    refuse(
        f"fit: model{path}",
        expected="a flax nnx module, or a pytree of floating-point arrays",
        got=got,
        remedy=remedy,
        error=TypeError,
    )


def check_optimizer(optimizer: Any, model: Any) -> optax.GradientTransformation:
    """Return the optimizer of the model; one that does nothing if there is no model.

    Raises:
      TypeError: it is no transformation of optax.
      ValueError: there is a model and no optimizer, or the other way round.
    """
    if (optimizer is None) != (model is None):
        refuse(
            "fit: optimizer",
            expected="both or neither",
            got=("a model and no optimizer", "an optimizer and no model")[model is None],
            remedy="tables have the optimizer of the engine; `optimizer` trains `model`",
        )
    if optimizer is None:
        return optax.identity()
    check_type(
        "fit: optimizer",
        optimizer,
        optax.GradientTransformation,
        expected="a transformation of optax",
        remedy="of a rule of tpu_embed.optimizers, give rule.as_optax()",
    )
    return optimizer


def _keywords(loss: Callable[..., Any]) -> tuple[str, ...]:
    """Return those of `KEYWORDS` that a loss takes; a value that a `partial` has bound stays.

    Raises:
      TypeError: one with the default None is not keyword-only, so the loss would never get it.
    """
    try:
        parameters = inspect.signature(loss).parameters
    except ValueError:  # not every function that is written in C tells
        return ()
    named = [parameters[name] for name in KEYWORDS if name in parameters]
    for one in named:
        if one.kind is one.POSITIONAL_OR_KEYWORD and one.default is None:
            refuse(
                "fit: loss",
                expected=f"{one.name!r} as a keyword-only parameter",
                got="one among the others",
                remedy=f"write a star before it: *, {one.name}=None",
                error=TypeError,
            )
    free = [one for one in named if one.default is None or one.default is one.empty]
    return tuple(one.name for one in free if one.kind is one.KEYWORD_ONLY)


def _drawn(model: Any) -> dict[str, Any]:
    """Return how often each layer of a module that drops at random has drawn, by its path."""
    if not isinstance(model, nnx.Module):
        return {}
    return {
        "/".join(map(str, path)): layer.rngs.count[...]
        for path, layer in nnx.iter_modules(model)
        if isinstance(layer, nnx.Dropout) and layer.rngs is not None
        if 0 < layer.rate < 1 and layer.deterministic is False
    }


def _warn_of_repetition(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Warn of layers whose count is, while a step is traced, the very array that it was before."""
    for path, count in after.items():
        if count is before.get(path):
            expected, got = "random numbers drawn in each training step", "none"
            remedy = "a copy of the model, such as nnx.merge makes inside of shard_map, drops the "
            remedy += "same places at every step: give the loss a parameter rng, and the copy keys "
            remedy += "made of it"
            what = f"fit: model: dropout {path!r}"
            warn_user(message(what, expected=expected, got=got, remedy=remedy))


def _loss_and_metrics(found: Any) -> tuple[Array, Metrics]:
    """Take apart what a loss returned.

    Raises:
      TypeError: it is neither a number nor a number with named numbers; a metric has the name of
        the loss.
    """
    loss, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
    named = isinstance(metrics, Mapping)
    if not named or not all(map(_is_number, [loss, *metrics.values()])):
        refuse(
            "fit: what loss returned",
            expected="a number, or a number and a dictionary of named numbers",
            got=jax.tree.map(lambda leaf: getattr(leaf, "shape", type(leaf).__name__), found),
            remedy="take the mean over the examples",
            error=TypeError,
        )
    if "loss" in metrics:
        refuse(
            "fit: what loss returned",
            expected="metrics with names of their own",
            got="one named 'loss'",
            remedy="give the metric another name",
            error=TypeError,
        )
    return jnp.asarray(loss), {name: jnp.asarray(value) for name, value in metrics.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or getattr(value, "shape", None) == ()

"""The two compiled programs of a loop: one trains on a batch, the other evaluates it.

They take arrays, not modules. So the part of a model beside its tables is split before, and merged
again in the step: what an optimizer of optax trains, and what it does not.

    a flax nnx module    parameters | batch statistics, random numbers of dropout
    a pytree of arrays   all of it  | nothing
    no model             nothing    | nothing

Tables, slots, parameters and the optimizer's state are donated, so a step writes into the buffers
that it was given. A training step can pass the network in k equal parts, one after the other. What
a network keeps on its way from activations to a loss takes memory in proportion to the
examples. In parts, it takes that of one part. Lookup and update stay those of the batch, which
every device cuts by itself: nothing moves between devices.

    activations of 8 examples on 2 devices    [a b c d | e f g h]
    the parts of k = 2                        [a b | e f], then [c d | g h]

A part's gradients take the places of its activations, so that both need one array.

Input: a model and a loss; then a placed batch and what belongs to it. Output: a `Network` of
arrays, and the loss as a function of it; then the next state, the loss, and metrics.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax.sharding import PartitionSpec

from tpu_embed._checks import (
    check_int,
    check_type,
    did_you_mean,
    message,
    refuse,
    warn_user,
)
from tpu_embed._types import Array, PyTree
from tpu_embed.core.batch import Batch
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.lookup import (
    ARRAYS,
    extent_of,
    flatten_arrays,
    put_part,
    split_activations,
    take_part,
)
from tpu_embed.core.state import TableState
from tpu_embed.engine_layer import EngineLayer
from tpu_embed.nn import Activations, Counter, Embeddings, MapVersion, Slot, Table
from tpu_embed.processes import gather_from_all

# -- models ----------------------------------------------------------------------------------------

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
        model = nnx.merge(
            self.graph, self.tables, network.trained, network.others, copy=True
        )
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
        if jax.tree.leaves(
            self.tables
        ):  # its layer is given what was looked up in place of ids
            activations = Activations(activations)
        found = self.loss(
            *([model] if self.has_model else []), activations, *rest, **given
        )
        loss, metrics = _loss_and_metrics(found)
        if self.graph is None:
            return loss, (metrics, network.others)
        if training and "rng" not in self.keywords:
            _warn_of_repetition(before, _drawn(model))
        return loss, (
            metrics,
            nnx.state(model, nnx.Not(nnx.Any(nnx.Param, *_OF_TABLES))),
        )


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
    graph, tables, trained, others = nnx.split(
        model, nnx.Any(*_OF_TABLES), nnx.Param, ...
    )
    if (layers := _layers_of(model)) != ([] if rows is None else [rows]):
        expected, got = (
            "a model without embedding layers",
            f"{type(model).__name__} with some",
        )
        remedy = "give the tables of all of them to one nn.Embeddings, and this in place of the "
        remedy += (
            "engine, fit(model.rows, …, model=model); or use nn.fused_value_and_grad"
        )
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
    # Not that of a key of jax.random, or of a torch.Tensor.
    named = isinstance(dtype, np.dtype)
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
            got=("a model and no optimizer", "an optimizer and no model")[
                model is None
            ],
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
    loss, metrics = (
        found if isinstance(found, tuple) and len(found) == 2 else (found, {})
    )
    named = isinstance(metrics, Mapping)
    if not named or not all(
        isinstance(one, int | float) or getattr(one, "shape", None) == ()
        for one in [loss, *metrics.values()]
    ):
        refuse(
            "fit: what loss returned",
            expected="a number, or a number and a dictionary of named numbers",
            got=jax.tree.map(
                lambda leaf: getattr(leaf, "shape", type(leaf).__name__), found
            ),
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
    return jnp.asarray(loss), {
        name: jnp.asarray(value) for name, value in metrics.items()
    }


# -- programs --------------------------------------------------------------------------------------

Cuts = tuple[int | None, ...]
"""How the arrays of a batch are cut: those of the features, then those of the rest.

None: not at all. 0: along their first axis, which is that of the examples. C' > 0: as sequences, of
which a part has at most C' events on a device. In one part, nothing is cut: `()`.
"""


Differentiated = tuple[tuple[Array, tuple[Any, PyTree]], tuple[PyTree, PyTree]]
"""`(loss, (metrics, others))`, and the gradients by parameters and by activations."""


def differentiate(
    objective: Objective,
    network: Network,
    activations: PyTree,
    rest: tuple[Any, ...],
    given: Mapping[str, Any],
) -> Differentiated:
    """Return the loss of a batch, or of a part of one, and its gradients."""
    values, rebuild = split_activations(activations)

    def loss_fn(trained, values):
        whole = Network(trained, network.others)
        return objective(whole, rebuild(values), rest, given, training=True)

    both = jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)
    return both(network.trained, values)


class Parts:
    """The parts of the batches of an engine.

    Args:
      engine: of the tables.
      count: k, how many there are.
      whole: paths of features that belong to no example; every part gets all of them.

    Raises:
      ValueError: `count` is below 1, or a feature does not exist.
    """

    def __init__(
        self, engine: EmbeddingEngine, count: int, whole: Sequence[str]
    ) -> None:
        self._count = check_int("fit: micro_batches", count, minimum=1)
        self.engine, self._whole = engine, whole
        self._paths = engine.structure.paths
        for name in [whole] if isinstance(whole, str) else whole:
            if name not in self._paths or name is whole:
                refuse(
                    "fit: whole_features",
                    expected=f"a list of some of {self._paths}",
                    got=repr(whole),
                    remedy=did_you_mean(name, self._paths),
                )

    def cuts(self, batch: Batch, rest: tuple[Any, ...]) -> Cuts:
        """Return how the arrays of a batch are cut, and those of the rest.

        Of the rest, what has as many examples as the batch is cut. With several processes all call
        this, because they agree on the events that a part has room for.

        Raises:
          ValueError: features differ in their numbers of examples, or the parts would.
        """
        if self._count == 1:
            return ()
        examples, splits = self._examples(batch), batch.row_splits(self.engine.layout)
        shapes = enumerate(zip(self._paths, batch.spec.feature_shapes, strict=True))
        extents = [
            (
                None if path in self._whole else shape.batch,
                splits.get(f),
                shape.capacity or 0,
            )
            for f, (path, shape) in shapes
        ]
        replicas = batch.spec.replicas
        extents += [extent_of(array, replicas) for array in flatten_arrays(rest)[0]]
        most = [
            None if of != examples else self._most(splits) for of, splits, _ in extents
        ]
        if not any(most):
            return tuple(most)
        of_all = zip(*gather_from_all("fit: micro_batches", most), strict=True)
        pairs = zip(of_all, extents, strict=True)
        return tuple(
            each[0] and self._room(max(each), room) for each, (_, _, room) in pairs
        )

    def _examples(self, batch: Batch) -> int:
        """Return B, the examples of each feature that is cut.

        Raises:
          ValueError: it is not one number, or the k parts of each device would not be equal.
        """
        sizes = dict(zip(self._paths, batch.spec.sizes, strict=True))
        cut = {size for path, size in sizes.items() if path not in self._whole}
        least, what = batch.spec.replicas * self._count, "fit: micro_batches"
        if len(cut) != 1:
            remedy = (
                "name those that belong to no example in whole_features; K ids of each "
            )
            remedy += "example can be an array [B, K, 1]"
            refuse(what, expected="features of one size", got=f"{sizes}", remedy=remedy)
        (examples,) = cut
        if examples % least:
            refuse(
                what,
                expected=f"a multiple of {least} examples, {self._count} parts on each device",
                got=f"{examples}",
                remedy=f"take other batches, or tpu_embed.pad_batch(features, {least})",
            )
        return examples

    def _most(self, splits: Any) -> int:
        """Return the events of this process's fullest part, at least 1; 0 without sequences."""
        if splits is None:
            return 0
        if isinstance(splits, jax.Array):
            splits = np.concatenate([each.data for each in splits.addressable_shards])
        every = (splits.shape[1] - 1) // self._count
        return max(1, int(np.diff(splits[:, ::every]).max()))

    def _room(self, most: int, capacity: int) -> int:
        """Return C', in steps of half of C / k, so that few programs serve all batches."""
        step = max(8, -(-capacity // (2 * self._count)))
        return min(capacity, -(-most // step) * step)

    def differentiate(
        self,
        objective: Objective,
        network: Network,
        activations: PyTree,
        rest: tuple[Any, ...],
        given: Mapping[str, Any],
        cuts: Cuts,
    ) -> Differentiated:
        """Do what the function of this name does, part after part.

        Loss and metrics are means over the parts, and so are gradients by parameters and by the
        activations of whole features. Of the others, a part has the gradients of its examples,
        divided by k. `others` go from part to part, and each part has a `rng` of its own.
        """
        if not cuts:
            return differentiate(objective, network, activations, rest, given)
        structure, k = self.engine.structure, self._count
        values, rebuild = split_activations(
            structure.match(activations, what="activations")
        )
        own, (arrays, tree) = cuts[: len(values)], flatten_arrays(rest)

        def pass_part(carry, number):
            others, summed, by_values = carry
            # Of a feature that is cut, parts that were passed have gradients here, later ones still
            # their activations; of one that is whole, it is the sum of the gradients.
            before = rebuild(_merge(own, by_values, values))
            taken = self._on_devices(take_part, cuts, number, [*before, *arrays])
            seen = structure.unflatten(taken[: len(own)])
            mine = tree.unflatten(taken[len(own) :])
            now, known = Network(network.trained, others), dict(given)
            if "rng" in known:
                known["rng"] = jax.random.fold_in(known["rng"], number)
            (loss, (metrics, others)), by = differentiate(
                objective, now, seen, mine, known
            )
            summed = jax.tree.map(lambda a, b: a + b.astype(a.dtype) / k, summed, by[0])
            new = [one / k for one in structure.match(by[1], what="gradients")]
            put = self._on_devices(put_part, own, number, before, new)
            pairs = zip(own, by_values, put, new, strict=True)
            by_values = [
                old + one if cut is None else at for cut, old, at, one in pairs
            ]
            return (others, summed, by_values), (loss, metrics)

        # Gradients by parameters are added in float32 at least.
        zeros = jax.tree.map(
            lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)),
            network.trained,
        )
        first = (
            network.others,
            zeros,
            _merge(own, values, [*map(jnp.zeros_like, values)]),
        )
        last, each = jax.lax.scan(pass_part, first, jnp.arange(k, dtype=jnp.int32))
        loss, metrics = jax.tree.map(lambda one: one.mean(axis=0), each)
        by_trained = jax.tree.map(
            lambda a, b: a.astype(b.dtype), last[1], network.trained
        )
        return (loss, (metrics, last[0])), (by_trained, structure.unflatten(last[2]))

    def _on_devices(
        self, function: Callable[..., Any], cuts: Cuts, number: Array, *lists: list[Any]
    ) -> list[Any]:
        """Return what a function makes of each device's part of the arrays that are cut.

        Args:
          function: `function(*arrays, room=…, number=…, count=…)`.
          cuts: of each array.
          number: of the part.
          lists: the arrays; of the first list is what is returned of those that are whole.
        """
        axes, whole = self.engine.layout.axes, [None] * len(cuts)
        split = axes.spec(axes.batch_axes)

        def device(lists, number):
            place = functools.partial(function, number=number, count=self._count)
            each = zip(cuts, *lists, strict=True)
            return [
                None if cut is None else place(*one, room=cut) for cut, *one in each
            ]

        on_each = jax.shard_map(
            device,
            mesh=axes.mesh,
            in_specs=(split, PartitionSpec()),
            out_specs=split,
            check_vma=False,  # the number is the same on all devices
        )
        chosen = [_merge(cuts, one, whole) for one in lists]
        return _merge(
            cuts, on_each(axes.reshard(chosen, axes.batch_axes), number), lists[0]
        )


def _merge(cuts: Cuts, cut: Sequence[Any], whole: Sequence[Any]) -> list[Any]:
    """Return the arrays that are cut of one list, and the others of another one."""
    pairs = zip(cuts, cut, whole, strict=True)
    return [other if room is None else one for room, one, other in pairs]


def make_train_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    parts: Parts,
    seed: int,
) -> Callable[..., Any]:
    """Return a function that prepares a step: `(batch, rest, number) -> step`.

    `number` is that of the step, from 0. The step is
    `(carry, batch, rates=…) -> (carry, (loss, metrics))`, of the batch when it is admitted; `carry`
    is `(state, network, opt_state)`.
    """
    engine = parts.engine

    @functools.partial(jax.jit, donate_argnums=0, static_argnames="cuts")
    def train_step(carry, batch, *, rates, rest, number, cuts):
        state, network, opt_state = carry
        activations = engine.lookup(state, batch)
        rng = (
            None if number is None else jax.random.fold_in(jax.random.key(seed), number)
        )
        given = objective.given(number, rng)
        found = parts.differentiate(objective, network, activations, rest, given, cuts)
        (loss, (metrics, others)), gradients = found
        updates, opt_state = optimizer.update(gradients[0], opt_state, network.trained)
        trained = optax.apply_updates(network.trained, updates)
        state = engine.update(state, batch, gradients[1], learning_rates=rates)
        return (state, Network(trained, others), opt_state), (loss, metrics)

    def prepare(batch, rest, number):
        known = {"rest": rest, "cuts": parts.cuts(batch, rest)}
        # An operand that no loss takes would still be sent in each step.
        known["number"] = np.int32(number) if objective.keywords else None
        return functools.partial(train_step, **known)

    return prepare


def make_evaluation_step(
    engine: EmbeddingEngine, objective: Objective
) -> Callable[..., Any]:
    """Return a compiled evaluation: `(state, network, batch, rest, number) -> (loss, metrics)`."""

    @jax.jit
    def evaluation_step(state, network, batch, rest, number):
        activations = engine.lookup(state, batch)
        given = objective.given(number, None)
        loss, (metrics, _) = objective(
            network, activations, rest, given, training=False
        )
        return loss, metrics

    return evaluation_step


def take_apart(engine: EmbeddingEngine, item: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the placed batch of an item, and its other parts as a step takes them.

    With several processes, arrays of an item are the parts of this process's examples, as its
    features are, along their first axis. Numbers are the same in all processes.

    Raises:
      TypeError: a part is neither numbers nor None.
    """
    if type(item) is not tuple:
        return item, ()
    batch, *rest = item
    return batch, tuple(
        _operand(engine, f"part {n}", part) for n, part in enumerate(rest, 1)
    )


def _operand(engine: EmbeddingEngine, where: str, part: PyTree) -> PyTree:
    """Return a part of an item as arrays."""
    if isinstance(part, dict):
        return {
            key: _operand(engine, f"{where}[{key!r}]", value)
            for key, value in part.items()
        }
    if part is None or isinstance(part, ARRAYS):
        return part
    array = np.asarray(part)
    if array.dtype != bool and not jnp.issubdtype(array.dtype, jnp.number):
        refuse(
            f"fit: an item of the source: {where} after the features",
            expected="numbers",
            got=f"dtype {array.dtype}",
            remedy="leave text and objects out of the tuples that the source yields",
            error=TypeError,
        )
    if jax.process_count() == 1 or array.ndim == 0:
        return array
    axes = engine.layout.axes
    return jax.make_array_from_process_local_data(axes.sharding(axes.batch_axes), array)

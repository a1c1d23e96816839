"""The two compiled programs of a loop: one trains on a batch, the other evaluates it.

Tables, slots, parameters and the optimizer's state are donated, so a step writes into the buffers
that it was given. A training step can pass the network in k equal parts, one after the other. What
a network keeps on its way from activations to a loss takes memory in proportion to the
examples. In parts, it takes that of one part. Lookup and update stay those of the batch, which
every device cuts by itself: nothing moves between devices.

    activations of 8 examples on 2 devices    [a b c d | e f g h]
    the parts of k = 2                        [a b | e f], then [c d | g h]

A part's gradients take the places of its activations, so that both need one array.

Input: a placed batch and what belongs to it. Output: the next state, the loss, and metrics.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from tpu_embed._checks import check_int, did_you_mean, refuse
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
from tpu_embed.loop.network import Network, Objective
from tpu_embed.processes import gather_from_all

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

    def __init__(self, engine: EmbeddingEngine, count: int, whole: Sequence[str]) -> None:
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
            (None if path in self._whole else shape.batch, splits.get(f), shape.capacity or 0)
            for f, (path, shape) in shapes
        ]
        replicas = batch.spec.replicas
        extents += [extent_of(array, replicas) for array in flatten_arrays(rest)[0]]
        most = [None if of != examples else self._most(splits) for of, splits, _ in extents]
        if not any(most):
            return tuple(most)
        of_all = zip(*gather_from_all("fit: micro_batches", most), strict=True)
        pairs = zip(of_all, extents, strict=True)
        return tuple(each[0] and self._room(max(each), room) for each, (_, _, room) in pairs)

    def _examples(self, batch: Batch) -> int:
        """Return B, the examples of each feature that is cut.

        Raises:
          ValueError: it is not one number, or the k parts of each device would not be equal.
        """
        sizes = dict(zip(self._paths, batch.spec.sizes, strict=True))
        cut = {size for path, size in sizes.items() if path not in self._whole}
        least, what = batch.spec.replicas * self._count, "fit: micro_batches"
        if len(cut) != 1:
            remedy = "name those that belong to no example in whole_features; K ids of each "
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
        values, rebuild = split_activations(structure.match(activations, what="activations"))
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
            (loss, (metrics, others)), by = differentiate(objective, now, seen, mine, known)
            summed = jax.tree.map(lambda a, b: a + b.astype(a.dtype) / k, summed, by[0])
            new = [one / k for one in structure.match(by[1], what="gradients")]
            put = self._on_devices(put_part, own, number, before, new)
            pairs = zip(own, by_values, put, new, strict=True)
            by_values = [old + one if cut is None else at for cut, old, at, one in pairs]
            return (others, summed, by_values), (loss, metrics)

        # Gradients by parameters are added in float32 at least.
        zeros = jax.tree.map(
            lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)), network.trained
        )
        first = network.others, zeros, _merge(own, values, [*map(jnp.zeros_like, values)])
        last, each = jax.lax.scan(pass_part, first, jnp.arange(k, dtype=jnp.int32))
        loss, metrics = jax.tree.map(lambda one: one.mean(axis=0), each)
        by_trained = jax.tree.map(lambda a, b: a.astype(b.dtype), last[1], network.trained)
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
            return [None if cut is None else place(*one, room=cut) for cut, *one in each]

        on_each = jax.shard_map(
            device,
            mesh=axes.mesh,
            in_specs=(split, PartitionSpec()),
            out_specs=split,
            check_vma=False,  # the number is the same on all devices
        )
        chosen = [_merge(cuts, one, whole) for one in lists]
        return _merge(cuts, on_each(axes.reshard(chosen, axes.batch_axes), number), lists[0])


def _merge(cuts: Cuts, cut: Sequence[Any], whole: Sequence[Any]) -> list[Any]:
    """Return the arrays that are cut of one list, and the others of another one."""
    pairs = zip(cuts, cut, whole, strict=True)
    return [other if room is None else one for room, one, other in pairs]


def make_train_step(
    objective: Objective, optimizer: optax.GradientTransformation, parts: Parts, seed: int
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
        rng = None if number is None else jax.random.fold_in(jax.random.key(seed), number)
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


def make_evaluation_step(engine: EmbeddingEngine, objective: Objective) -> Callable[..., Any]:
    """Return a compiled evaluation: `(state, network, batch, rest, number) -> (loss, metrics)`."""

    @jax.jit
    def evaluation_step(state, network, batch, rest, number):
        activations = engine.lookup(state, batch)
        given = objective.given(number, None)
        loss, (metrics, _) = objective(network, activations, rest, given, training=False)
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
    return batch, tuple(_operand(engine, f"part {n}", part) for n, part in enumerate(rest, 1))


def _operand(engine: EmbeddingEngine, where: str, part: PyTree) -> PyTree:
    """Return a part of an item as arrays."""
    if isinstance(part, dict):
        return {key: _operand(engine, f"{where}[{key!r}]", value) for key, value in part.items()}
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

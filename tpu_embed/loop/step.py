"""The two compiled programs of a loop: one trains on a batch, the other evaluates it.

Tables, slots, parameters and the optimizer's state are donated, so a step writes into the buffers
that it was given.

Input: a placed batch and what belongs to it. Output: the next state, the loss, and metrics.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpu_embed._checks import message
from tpu_embed._types import PyTree
from tpu_embed.core.batch import Batch
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.lookup import ARRAYS
from tpu_embed.loop.network import Network, Objective
from tpu_embed.loop.parts import Parts


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

    def prepare(batch: Batch, rest: tuple[Any, ...], number: int) -> Callable[..., Any]:
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
        remedy = "leave text and objects out of the tuples that the source yields"
        what = f"fit: an item of the source: {where} after the features"
        text = message(what, expected="numbers", got=f"dtype {array.dtype}", remedy=remedy)
        raise TypeError(text)
    if jax.process_count() == 1 or array.ndim == 0:
        return array
    axes = engine.layout.axes
    return jax.make_array_from_process_local_data(axes.sharding(axes.batch_axes), array)

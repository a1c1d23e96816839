"""Run the steps of a random case in one arrangement, and collect the results.

`run` returns numbers on the host: tables and slots before each step and after the last, and the
activations of each step.
"""

import dataclasses
import warnings

import jax
import numpy as np
import pytest
from random_cases import INSIDE, filled
from random_optimizers import HOST_RATE

import tpu_embed
from tpu_embed.kernels import dispatch


@dataclasses.dataclass
class Held:
    """Tables and slots by name, on the host."""

    tables: dict
    slots: dict


@dataclasses.dataclass
class Run:
    """The results of a case: states before each step and after the last, and activations."""

    states: list[Held]
    activations: list[list[np.ndarray]]
    seen: list[int]
    """The number of the state that each step's lookup saw."""
    steps_done: int
    counters: dict[str, np.ndarray]


def run(case, arrangement) -> Run:
    """Run the steps of a case in an arrangement."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        patch.setenv(dispatch.VARIABLE, arrangement.kernels)
        warnings.filterwarnings("ignore", "activation gradient of .*: None is taken as zeros")
        if arrangement.way == "stateful":
            return run_stateful(case, arrangement)
        return run_engine(case, arrangement)


def batches_of(case):
    """Return (features, weights, gradients) of every step in the nesting of the features."""

    def nested(values):
        return None if values is None else filled(case.nest, values)

    return [tuple(map(nested, (step.ids, step.weights, step.gradients))) for step in case.steps]


def run_engine(case, arrangement):
    engine = tpu_embed.EmbeddingEngine(
        case.nest,
        case.optimizer,
        mesh=arrangement.mesh(),
        batch_axes=case.batch_axes,
        sum_blocks=case.sum_blocks,
        stack_tables=arrangement.stack_tables,
        on_bad_gradient=case.on_bad_gradient,
    )
    state, ahead = engine.init(jax.random.key(case.seed)), None
    if arrangement.ahead and not case.inside:
        specs = [engine.place(ids, weights).spec for ids, weights, _ in batches_of(case)]
        ahead = tpu_embed.BatchSpec.union(*specs)
    one_step = {"eager": eager_step, "in jit": placed_step, INSIDE: traced_step}[arrangement.way]
    step = one_step(engine, ahead)
    states, activations = [held(engine, state)], []
    for t, (ids, weights, gradients) in enumerate(batches_of(case)):
        HOST_RATE.step = t
        found, state = step(state, ids, weights, gradients)
        activations.append(check_nesting(case, found))
        states.append(held(engine, state))
    seen = list(range(len(activations)))
    return Run(states, activations, seen, int(state.step), jax.device_get(state.counters))


def held(engine, state):
    return Held(*jax.tree.map(np.array, (engine.tables(state), engine.slots(state))))


def eager_step(engine, spec):
    def step(state, ids, weights, gradients):
        batch = engine.place(ids, weights, spec)
        found = engine.lookup(state, batch)
        if spec is None:  # `update` also takes ids instead of a Batch
            return found, engine.update(state, ids, gradients, weights)
        return found, engine.update_in_place(state, batch, gradients)

    return step


def placed_step(engine, spec):
    """Run lookup and update in one user's jit, with the state donated."""

    def both(state, batch, gradients, rates):
        found = engine.lookup(state, batch)
        return found, engine.update(state, batch, gradients, learning_rates=rates)

    program = jax.jit(both, donate_argnums=0)

    def step(state, ids, weights, gradients):
        batch = engine.place(ids, weights, spec)
        return program(state, batch, gradients, engine.learning_rates())

    return step


def traced_step(engine, _spec):
    """Give ids and weights inside the jit, where no spec is needed."""

    def both(state, ids, weights, gradients, rates):
        found = engine.lookup(state, ids, weights)
        new = engine.update(state, ids, gradients, weights, learning_rates=rates)
        return found, new

    program = jax.jit(both, donate_argnums=0)

    def step(state, ids, weights, gradients):
        # JAX takes no swapped bytes, and weights inside a jit are floats; `place` takes any.
        ids = jax.tree.map(lambda leaf: leaf.astype(leaf.dtype.newbyteorder("=")), ids)
        weights = jax.tree.map(lambda leaf: leaf.astype(np.float32), weights)
        return program(state, ids, weights, gradients, engine.learning_rates())

    return step


def run_stateful(case, arrangement):
    embedding = tpu_embed.TPUEmbedding(
        case.nest,
        case.optimizer,
        arrangement.pipelined,
        arrangement.mesh(),
        case.batch_axes,
        seed=case.seed,
        on_bad_gradient=case.on_bad_gradient,
    )
    embedding.build()
    batches = batches_of(case)
    if arrangement.ahead:
        for ids, weights, _ in batches:
            embedding.enqueue(ids, weights)
    states, activations = [Held(*embedding.retrieve())], []
    for t, (ids, weights, gradients) in enumerate(batches):
        HOST_RATE.step = t
        if not arrangement.ahead:
            embedding.enqueue(ids, weights)
        activations.append(check_nesting(case, embedding.dequeue()))
        embedding.apply_gradients(gradients)
        states.append(Held(*embedding.retrieve()))
    state = embedding.state
    late = arrangement.ahead and arrangement.pipelined
    seen = [max(0, t - late) for t in range(len(batches))]
    return Run(states, activations, seen, int(state.step), jax.device_get(state.counters))


def check_nesting(case, activations):
    """Return the leaves of activations on the host, after checking that they are nested right."""
    assert jax.tree.structure(activations) == jax.tree.structure(case.nest)
    return [np.array(leaf) for leaf in jax.tree.leaves(activations)]

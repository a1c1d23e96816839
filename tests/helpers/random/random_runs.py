"""Run the steps of a random case in one arrangement, and collect the results.

`run` returns numbers on the host: tables and slots before each step and after the last, and the
activations of each step.
"""

import functools
import warnings
from collections import namedtuple

import jax
import numpy as np
import pytest
from random_cases import INSIDE, filled
from random_optimizers import HOST_RATE

import tpu_embed
from tpu_embed.kernels import dispatch

Held = namedtuple("Held", "tables slots")
"""Tables and slots by name, on the host."""


class Run(namedtuple("Run", "states activations seen steps_done counters")):
    """The results of a case: states before each step and after the last, and activations.

    `seen` has the number of the state that each step's lookup saw.
    """


def run(case, arrangement):
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
    options = {"mesh": arrangement.mesh(), "stack_tables": arrangement.stack_tables}
    options |= {"batch_axes": case.batch_axes, "sum_blocks": case.sum_blocks}
    options |= {"on_bad_gradient": case.on_bad_gradient}
    engine = tpu_embed.EmbeddingEngine(case.nest, case.optimizer, **options)
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


def in_one_program(engine):
    """Return lookup and update in one user's jit, with the state donated."""

    @functools.partial(jax.jit, donate_argnums=0)
    def both(state, given, weights, gradients, rates):
        found = engine.lookup(state, given, weights)
        return found, engine.update(state, given, gradients, weights, learning_rates=rates)

    return lambda *given: both(*given, engine.learning_rates())


def placed_step(engine, spec):
    program = in_one_program(engine)
    return lambda state, ids, weights, gradients: program(
        state, engine.place(ids, weights, spec), None, gradients
    )


def traced_step(engine, _spec):
    """Give ids and weights inside the jit, where no spec is needed."""
    program = in_one_program(engine)

    def step(state, ids, weights, gradients):
        # JAX takes no swapped bytes, and weights inside a jit are floats; `place` takes any.
        ids = jax.tree.map(lambda leaf: leaf.astype(leaf.dtype.newbyteorder("=")), ids)
        weights = jax.tree.map(lambda leaf: leaf.astype(np.float32), weights)
        return program(state, ids, weights, gradients)

    return step


def run_stateful(case, arrangement):
    given = case.nest, case.optimizer, arrangement.pipelined, arrangement.mesh(), case.batch_axes
    options = {"seed": case.seed, "on_bad_gradient": case.on_bad_gradient}
    embedding = tpu_embed.TPUEmbedding(*given, **options)
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

"""One training run by every API gives the same bits in tables, slots and step.

The APIs are `TPUEmbedding`, the engine in a user's jit, the engine called eagerly, and dense ids
inside the jit, which on several devices are within rounding; each runs on one device and on eight.
"""

import functools

import jax
import numpy as np
import pytest
from facade_cases import assert_same, mesh
from optimizer_cases import halving

from tpu_embed import FeatureConfig, TableConfig, TPUEmbedding, optimizers

STEPS = 6
BATCH = 16
RULES = {
    "sgd": optimizers.SGD(lambda: 0.25),
    "adam": optimizers.Adam(0.125, weight_decay_factor=0.125),
    "adagrad": optimizers.Adagrad(halving),
    "each": optimizers.RowWiseAdagrad(0.25, use_gradient_accumulation=False),
}
PLACEMENTS = {"adam": "div", "adagrad": "replicated"}
TABLES = {
    name: TableConfig(11, 2, name=name, optimizer=rule, placement=PLACEMENTS.get(name, "mod"))
    for name, rule in RULES.items()
}
FEATURES = {
    **{name: FeatureConfig(table) for name, table in TABLES.items()},
    "sequence": FeatureConfig(TABLES["sgd"], max_sequence_length=2),
}


def _features(step):
    rng = np.random.default_rng(step)
    return {name: rng.integers(-1, 11, (BATCH, 3)).astype(np.int32) for name in FEATURES}


def _loss(activations):
    """Return Σ (a² + a): its gradient 2a + 1 has the same bits in every program."""
    return sum((a**2 + a).sum() for a in jax.tree.leaves(activations))


_gradients = jax.jit(jax.grad(_loss))


def _stateful(embedding):
    for step in range(STEPS):
        embedding.enqueue(_features(step))
        embedding.apply_gradients(_gradients(embedding.dequeue()))
    return embedding.state


def _eager(engine):
    state = engine.init(jax.random.key(0))
    for step in range(STEPS):
        batch = engine.place(_features(step))
        state = engine.update(state, batch, _gradients(engine.lookup(state, batch)))
    return state


def _in_jit(engine, place):
    """Run lookup, value_and_grad and update as one program, the state donated."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch, rates):
        _, gradients = jax.value_and_grad(_loss)(engine.lookup(state, batch))
        return engine.update(state, batch, gradients, learning_rates=rates)

    state = engine.init(jax.random.key(0))
    for number in range(STEPS):
        before = state
        state = step(state, place(_features(number)), engine.learning_rates())
        assert all(table.is_deleted() for table in before.tables.values())
    assert step._cache_size() == 1
    return state


@functools.cache
def _embedding(devices):
    return TPUEmbedding(FEATURES, None, mesh=mesh(devices))


APIS = {
    "initial": lambda embedding: embedding.engine.init(jax.random.key(0)),
    "stateful": _stateful,
    "eager": lambda embedding: _eager(embedding.engine),
    "in jit": lambda embedding: _in_jit(embedding.engine, embedding.engine.place),
    "dense ids in jit": lambda embedding: _in_jit(embedding.engine, lambda features: features),
}


@functools.cache
def _trained(devices, API):
    """Return tables, slots and step after training through an API."""
    embedding = _embedding(devices)
    state, engine = APIS[API](embedding), embedding.engine
    return engine.tables(state), engine.slots(state), state.step


@pytest.mark.parametrize("API", ["eager", "in jit", "dense ids in jit"])
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.quick(1)
def test_apis_agree(devices, API):
    trained, stateful = _trained(devices, API), _trained(devices, "stateful")
    if API == "dense ids in jit" and devices > 1:  # shards add up their parts of traced bags
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
        jax.tree.map(close, trained, stateful)
    else:
        assert_same(trained, stateful)
    assert int(trained[2]) == STEPS


def test_one_device_and_eight_agree_and_every_rule_moves_its_table():
    trained, initial = _trained(1, "stateful"), _trained(1, "initial")[0]
    assert_same(trained, _trained(8, "stateful"))
    assert all(np.any(np.asarray(initial[name]) != trained[0][name]) for name in RULES)

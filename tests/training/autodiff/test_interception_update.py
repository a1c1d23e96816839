"""Interception in a data-parallel step: `update` gets scaled activation gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig, training
from tpu_embed import optimizers as o

S, B, V, D = 8, 16, 5, 2
RNG = np.random.default_rng(12)
START = RNG.normal(size=(V, D)).astype(np.float32)


def initial(key, shape, dtype, shard_info):
    return jnp.asarray(START)[shard_info.rows]


TABLE = TableConfig(V, D, name="t", initializer=initial)
FEATURES = {name: FeatureConfig(TABLE, jagged=name == "seen") for name in ("bag", "one", "seen")}
IDS = {
    "bag": RNG.integers(-1, V, (B, 3)).astype(np.int32),
    "one": RNG.integers(0, V, B).astype(np.int32),
    "seen": RNG.integers(-1, V, (B, 4)).astype(np.int32),
}
X = RNG.normal(size=(B, D)).astype(np.float32)
KERNEL = RNG.normal(size=(D,)).astype(np.float32)
CROSSED = training.CrossShardOptimizer(optax.sgd(0.5), axis_name="r")


def loss(kernel, activations, x):
    """Return the mean of the examples that are there: a replica's, or all."""
    own = activations["bag"] * kernel + activations["one"] * x
    return jnp.tanh(own + activations["seen"].means()).sum(-1).mean()


def trained(engine, state, batch, found, kernel):
    """Return table, accumulators and kernel after a step by gradients of the activations."""
    state = engine.update(state, batch, found)
    return engine.tables(state)["t"], engine.slots(state)["t"]["accumulators"], kernel


@functools.cache
def engine_of(devices):
    """Return an engine, its first state and the batch."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("r",))
    engine = tpu_embed.EmbeddingEngine(FEATURES, o.Adagrad(0.5), mesh=mesh)
    return engine, engine.init(jax.random.key(0)), engine.place(IDS)


@functools.cache
def one_device():
    """Return what the whole batch makes, by plain jax.grad."""
    engine, state, batch = engine_of(1)
    values, rebuild = tpu_embed.split_activations(engine.lookup(state, batch))
    by_values = jax.jit(jax.grad(lambda kernel, values: loss(kernel, rebuild(values), X), (0, 1)))
    by_kernel, found = by_values(KERNEL, values)
    return trained(engine, state, batch, found, KERNEL - 0.5 * by_kernel)


def by_dummies(loss, activations):
    options = {"feature_config": FEATURES, "optimizer": CROSSED}
    return training.get_gradients_through_dummy_table_variables(loss, activations, **options)[1]


by_compute_gradients = functools.partial(training.get_gradients_through_compute_gradients, CROSSED)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("intercept", [by_dummies, by_compute_gradients])
@pytest.mark.whole
def test_scaled_gradients_train_as_one_device_with_the_whole_batch(intercept, check_vma):
    """Replicas' means over 8 are the mean over all; unscaled, gradients would be 8 times as large.

    The division is by powers of two, so exact; what is left is float32's rounding of a slope in two
    programs, and of a kernel's gradient that is summed over 16 examples in two orders.
    """
    engine, state, batch = engine_of(S)

    def each(kernel, activations, x):
        found = intercept(lambda activations: loss(kernel, activations, x), activations)
        by_kernel = functools.partial(loss, activations=activations, x=x)
        kernel, _, _ = CROSSED.minimize(by_kernel, kernel, CROSSED.init(kernel))
        return found, kernel

    specs = {"in_specs": (P(), P("r"), P("r")), "out_specs": (P("r"), P()), "check_vma": check_vma}
    step = jax.jit(jax.shard_map(each, mesh=engine.layout.axes.mesh, **specs))
    found, kernel = step(KERNEL, engine.lookup(state, batch), X)
    got = trained(engine, state, batch, found, kernel)
    for a, b, start in zip(got, one_device(), (START, 0.1, KERNEL), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert np.abs(b - start).max() > 1e-3  # a thousand times what is let pass
    assert engine.compilations == {"lookup": 1, "update": 1}

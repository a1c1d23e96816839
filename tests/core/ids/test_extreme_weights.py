"""Weights of any size in float32 combine as in float64, by every kind of lookup."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from facade_cases import mesh

import tpu_embed
from tpu_embed import optimizers as o
from tpu_embed.io import serving_lookup
from tpu_embed.kernels import dispatch

TINY = 1.2e-38
"""Just above the least normal float32; XLA's CPU backend takes what is below it for zero."""
SIZES = [TINY, 1e-30, 1e-20, 1e-12, 1.0, 1e12, 2e19, 1e30, 1.1e38]
MIXED = [[1e38, TINY, 1], [TINY, 1e-30, 0], [1e20, -3e19, 1e-20], [0.5, -1e-25, 2.0]]
ZERO = [[1e38, -1e38, 0], [2e-38, -2e-38, 0], [0, 0, 0]]
"""Bags whose weights sum to zero; the squares of the last one do."""
WEIGHTS = np.array([[s, -1.5 * s, 3 * s] for s in SIZES] + MIXED + ZERO, np.float32)
B, H, D = *WEIGHTS.shape, 4
IDS = np.arange(B * H).reshape(B, H)  # every row in one bag, so that its gradient is seen
V = B * H
ROWS = np.random.default_rng(0).standard_normal((V, D)).astype(np.float32)
GRADIENT = np.random.default_rng(1).uniform(-0.2, 0.2, (B, D)).astype(np.float32)
COMBINERS = ("mean", "sqrtn", "sum")

# Products, sums and a quotient of numbers near 1, rounded by 2^-24 each.
TOLERANCE = {"rtol": 1e-5, "atol": 2e-6}


EVERY = {"mean": WEIGHTS, "sqrtn": WEIGHTS, "sum": np.clip(WEIGHTS, -1e36, 1e36)}
"""Weights by combiner; of bags that are summed 1e38 w itself is more than float32 holds."""


def gains(combiner):
    return np.array([oracle.gains(bag, combiner) for bag in EVERY[combiner].tolist()])


def activations(combiner):
    return np.einsum("bh,bhd->bd", gains(combiner), ROWS[IDS].astype(np.float64))


def check(found):
    """Compare the activations of every combiner."""
    for combiner in COMBINERS:
        np.testing.assert_allclose(found[combiner], activations(combiner), **TOLERANCE)


def row_gradients(combiner):
    """Return the gradient of every row, `[V, D]`."""
    return (gains(combiner)[:, :, None] * GRADIENT[:, None].astype(np.float64)).reshape(V, D)


def weight_gradients(combiner):
    """Return the derivatives of Σ g a by the weights, `[B, H]`; zeros where the gains are."""
    c, rows = EVERY[combiner].astype(np.float64), ROWS[IDS].astype(np.float64)
    by_row = np.einsum("bd,bhd->bh", GRADIENT, rows)
    if combiner == "sum":
        return by_row
    by_bag = np.einsum("bd,bd->b", GRADIENT, activations(combiner))[:, None]
    d = c.sum(1, keepdims=True) if combiner == "mean" else np.sqrt((c**2).sum(1, keepdims=True))
    safe = np.where(d == 0, 1, d)
    toward = 1 if combiner == "mean" else c / safe
    return np.where(d == 0, 0, (by_row - by_bag * toward) / safe)


def check_weight_gradients(found, combiner):
    """Compare in units of the largest weight of each bag; what is below `TINY` may be zero."""
    expected, size = weight_gradients(combiner), np.abs(EVERY[combiner]).max(1, keepdims=True)
    size = 1 if combiner == "sum" else np.where(size == 0, 1, size)
    allowed = np.maximum(1e-5 / size, TINY) + 1e-4 * np.abs(expected)
    assert np.isfinite(found).all()
    assert (np.abs(np.asarray(found, np.float64) - expected) <= allowed).all()


def check_rows(table, combiner):
    """Compare the table after a step of SGD with learning rate 1."""
    np.testing.assert_allclose(table, ROWS - row_gradients(combiner), **TOLERANCE)
    still = IDS[gains(combiner).any(1) == 0].ravel()
    assert np.array_equal(table[still], ROWS[still])


def features_of():
    """Return a feature of each combiner, whose tables are one stack."""
    tables = [tpu_embed.TableConfig(V, D, combiner=c, name=c) for c in COMBINERS]
    return {table.name: tpu_embed.FeatureConfig(table) for table in tables}


@functools.cache
def engine_of(devices, kernels):
    """Return an engine and its state; `kernels` keeps apart what was traced with which."""
    engine = tpu_embed.EmbeddingEngine(features_of(), o.SGD(1.0), mesh=mesh(devices))
    state = engine.init(jax.random.key(0))
    return engine, engine.load_arrays(state, dict.fromkeys(COMBINERS, ROWS))


@pytest.mark.parametrize(("devices", "kernels"), [(1, "native"), (2, "reference")])
@pytest.mark.quick(1)
def test_engine(devices, kernels, monkeypatch):
    if kernels == "native" and dispatch.kernels_in_use() != kernels:
        pytest.skip("compiled library: not built")
    monkeypatch.setenv(dispatch.VARIABLE, kernels)
    engine, state = engine_of(devices, kernels)
    found, tables = step(engine, state, EVERY)
    check(found)
    for combiner in COMBINERS:
        check_rows(tables[combiner], combiner)


def test_weights_inside_a_jit_and_their_gradients():
    engine, state = engine_of(2, dispatch.kernels_in_use())
    ids = dict.fromkeys(COMBINERS, jnp.asarray(IDS))

    @jax.jit
    def both(weights):
        def loss(weights):
            found = engine.lookup(state, ids, weights)
            return sum((GRADIENT * found[c]).sum() for c in COMBINERS), found

        return jax.grad(loss, has_aux=True)(weights)

    by_weights, found = both(jax.tree.map(jnp.asarray, EVERY))
    check(found)
    for combiner in COMBINERS:
        check_weight_gradients(by_weights[combiner], combiner)


def test_serving_lookup():
    ids = dict.fromkeys(COMBINERS, IDS)
    check(serving_lookup(dict.fromkeys(COMBINERS, ROWS), ids, features_of(), EVERY))


@pytest.mark.parametrize("combiner", COMBINERS)
def test_embedding_lookup(combiner):
    @jax.jit
    def both(table, weights):
        def loss(table, weights):
            found = tpu_embed.embedding_lookup(table, jnp.asarray(IDS), weights, combiner)
            return (GRADIENT * found).sum(), found

        return tpu_embed.sparse_value_and_grad(loss, argnums=(0, 1), has_aux=True)(table, weights)

    (_, found), (slices, by_weights) = both(ROWS, EVERY[combiner])
    np.testing.assert_allclose(found, activations(combiner), **TOLERANCE)
    np.testing.assert_allclose(slices.to_dense(), row_gradients(combiner), **TOLERANCE)
    check_weight_gradients(by_weights, combiner)


def step(engine, state, weights):
    """Return activations and tables, as NumPy arrays."""
    batch = engine.place(dict.fromkeys(COMBINERS, IDS), weights)
    new = engine.update(state, batch, dict.fromkeys(COMBINERS, GRADIENT))
    return jax.tree.map(np.asarray, (engine.lookup(state, batch), engine.tables(new)))


def test_a_power_of_two_changes_no_bits():
    engine, state = engine_of(1, dispatch.kernels_in_use())
    near = np.random.default_rng(2).uniform(0.1, 10, (B, H)).astype(np.float32)
    far = np.ldexp(near, np.linspace(-100, 100, B).astype(int)[:, None])
    both = [step(engine, state, {"mean": w, "sqrtn": w, "sum": near}) for w in (far, near)]
    jax.tree.map(np.testing.assert_array_equal, *both)


def test_weights_below_the_least_normal_number():
    """The host counts with them; inside a jit XLA's CPU backend takes them for zero."""
    engine, state = engine_of(1, dispatch.kernels_in_use())
    weights = np.repeat(np.array([[1e-40, 3e-40, 0]], np.float32), B, axis=0)
    found, _ = step(engine, state, dict.fromkeys(COMBINERS, weights))
    expected = np.einsum("h,bhd->bd", oracle.gains(weights[0].tolist(), "mean"), ROWS[IDS])
    np.testing.assert_allclose(found["mean"], expected, **TOLERANCE)


def test_padding_adds_nothing():
    """However wide the array is, and in whatever order NumPy would add up whole rows."""
    engine, state = engine_of(1, dispatch.kernels_in_use())
    weights = np.random.default_rng(0).normal(size=(B, H)).astype(np.float32)
    wide = np.pad(IDS, ((0, 0), (0, 200)), constant_values=-1), np.pad(weights, ((0, 0), (0, 200)))
    narrow, found = (
        engine.lookup(state, engine.place(dict.fromkeys(COMBINERS, i), dict.fromkeys(COMBINERS, w)))
        for i, w in ((IDS, weights), wide)
    )
    jax.tree.map(np.testing.assert_array_equal, found, narrow)


# What is left of the weights is nothing, or less than float32 tells from zero beside the largest.
CANCELLED = [[1, -1, 0, 0], [1, -1, 1e-39, 0], [3e38, -3e38, 2e-38, 1e-38]]
CANCELLED += [[2e30, -2e30, 0, 1e-9], [-3e38, 3e38, 0, 1.5e-38], [1, -1, 0, -1e-39]]
LEFT = [[1, -1, 0, 1.3e-38], [1, 1e-39, -1e-39, 2]]


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.whole)])
def test_a_divisor_below_the_least_normal_number_is_zero_on_any_number_of_devices(devices):
    weights, found = np.array(CANCELLED + LEFT, np.float32), []
    ids = np.arange(weights.size).reshape(weights.shape)
    rows, *batch = (dict.fromkeys(COMBINERS, x) for x in (np.abs(ROWS), ids, weights))
    for size in (1, devices):
        engine = tpu_embed.EmbeddingEngine(features_of(), mesh=mesh(size))
        state = engine.load_arrays(engine.init(jax.random.key(0)), rows)
        found.append(jax.device_get(engine.lookup(state, engine.place(*batch))))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert not found[0]["mean"][: len(CANCELLED)].any()
    assert found[0]["mean"][len(CANCELLED) :].all()

"""Sums over a row have the same bits for any number of rows, program and device."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import assert_same, mesh
from pairs import parametrize_pairs

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig
from tpu_embed import optimizers as o

DIMS = [1, 3, 8, 17, 64, 100, 128]
ROWS = np.random.default_rng(0).standard_normal((704, 128)).astype(np.float32)


def by_halves(rows):
    """Return the sums in float32, the upper half added to the lower until one number is left."""
    width = 1 << (rows.shape[-1] - 1).bit_length()
    left = np.pad(rows, ((0, 0), (0, width - rows.shape[-1])))
    while left.shape[1] > 1:
        left = left[:, : left.shape[1] // 2] + left[:, left.shape[1] // 2 :]
    return left


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.quick(1)
def test_sums_and_means_are_made_by_halves(dim):
    rows, sums = ROWS[:, :dim], by_halves(ROWS[:, :dim])
    both = jax.jit(lambda rows: (o.row_sum(rows), o.row_mean(rows)))
    for n in (1, 64, 704):
        assert_same(both(rows[:n]), (sums[:n], sums[:n] * np.float32(1 / dim)))
    assert np.array_equal(jax.vmap(o.row_sum)(rows), sums)
    np.testing.assert_allclose(sums[:, 0], rows.sum(1, dtype=np.float64), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.quick(4)
def test_norms_do_not_depend_on_the_number_of_rows(dim):
    rows = ROWS[:, :dim]
    norms = np.asarray(jax.jit(o.row_norm)(rows))
    assert np.array_equal(jax.jit(o.row_norm)(rows[:64]), norms[:64])
    expected = np.sqrt((rows.astype(np.float64) ** 2).sum(1, keepdims=True))
    np.testing.assert_allclose(norms, expected, rtol=1e-6)


def longer_where_rows_are(gradient, row, slots, learning_rate, step):
    seen = slots["seen"] + o.row_mean(gradient**2) + jnp.abs(o.row_sum(gradient))
    trust = o.row_norm(row) / o.row_norm(gradient)
    return row - learning_rate * trust * gradient / jnp.sqrt(seen), {"seen": seen}


RULES = {
    "LAMB": o.LAMB(0.1, weight_decay_factor=0.03),
    "custom": o.CustomOptimizer(longer_where_rows_are, {"seen": 0.1}, 0.1),
}
B, H = 64, 5
SIZES = (700, 33)


@functools.cache
def trained(dims, devices, placement, stacked):
    """Return tables and slots after two steps of every rule."""
    features = {}
    for rule, dim, size in itertools.product(RULES, dims, SIZES):
        name, options = f"{rule}/{dim}/{size}", {"optimizer": RULES[rule], "placement": placement}
        features[name] = FeatureConfig(TableConfig(size, dim, name=name, **options))
    engine = tpu_embed.EmbeddingEngine(features, mesh=mesh(devices), stack_tables=stacked)
    state, rng = engine.init(jax.random.key(0)), np.random.default_rng(0)
    for _ in range(2):
        ids, gradients = {}, {}
        for name, feature in features.items():
            ids[name] = rng.integers(0, feature.table.vocabulary_size, (B, H))
            gradients[name] = rng.standard_normal((B, feature.table.dim)).astype(np.float32)
        state = engine.update(state, engine.place(ids), gradients)
    return jax.device_get((engine.tables(state), engine.slots(state)))


@parametrize_pairs(
    dims=[(17,), tuple(set(DIMS) - {17})],
    devices=[8, 4, 2, 1],
    placement=["mod", "div", "replicated"],
    stacked=[False, True],
)
@pytest.mark.whole
def test_rules_that_reduce_have_the_same_bits_everywhere(dims, devices, placement, stacked):
    assert_same(trained(dims, devices, placement, stacked), trained(dims, 1, "mod", True))

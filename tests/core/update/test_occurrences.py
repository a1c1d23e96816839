"""One update per occurrence of a row: rounds of distinct rows, in batch order."""

import functools

import jax
import numpy as np
import pytest
from facade_cases import mesh
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig
from tpu_embed import optimizers as o

V, D, LARGE = 7, 2, 2000
ZEROS = jax.nn.initializers.zeros


@functools.cache
def start(rule, size=V):
    """Return an engine of one table of zeros on one device, and its first state."""
    table = TableConfig(size, D, ZEROS, name="t", combiner="sum")
    engine = EmbeddingEngine({"x": FeatureConfig(table)}, rule, mesh=mesh(1))
    return engine, engine.init(jax.random.key(0))


ADAGRAD = o.Adagrad(0.5, use_gradient_accumulation=False, weight_decay_factor=0.1)


def check(rows, seed=0):
    """Compare with one row after the other, each of a bag of its own."""
    engine, state = start(ADAGRAD)
    gradients = np.random.default_rng(seed).normal(size=(len(rows), D)).astype(np.float32)
    found = engine.update(state, engine.place({"x": np.array(rows)}), {"x": gradients})
    table, sums = np.zeros((V, D)), np.full((V, D), 0.1)
    for row, gradient in zip(rows, gradients.astype(float), strict=True):
        if row >= 0:
            sums[row] += gradient**2
            table[row] = 0.9 * table[row] - 0.5 * gradient / np.sqrt(sums[row])
    # at most twenty updates of a row, each a few roundings of numbers below ten
    near = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(engine.tables(found)["t"], table, **near)
    np.testing.assert_allclose(engine.slots(found)["t"]["accumulators"], sums, **near)


@settings(max_examples=25)
@given(st.lists(st.integers(-1, V - 1), min_size=20, max_size=20), st.integers(0, 9))
def test_every_occurrence_updates_in_order(rows, seed):
    check(rows, seed)


@pytest.mark.parametrize("rows", [[-1] * 20, [3] * 20, [*range(V)] * 2 + [-1] * 6, [3], [-1]])
def test_few_rows_and_one_row(rows):
    check(rows)


def test_a_round_of_many_rows():
    engine, state = start(o.SGD(1.0, use_gradient_accumulation=False), LARGE)
    rows = np.tile(np.arange(LARGE - 5), 2)
    values = np.arange(rows.size * D, dtype=np.float32).reshape(-1, D)
    done = engine.update(state, engine.place({"x": rows}), {"x": values})
    expected = np.zeros((LARGE, D), np.float32)
    np.add.at(expected, rows, -values)
    np.testing.assert_array_equal(engine.tables(done)["t"], expected)

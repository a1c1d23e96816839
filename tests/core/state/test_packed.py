"""Packed tables, as on TPUs, run on the CPU: an engine's results are those of plain tables."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from facade_cases import mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, optimizers
from tpu_embed.kernels.formats import LINE

BATCH, VOCABULARY = 16, 150
EACH = optimizers.Adagrad(0.1, use_gradient_accumulation=False)
CASES = {
    "a row a line": ("words", 128, "float32", optimizers.SGD(0.1), "mod", 8),
    "short rows": ("words", 5, "float32", optimizers.Adam(0.1), "div", 8),
    "bfloat16": ("words", 33, "bfloat16", optimizers.Adagrad(0.1), "mod", 2),
    "numbers a row": ("words", 200, "float32", optimizers.RowWiseAdagrad(0.1), "replicated", 8),
    "optax": ("words", 16, "float32", optax.adam(0.1), "mod", 1),
    "at random": ("words", 33, "bfloat16 stochastic", optimizers.Adagrad(0.1), "div", 2),
    "lines at random": ("lanes", 7, "bfloat16 stochastic", optimizers.Lion(0.1), "mod", 1),
    "lines": ("lanes", 16, "float32", optimizers.Adagrad(0.1), "mod", 8),
    "lines of bfloat16": ("lanes", 7, "bfloat16", optimizers.FTRL(0.1), "mod", 1),
    "every row": ("lanes", 5, "float32", optimizers.Adam(0.1, lazy_adam=False), "mod", 4),
    "whole lines": ("lanes", 200, "float32", optimizers.Adagrad(0.1), "div", 2),
    "one by one": ("lanes", 16, "float32", EACH, "mod", 2),
    "block sums": ("lanes", 20, "float32", optimizers.Momentum(0.1), "replicated", 4),
}


def engine_of(monkeypatch, packing, dim, dtype, optimizer, placement, devices):
    monkeypatch.setattr("tpu_embed.core.layout.layout.packing_of", lambda device: packing)
    dtype, _, rounding = dtype.partition(" ")
    options = {"dtype": dtype, "rounding": rounding or "nearest", "placement": placement}
    table = TableConfig(VOCABULARY, dim, name="item", **options)
    other = dataclasses.replace(table, vocabulary_size=7, combiner="mean", name="day")
    features = {"items": FeatureConfig(table), "days": FeatureConfig(other)}
    engine = EmbeddingEngine(features, optimizer, mesh=mesh(devices))
    assert all(stack.packing == packing for stack in engine.layout.stacks)
    return engine


def trained(engine):
    """Return the activations of a second step, and all tables and slots after it."""
    state, rng = engine.init(jax.random.key(0)), np.random.default_rng(0)
    for _ in range(2):
        items, days = rng.integers(0, VOCABULARY, (BATCH, 5)), rng.integers(0, 7, (BATCH, 3))
        batch = engine.place({"items": items, "days": days})
        activations = engine.lookup(state, batch)
        gradients = jax.tree.map(lambda a: 0.5 * a + 1, activations)
        state = engine.update(state, batch, gradients)
    rows = np.arange(0, VOCABULARY, 7)[::-1]
    ones = np.ones((len(rows), engine.table_configs["item"].dim))
    state = engine.set_rows(state, "item", rows, ones)
    return jax.device_get((activations, engine.tables(state), engine.slots(state)))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.whole
def test_results_have_the_bits_of_plain_tables(monkeypatch, name):
    packing, *rest = CASES[name]
    packed, plain = (trained(engine_of(monkeypatch, p, *rest)) for p in (packing, "none"))
    jax.tree.map(np.testing.assert_array_equal, packed, plain)


def test_arrays_are_lines_and_the_host_reads_them(monkeypatch):
    engine = engine_of(monkeypatch, *CASES["bfloat16"])
    state = engine.init(jax.random.key(0))
    assert {x.shape[1] for x in state.tables.values()} == {LINE}
    for slot in (None, "accumulators"):
        array = (engine.slots(state)["item"] | {None: engine.tables(state)["item"]})[slot]
        found = engine.rows(state, "item", np.arange(VOCABULARY), slot=slot)
        np.testing.assert_array_equal(found, array)


def test_a_plain_state_is_refused(monkeypatch, refused):
    packing, *rest = CASES["lines"]
    engine = engine_of(monkeypatch, packing, *rest)
    plain = engine_of(monkeypatch, "none", *rest).init(jax.random.key(0))
    refused(r"state: expected stacks \['day\+1@mod8x128#", engine.tables, plain)

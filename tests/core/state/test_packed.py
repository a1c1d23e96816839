"""Packed tables, as on TPUs, run on the CPU: an engine's results are those of plain tables."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, optimizers
from tpu_embed.kernels.formats import LINE

BATCH, VOCABULARY = 16, 150
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
    "one by one": (
        "lanes", 16, "float32", optimizers.Adagrad(0.1, use_gradient_accumulation=False), "mod", 2,
    ),
    "block sums": ("lanes", 20, "float32", optimizers.Momentum(0.1), "replicated", 4),
}  # fmt: skip
IN_CI = ("block sums",)


def features(dim, dtype, placement):
    dtype, _, rounding = dtype.partition(" ")
    options = {"dtype": dtype, "rounding": rounding or "nearest", "placement": placement}
    table = TableConfig(VOCABULARY, dim, name="item", **options)
    other = dataclasses.replace(table, vocabulary_size=7, combiner="mean", name="day")
    return {"items": FeatureConfig(table), "days": FeatureConfig(other)}


def batches():
    rng = np.random.default_rng(0)
    for _ in range(2):
        yield {
            "items": rng.integers(0, VOCABULARY, (BATCH, 5)),
            "days": rng.integers(0, 7, (BATCH, 3)),
        }


def engine_of(monkeypatch, packing, dim, dtype, optimizer, placement, devices):
    monkeypatch.setattr("tpu_embed.core.layout.layout.packing_of", lambda device: packing)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("d",))
    return EmbeddingEngine(features(dim, dtype, placement), optimizer, mesh=mesh)


def trained(monkeypatch, packing, dim, *rest):
    engine = engine_of(monkeypatch, packing, dim, *rest)
    state, activations = engine.init(jax.random.key(0)), None
    for ids in batches():
        batch = engine.place(ids)
        activations = engine.lookup(state, batch)
        gradients = jax.tree.map(lambda a: 0.5 * a + 1, activations)
        state = engine.update(state, batch, gradients)
    rows = np.arange(0, VOCABULARY, 7)[::-1]
    state = engine.set_rows(state, "item", rows, np.ones((len(rows), dim)))
    return engine, state, activations


def results(engine, state, activations):
    return jax.device_get((activations, engine.tables(state), engine.slots(state)))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if name in IN_CI else pytest.mark.whole)
        for name, case in CASES.items()
    ],
)
@pytest.mark.whole
def test_results_have_the_bits_of_plain_tables(monkeypatch, case):
    packing, *rest = case
    packed = trained(monkeypatch, packing, *rest)
    assert all(stack.packing == packing for stack in packed[0].layout.stacks)
    plain = trained(monkeypatch, "none", *rest)
    jax.tree.map(np.testing.assert_array_equal, results(*packed), results(*plain))


def test_arrays_are_lines_and_the_host_reads_them(monkeypatch):
    engine = engine_of(monkeypatch, *CASES["bfloat16"])
    state = engine.init(jax.random.key(0))
    assert {x.shape[1] for x in state.tables.values()} == {LINE}
    for slot in (None, "accumulators"):
        array = (engine.slots(state)["item"] | {None: engine.tables(state)["item"]})[slot]
        found = engine.rows(state, "item", np.arange(VOCABULARY), slot=slot)
        np.testing.assert_array_equal(found, array)


def test_a_plain_state_is_refused(monkeypatch):
    packing, *rest = CASES["lines"]
    engine = engine_of(monkeypatch, packing, *rest)
    plain = engine_of(monkeypatch, "none", *rest).init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"state: expected stacks \['day\+1@mod8x128#"):
        engine.tables(plain)

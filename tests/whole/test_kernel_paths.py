"""Whole steps have the same bits with compiled kernels and with plain XLA operations."""

from __future__ import annotations

import collections
import re

import jax
import numpy as np
import optax
import pytest
from facade_cases import assert_same, mesh
from optimizer_cases import ALL, halving

import tpu_embed
from tpu_embed import FeatureConfig, RaggedIds, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.kernels import cpu, dispatch

if cpu.load().path is None:
    pytest.skip(f"compiled library: {cpu.load().why_not}", allow_module_level=True)

B, V, STEPS = 16, 23, 3
RULES = {
    "sgd": o.SGD(0.1, **ALL),
    "nesterov": o.Momentum(0.1, momentum=0.5, use_nesterov=True, **ALL),
    "adagrad": o.Adagrad(halving, epsilon=0.1, weight_decay_factor=0.03),
    "rowwise": o.RowWiseAdagrad(0.1, clip_weight_min=0.0),
    "adam": o.Adam(0.1),
    "adam_outside": o.Adam(halving, epsilon=0.1, sum_inside_sqrt=False, **ALL),
    "ftrl": o.FTRL(0.1, l1_regularization_strength=0.1, l2_regularization_strength=0.2, beta=0.3),
    "ftrl_times_rate": o.FTRL(
        0.1, l1_regularization_strength=0.5, multiply_linear_by_learning_rate=True, **ALL
    ),
    "lion": o.Lion(0.1, **ALL),
    "optax": optax.adamw(0.1, weight_decay=0.1),
    "replicated": o.Adam(0.1, bias_correction=False),
}
COMPILED = 9
"""Rules above that the update kernel itself knows: all but lion and optax."""
DIMS = (5, 20, 64)
DTYPES = ("float32", "bfloat16")
COMBINERS = ("mean", "sqrtn", "sum")


def make_features():
    """Return two features a table: a sequence of dense ids, and weighted bags."""
    features = {}
    for i, (name, rule) in enumerate(RULES.items()):
        table = TableConfig(
            V,
            DIMS[i % 3],
            name=name,
            optimizer=rule,
            dtype=DTYPES[i % 2],
            combiner=COMBINERS[(i // 2) % 3],
            placement="replicated" if name == "replicated" else ("mod", "div")[i % 2],
        )
        features[f"{name}/dense"] = FeatureConfig(table, max_sequence_length=(0, 2)[i // 3 % 2])
        features[f"{name}/weighted"] = FeatureConfig(table)
    return features


def ids_of(rng, path):
    if not path.endswith("weighted"):
        return rng.integers(-1, V, (B, 3)).astype(np.int32)
    lengths = rng.integers(0, 5, B)
    values = rng.integers(0, V, lengths.sum())
    weights = rng.choice(np.float32([1.5, 0.3, -0.7, 0.0]), values.size)
    return RaggedIds(values, np.cumsum([0, *lengths]), weights=weights)


def batches(features):
    rng = np.random.default_rng(3)
    return [{path: ids_of(rng, path) for path in features} for _ in range(STEPS)]


def train(devices, initial):
    """Return all activations, tables and slots of a fresh engine, which traces its own programs."""
    features = make_features()
    engine = tpu_embed.EmbeddingEngine(features, mesh=mesh(devices))
    given = batches(features)
    spec = tpu_embed.BatchSpec.union(*(engine.place(ids).spec for ids in given))
    placed = [engine.place(ids, spec=spec) for ids in given]
    stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *placed)

    @jax.jit
    def steps(state, placed):
        def one(state, batch):
            activations = engine.lookup(state, batch)
            gradients = jax.tree.map(lambda a: 2 * a + 1, activations)
            return engine.update(state, batch, gradients), activations

        return jax.lax.scan(one, state, placed)

    state, activations = steps(initial, stacked)
    return jax.device_get((activations, engine.tables(state), engine.slots(state)))


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of the compiled kernels while programs are traced."""
    counted = collections.Counter()

    def count(name, kernel):
        def run(*operands, **options):
            counted[name] += 1
            return kernel(*operands, **options)

        monkeypatch.setattr(cpu, name, run)

    for name in ("gather_rows", "set_rows", "sort_rows", "gather_sum", "update_rows"):
        count(name, getattr(cpu, name))
    return counted


@pytest.mark.whole  # the kernels themselves are compared in tests/kernels
@pytest.mark.parametrize("devices", [1, 8])
def test_the_bits_are_the_same(monkeypatch, calls, devices):
    engine = tpu_embed.EmbeddingEngine(make_features(), mesh=mesh(devices))
    initial = engine.init(jax.random.key(0))
    monkeypatch.setenv(dispatch.VARIABLE, "native")
    calls.clear()
    native = train(devices, initial)
    assert calls["update_rows"] == COMPILED
    assert min(calls[name] for name in ("gather_rows", "set_rows", "gather_sum")) > 0
    assert bool(calls["sort_rows"]) == (devices == 1)  # else `place` has sorted
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    calls.clear()
    reference = train(devices, initial)
    assert not calls
    for name in RULES:
        for part in (1, 2):
            assert_same(native[part][name], reference[part][name])
    assert_same(native, reference)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(native))
    before = engine.tables(initial)
    assert all(np.any(np.asarray(before[name]) != native[1][name]) for name in RULES)


def test_jagged_gradients_are_summed_by_the_update_kernel(monkeypatch):
    """On one device no partial sums are made before it, and gradients are not put together."""
    monkeypatch.setenv(dispatch.VARIABLE, "native")
    feature = FeatureConfig(TableConfig(V, 8, name="item"), jagged=True)
    engine = tpu_embed.EmbeddingEngine([feature, feature], o.Adagrad(0.1), mesh=mesh(1))
    ids = np.random.default_rng(0).integers(0, V, (2, B, 30)).astype(np.int32)
    state, batch = engine.init(jax.random.key(0)), engine.place(list(ids))
    step = jax.jit(lambda s, b: engine.update(s, b, engine.lookup(s, b)), donate_argnums=0)
    compiled = step.lower(state, batch).compile()
    kernels = re.findall(r'custom_call_target="tpu_embed_(\w+)"', compiled.as_text())
    assert sorted(kernels) == ["gather_sum", "update"]
    values = sum(shape.capacity for shape in batch.spec.feature_shapes) * 8 * 4
    assert values < compiled.memory_analysis().temp_size_in_bytes < 1.5 * values

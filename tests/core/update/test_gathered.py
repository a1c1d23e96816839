"""If it sends less, gradients of bags are exchanged instead of row sums, with the same bits."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, optimizers
from tpu_embed.kernels import cpu

B, D, H = 64, 32, 12

needs_kernels = pytest.mark.skipif(
    cpu.load().path is None, reason="the compiled kernels are missing: no C++ compiler"
)


def make_engine(devices, placement="mod"):
    features = {
        "bag": FeatureConfig(TableConfig(5000, D, name="a", combiner="mean", placement=placement)),
        "other": FeatureConfig(TableConfig(700, D, name="b", combiner="sqrtn")),
    }
    shape, names = ((devices,), ("x",)) if devices < 8 else ((2, 4), ("x", "y"))
    mesh = Mesh(np.asarray(jax.devices()[:devices]).reshape(shape), names)
    return EmbeddingEngine(features, optimizers.Adagrad(0.1), mesh=mesh)


def ids(hot, seed=0):
    rng = np.random.default_rng(seed)
    weights = {"bag": rng.normal(size=(B, hot)).astype(np.float32), "other": None}
    drawn = {"bag": rng.integers(-1, 5000, (B, hot)), "other": rng.integers(0, 700, (B, hot))}
    return drawn, weights


def collectives_of(engine, hot):
    state, batch = engine.init(jax.random.key(0)), engine.place(*ids(hot))
    gradients = {name: np.ones((B, D), np.float32) for name in ("bag", "other")}
    update = jax.jit(engine.update, donate_argnums=0)
    text = update.lower(state, batch, gradients).compile().as_text()
    return {name for name in ("all-to-all", "all-gather") if f" {name}(" in text}


@needs_kernels
@pytest.mark.parametrize(("hot", "expected"), [(H, {"all-gather"}), (1, {"all-to-all"})])
@pytest.mark.quick(1)
def test_what_travels_is_what_is_less(hot, expected, monkeypatch):
    monkeypatch.setenv("TPU_EMBED_KERNELS", "native")
    assert collectives_of(make_engine(8), hot) == expected


def trained(devices, placement):
    engine = make_engine(devices, placement)
    state = engine.init(jax.random.key(0))
    rng = np.random.default_rng(7)
    for step in range(3):
        gradients = {n: rng.normal(size=(B, D)).astype(np.float32) for n in ("bag", "other")}
        batch = engine.place(*ids(H, step))
        state = engine.update_in_place(state, batch, gradients)
    return engine.tables(state), engine.slots(state)


@pytest.mark.parametrize("placement", ["mod", pytest.param("div", marks=pytest.mark.whole)])
def test_the_bits_are_those_of_one_device(placement):
    alone = trained(1, placement)
    for devices in (2, 8):
        jax.tree.map(np.testing.assert_array_equal, trained(devices, placement), alone)

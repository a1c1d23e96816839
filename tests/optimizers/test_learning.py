"""The optimizers of the first examples learn under the loss of these examples, which is a mean."""

import functools
import re
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from facade_cases import mesh

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig
from tpu_embed import optimizers as o

ROOT = Path(__file__).resolve().parents[2]
FIRST_PAGES = ["README.md", "docs/index.md", "examples/quickstart.py"]
V, B, STEPS = 10_000, 1024, 150


@functools.cache
def loss_after(rule):
    """Return the loss of labels planted by id, after some steps; log 2 is that of a guess."""
    feature = FeatureConfig(TableConfig(V, 8, name="films"))
    engine = tpu_embed.EmbeddingEngine(feature, rule, mesh=mesh(1))
    rng, state = np.random.default_rng(0), engine.init(jax.random.key(0))
    liked = (rng.random(V) < 0.5).astype(np.float32)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch, label):
        def loss_fn(activations):
            return optax.sigmoid_binary_cross_entropy(activations.sum(-1), label).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(engine.lookup(state, batch))
        return engine.update(state, batch, gradients), loss

    for _ in range(STEPS):
        ids = rng.integers(V, size=B)
        state, loss = step(state, engine.place(ids), liked[ids])
    return float(loss)


@pytest.mark.parametrize("page", FIRST_PAGES)
@pytest.mark.quick(1)
def test_the_optimizer_of_a_first_example_learns(page):
    (given,) = re.findall(r"\bAdagrad\(([^)]*)\)", (ROOT / page).read_text())
    rate, *named = given.split(", ")
    options = {name: float(value) for name, value in (one.split("=") for one in named)}
    assert loss_after(o.Adagrad(float(rate), **options)) < 0.2


@pytest.mark.whole
def test_the_default_barely_learns_and_others_have_the_same_remedy():
    """What the page on optimizers says."""
    assert loss_after(o.Adagrad(0.1)) > 0.65
    for kind in (o.RowWiseAdagrad, o.FTRL):
        assert loss_after(kind(0.1, initial_accumulator_value=1e-6)) < 0.25

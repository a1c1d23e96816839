"""Placed batches and traced ids train the same tables on meshes of two axes."""

import functools
import itertools

import jax
import numpy as np
import pytest
from facade_cases import assert_same
from jax.sharding import Mesh

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig
from tpu_embed import optimizers as o

B, D = 96, 2
SIZES = {"item": 37, "small": 3, "big": 150}
"""A table with shards, and two that are replicated: with fewer rows than the batch has ids or not.

They are stacks of their own, because their dims differ.
"""
AXES = [("p",), ("d",), ("p", "d")]
IN_WHOLE = [(("p",), ("p",)), (("d",), ("d",)), (("p", "d"), ("p", "d")), (("d",), ("p", "d"))]


def make_engine(devices, batch_axes, shard_axes):
    """Return an engine of three stacks; each has two features."""
    features = {}
    for i, (name, size) in enumerate(SIZES.items()):
        options = {"placement": "mod" if name == "item" else "replicated"}
        options |= {"shard_axes": shard_axes} if name == "item" else {}
        table = TableConfig(size, D + i, name=name, combiner="sum", **options)
        features |= {f"{name}/bag": FeatureConfig(table), f"{name}/one": FeatureConfig(table)}
    return tpu_embed.EmbeddingEngine(features, o.Adagrad(0.1), mesh=devices, batch_axes=batch_axes)


def draw(rng):
    """Return ids, half of them of few rows, and some absent."""
    ids = {}
    for name, size in SIZES.items():
        any_row, few = rng.integers(-1, size, (B, 2)), rng.integers(0, min(3, size), (B, 2))
        bags = np.where(rng.random((B, 2)) < 0.5, any_row, few).astype(np.int32)
        ids |= {f"{name}/bag": bags, f"{name}/one": bags[::-1, 0]}
    return ids


@pytest.mark.parametrize(
    ("batch_axes", "shard_axes"),
    [
        pytest.param(*case, marks=[pytest.mark.whole] if case in IN_WHOLE else [])
        for case in itertools.product(AXES, AXES)
    ],
    ids=str,
)
@pytest.mark.quick(1)
def test_traced_ids_train_what_placed_ids_train(batch_axes, shard_axes):
    """Six replicas do not divide eight blocks: the order of sums is that of the devices."""
    devices = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("p", "d"))
    engine, rng = make_engine(devices, batch_axes, shard_axes), np.random.default_rng(0)
    ids = draw(rng)
    gradients = {
        name: rng.integers(-9, 9, (B, D + list(SIZES).index(name.split("/")[0]))).astype(np.float32)
        for name in ids
    }

    @jax.jit
    def steps(key, *sources):
        state = engine.init(key)
        return [
            (engine.lookup(state, source), engine.update(state, source, gradients).tables)
            for source in sources
        ]

    placed, traced = steps(jax.random.key(0), engine.place(ids), ids)
    assert_same(traced[1], placed[1])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(close, traced[0], placed[0])

"""With `exchange_dtype="bfloat16"` rows and partial sums are rounded once, on any devices."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from exchange_cases import RATE, looked_up, stepped
from jax.sharding import Mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, optimizers

B, D = 16, 6
SIZES = {"items": 30, "flags": 7}
HOTS = {"seen": 4, "bought": 3, "flag": 2}
TABLES = {"seen": "items", "bought": "items", "flag": "flags"}


def mesh_of(devices):
    return Mesh(np.asarray(jax.devices()[:devices]), ("x",))


def features(placement="mod"):
    items = TableConfig(SIZES["items"], D, combiner="sum", name="items", placement=placement)
    flags = TableConfig(SIZES["flags"], D, combiner="sum", name="flags", placement="replicated")
    both = {"items": items, "flags": flags}
    return {name: FeatureConfig(both[table]) for name, table in TABLES.items()}


def make_engine(devices, placement="mod", **options):
    options = {"exchange_dtype": "bfloat16", "mesh": mesh_of(devices)} | options
    rule = options.pop("optimizer", optimizers.SGD(float(RATE)))
    return EmbeddingEngine(features(placement), rule, **options)


def draw(seed):
    """Return ids, weights and gradients of all features; rows occur in many blocks."""
    rng = np.random.default_rng(seed)
    ids, weights, gradients = {}, {}, {}
    for name, table in TABLES.items():
        ids[name] = rng.integers(-1, SIZES[table], (B, HOTS[name]))
        weights[name] = rng.normal(size=(B, HOTS[name])).astype(np.float32)
        gradients[name] = rng.normal(size=(B, D)).astype(np.float32)
    return ids, weights, gradients


def run(engine, *, traced=False, seeds=(0, 1)):
    """Return the activations of the last batch, and the tables after it."""
    state = engine.init(jax.random.key(0))

    @jax.jit
    def step(state, ids, weights, gradients):
        found = engine.lookup(state, ids, weights)
        return found, engine.update(state, ids, gradients, weights)

    found = None
    for seed in seeds:
        ids, weights, gradients = draw(seed)
        if traced:
            found, state = step(state, ids, weights, gradients)
        else:
            batch = engine.place(ids, weights)
            found = engine.lookup(state, batch)
            state = engine.update_in_place(state, batch, gradients)
    return jax.tree.map(np.asarray, (found, engine.tables(state)))


def expected(engine, seeds=(0, 1), blocks=8):
    tables = jax.tree.map(np.asarray, engine.tables(engine.init(jax.random.key(0))))
    found = {}
    for seed in seeds:
        ids, weights, gradients = draw(seed)
        for name, table in TABLES.items():
            rounds = table == "items"
            found[name] = looked_up(tables[table], ids[name], weights[name], rounds=rounds)
        for table in SIZES:
            names = sorted(name for name, own in TABLES.items() if own == table)
            uses = [(ids[n], weights[n], gradients[n]) for n in names]
            tables[table] = stepped(tables[table], uses, blocks=blocks, rounds=table == "items")
    return found, tables


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_bits_are_those_of_the_description(devices, traced):
    engine = make_engine(devices)
    got, want = run(engine, traced=traced), expected(engine)
    jax.tree.map(np.testing.assert_array_equal, got, want)

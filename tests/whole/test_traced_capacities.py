"""Ids traced inside a jit, placed ids and a float64 loop have the same updates, whatever S and G.

The programs of traced ids have static capacities: how many rows a device may ask of a shard, how
many partial sums it may send. A bound that is too small would lose gradients without a word, so
random cases have any number of devices, blocks, examples and rows.

    TRACED_SEEDS=0:2000 python -m pytest tests/whole/test_traced_capacities.py -k many
"""

import dataclasses
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from facade_cases import mesh

import tpu_embed
from tpu_embed import BatchSpec, FeatureConfig, TableConfig
from tpu_embed import optimizers as o

FEW = range(20)
MANY = range(*map(int, os.environ.get("TRACED_SEEDS", "20:200").split(":")))


class Case(NamedTuple):
    """One update: S devices, G blocks, and features by name with their ids and gradients."""

    shards: int
    blocks: int
    features: dict[str, FeatureConfig]
    optimizer: o.RowOptimizer
    ids: dict[str, np.ndarray]
    weights: dict[str, np.ndarray | None]
    gradients: dict[str, np.ndarray]
    tight: bool
    """Whether the program gets a spec that is too small for its ids."""


def draw(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    shards, blocks = int(rng.integers(1, 9)), int(rng.integers(1, 25))
    placement = str(rng.choice(["mod", "mod", "div", "replicated"]))
    combiner, dim = str(rng.choice(["sum", "mean", "sqrtn"])), int(rng.integers(1, 4))
    tables = [TableConfig(int(rng.integers(1, 51)), dim, combiner=combiner, placement=placement)]
    tables += [TableConfig(int(rng.integers(1, 51)), dim, placement=placement)] * rng.integers(2)
    features, ids, weights, gradients = {}, {}, {}, {}
    for name in "ab"[: rng.integers(1, 3)]:
        table = tables[rng.integers(len(tables))]
        features[name] = FeatureConfig(table)
        size = shards * int(rng.integers(1, 50 // shards + 1))  # B, up to 50
        width, most = int(rng.integers(1, 5)), rng.choice([1, table.vocabulary_size])
        ids[name] = rng.integers(-1, most, (size, width)).astype(np.int32)
        weights[name] = None
        if rng.integers(3) == 0:
            weights[name] = rng.uniform(0.5, 2, ids[name].shape).astype(np.float32)
        gradients[name] = rng.normal(size=(size, dim)).astype(np.float32)
    accumulates = placement == "replicated" or bool(rng.integers(6))
    # The oracle adds up gradients, so only a linear rule may take them one by one.
    sgd = o.SGD(1.0, use_gradient_accumulation=accumulates)
    optimizer = o.Momentum(1.0) if accumulates and rng.integers(2) else sgd
    tight = bool(rng.integers(4) == 0)
    return Case(shards, blocks, features, optimizer, ids, weights, gradients, tight)


def check(case: Case) -> None:
    engine = tpu_embed.EmbeddingEngine(
        case.features, case.optimizer, mesh=mesh(case.shards), sum_blocks=case.blocks
    )
    state = engine.init(jax.random.key(0))
    before = engine.tables(state)
    batch = engine.place(case.ids, case.weights)
    placed = engine.update(state, batch, case.gradients)
    spec = smallest(batch.spec) if case.tight else None

    @jax.jit
    def inside(state, ids, weights, gradients):
        return engine.update(state, ids, gradients, weights, spec=spec)

    traced = inside(state, *jax.tree.map(jnp.asarray, (case.ids, case.weights)), case.gradients)
    names = sorted(case.features)
    read = [(case.features[name], case.ids[name], case.weights[name]) for name in names]
    occurrences = oracle.row_gradients(read, [case.gradients[name] for name in names])
    found, bits = engine.tables(traced), engine.tables(placed)
    for name, table in named(engine, case).items():
        expected = np.array(before[name], np.float64)
        size = np.zeros(len(expected))
        for occurrence in occurrences:
            if occurrence.table is table:
                expected[occurrence.row] -= occurrence.gradient
                size[occurrence.row] += np.abs(occurrence.gradient).max()
        # Sums of at most 400 float32 numbers, each rounded to a part in 2^24 of what came before.
        bound = 1e-5 * (1 + size[:, None])
        assert (np.abs(bits[name] - expected) <= bound).all()
        assert (np.abs(found[name] - expected) <= bound).all()
    # Where the devices do not divide the blocks, a block's examples are on two devices. Its sum is
    # then made of two sums, or of one if gradients are gathered, so the last bits may differ.
    if engine.layout.blocks % case.shards == 0:
        held = engine.slots(traced), engine.slots(placed)
        jax.tree.map(np.testing.assert_array_equal, (found, held[0]), (bits, held[1]))
    if not case.tight:
        assert int(traced.counters["overflows"]) == 0


def named(engine, case) -> dict[str, TableConfig]:
    """Return the configs of all tables by the names that the engine gave them."""
    layout, names = engine.layout, sorted(case.features)
    pairs = zip(layout.features, names, strict=True)
    return {one.table.name: case.features[name].table for one, name in pairs}


def smallest(spec: BatchSpec) -> BatchSpec:
    """Return a spec with room for one row and one partial sum per destination."""
    stacks = [dataclasses.replace(one, row_capacity=1, partials=1) for one in spec.stacks]
    return dataclasses.replace(spec, stacks=tuple(stacks))


@pytest.mark.parametrize("seed", FEW)
def test_traced_placed_and_loop_agree(seed):
    check(draw(seed))


@pytest.mark.whole
@pytest.mark.parametrize("seed", MANY)
def test_many_cases(seed):
    check(draw(seed))


@pytest.mark.parametrize(
    ("shards", "blocks", "batch", "rows"),
    [(3, 8, 24, 1), (5, 8, 20, 1), (7, 8, 28, 9), (6, 16, 24, 1)],
)
def test_devices_that_do_not_divide_the_blocks(shards, blocks, batch, rows):
    """Some device has the ids of one block more than ⌈G/S⌉."""
    rng = np.random.default_rng(0)
    ids = {"a": rng.integers(0, rows, (batch, 3)).astype(np.int32)}
    gradients = {"a": rng.normal(size=(batch, 4)).astype(np.float32)}
    features = {"a": FeatureConfig(TableConfig(rows, 4, combiner="sum"))}
    check(Case(shards, blocks, features, o.SGD(1.0), ids, {"a": None}, gradients, tight=False))

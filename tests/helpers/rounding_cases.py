"""Two tables that are rounded at random, their batches, and the bits that NumPy expects of them."""

import numpy as np
import oracle_rounding as oracle
from facade_cases import assert_same as assert_same
from facade_cases import mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig
from tpu_embed import optimizers as o

SIZES, DIM, BATCH, STEPS, LR = {"films": 23, "users": 11}, 5, 16, 3, 2.0**-9


def engine(devices=1, placement="mod", optimizer=None, **options):
    """Return an engine of two tables that share a stack."""
    rule = optimizer or o.SGD(LR)
    return EmbeddingEngine(features(placement), rule, mesh=mesh(devices), **options)


def features(placement="mod"):
    """Return a feature of each of two tables."""
    made = {"dtype": "bfloat16", "rounding": "stochastic", "placement": placement}
    return {
        name: FeatureConfig(TableConfig(size, DIM, name=name, combiner="sum", **made))
        for name, size in SIZES.items()
    }


def batch_of(step):
    """Return ids, some twice and some absent, and gradients whose sums are exact."""
    rng = np.random.default_rng(step)
    ids = {name: rng.integers(-1, size, (BATCH, 3)) for name, size in SIZES.items()}
    return ids, {name: rng.integers(-4, 5, (BATCH, DIM)).astype(np.float32) for name in SIZES}


def bits_of(made, state):
    return {name: np.asarray(x).view(np.uint16) for name, x in made.tables(state).items()}


def seed_of(made, state):
    """Return the seed in a state, which is the same in each stack."""
    (seed,) = {int(slots["rounding_seed"]) for slots in state.slots.values()}
    return seed


def expected(made, state, steps):
    """Return the bits of tables after SGD in NumPy, from a state on, at step 0."""
    tables = {n: np.asarray(x).astype(np.float32) for n, x in made.tables(state).items()}
    seed = seed_of(made, state)
    for step in range(steps):
        ids, gradients = batch_of(step)
        for name, table in tables.items():
            sums = np.zeros_like(table)
            for bag, gradient in zip(ids[name], gradients[name], strict=True):
                for i in bag[bag >= 0]:
                    sums[i] += gradient
            rows = np.unique(ids[name][ids[name] >= 0])
            bits = oracle.random_bits(seed, name, step + 1, rows[:, None], np.arange(DIM))
            table[rows] = oracle.round_up_or_down(table[rows] - np.float32(LR) * sums[rows], bits)
    return {n: (t.view(np.uint32) >> 16).astype(np.uint16) for n, t in tables.items()}


def trained(made, state, steps, first=0):
    for step in range(first, first + steps):
        ids, gradients = batch_of(step)
        state = made.update_in_place(state, made.place(ids), gradients)
    return state

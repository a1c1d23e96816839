"""One training run for all tests of whole steps: features, batches, gradients, and two runners.

`run` runs the library in a layout. `expected` and `expected_by_optax` run the oracle, which has no
layout. Batches and activation gradients are fixed, so that layouts can be compared bit by bit.
"""

import dataclasses
import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_cases
import oracle
import oracle_rules
from facade_cases import mesh
from oracle_bounds import stored

import tpu_embed
from tpu_embed import FeatureConfig, RaggedIds, SparseIds, TableConfig

B, D, STEPS = 16, 4, 20
VOCABULARY = {"item": 37, "shop": 5}
# Multiples of a half add exactly: a bag's sum of weights is zero, or far from it, in every dtype.
WEIGHTS = np.array([1.0, 0.5, -0.5, 0.0, 2.0], np.float32)


@dataclasses.dataclass(frozen=True)
class LayoutCase:
    """Where tables and batch live, and how rows are stored."""

    devices: int = 1
    placement: str = "mod"
    stacking: bool = True
    dtype: str = "float32"


LEVELS = {
    "devices": (8, 4, 2, 1),
    "placement": ("mod", "div", "replicated"),
    "stacking": (True, False),
    "dtype": ("float32", "bfloat16"),
}
WHOLE = [LayoutCase(*levels) for levels in itertools.product(*LEVELS.values())]


def all_optimizers():
    """Return every case by its id: our optimizers, then the optax transforms."""
    optax_cases = {f"optax {name}": tx for name, (tx, _) in optimizer_cases.OPTAX_CASES.items()}
    return dict(optimizer_cases.flat()) | optax_cases


def make_features(placement="mod", dtype="float32"):
    """Return features with every kind of input over two tables, one shared by three features."""
    options = {"placement": placement, "dtype": dtype}
    item, shop = (
        TableConfig(size, D, partial(_initial, name), name=name, combiner=combiner, **options)
        for (name, size), combiner in zip(VOCABULARY.items(), ("mean", "sqrtn"), strict=True)
    )
    return {
        "bag": FeatureConfig(item),
        "clicks": FeatureConfig(item),
        "history": FeatureConfig(shop, max_sequence_length=2),
        "here": FeatureConfig(shop),
        "visits": FeatureConfig(item),
    }


@cache
def start(name):
    """Return the initial rows of a table, float32 [V, D]."""
    rng = np.random.default_rng(len(name) + VOCABULARY[name])
    return rng.normal(size=(VOCABULARY[name], D)).astype(np.float32)


def _initial(name, key, shape, dtype, shard_info):
    """Fill rows from `start`, which needs no compilation and is known to the oracle."""
    return jnp.asarray(start(name))[shard_info.rows].astype(dtype)


@cache
def batches():
    """Return the ids of every step: empty bags, duplicates, and weights of any sign."""
    rng = np.random.default_rng(5)
    return [_batch(rng) for _ in range(STEPS)]


def _batch(rng):
    bags = [rng.integers(0, 37, rng.integers(0, 6)).tolist() for _ in range(B)]
    visits = [(rng.zipf(1.5, rng.integers(0, 4)) % 37).tolist() for _ in range(B)]
    weights = [rng.choice(WEIGHTS, len(bag)).tolist() for bag in bags]
    return {
        "bag": rng.integers(-1, 12, (B, 3)),  # few rows, so many duplicates
        "clicks": RaggedIds.from_lists(bags, weights=weights),
        "history": rng.integers(-1, 5, (B, 3)),
        "here": rng.integers(0, 5, (B,)),
        "visits": SparseIds.from_lists(visits, width=4),
    }


@cache
def gradients():
    """Return the activation gradients of all steps, one float32 [STEPS, B, …, D] per feature."""
    rng = np.random.default_rng(6)
    shapes = {n: (B, 2) if n == "history" else (B,) for n in batches()[0]}
    return {n: np.float32(rng.normal(size=(STEPS, *s, D))) for n, s in shapes.items()}


def make_engine(optimizer, case):
    """Return an engine of the case's layout."""
    options = {"mesh": mesh(case.devices), "stack_tables": case.stacking}
    features = make_features(case.placement, case.dtype)
    return tpu_embed.EmbeddingEngine(features, optimizer, **options)


def run(optimizer, case):
    """Return (tables, slots) by name after all steps, which one program scans over."""
    engine = make_engine(optimizer, case)
    spec = tpu_embed.BatchSpec.union(*(engine.place(ids).spec for ids in batches()))
    placed = [engine.place(ids, spec=spec) for ids in batches()]
    stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *placed)

    @jax.jit
    def steps(key, placed, gradients):
        def one(state, now):
            return engine.update(state, *now), None

        state = jax.lax.scan(one, engine.init(key), (placed, gradients))[0]
        return engine.tables(state), engine.slots(state)

    done = steps(jax.random.key(0), stacked, gradients())
    assert engine.compilations["update"] == 1
    return jax.device_get(done)


def of_step(features, t):
    """Return the features with their ids, and their gradients, as the oracle takes them."""
    order = sorted(features)
    ids = [(features[name], batches()[t][name]) for name in order]
    return ids, [gradients()[name][t] for name in order]


@cache
def occurrences():
    """Return for each step the oracle's lookups in order, by table name."""
    features = make_features()
    steps = [oracle.row_gradients(*of_step(features, t)) for t in range(STEPS)]
    return [{name: [o for o in s if o.table.name == name] for name in VOCABULARY} for s in steps]


def expected(optimizer, dtype):
    """Return the oracle's (tables, slots) after all steps: float64, rows rounded as stored."""
    name, hyper = type(optimizer).__name__, optimizer_cases.hyper(optimizer)
    features = make_features()
    configs = {feature.table.name: feature.table for feature in features.values()}
    first = oracle_rules.initial_slots(name, hyper, D)
    tables = {c: stored(np.float64(start(table)), dtype) for table, c in configs.items()}
    slots = {
        c: {slot: np.stack([value] * c.vocabulary_size) for slot, value in first.items()}
        for c in configs.values()
    }

    def apply(*given):
        row, own = oracle_rules.apply(*given)
        return stored(row, dtype), own

    for t in range(STEPS):
        rate = optimizer.learning_rate
        rate = float(rate(t)) if callable(rate) else rate
        tables, slots = oracle.train_step(
            tables, slots, *of_step(features, t), step=t + 1, apply=apply,
            optimizers=dict.fromkeys(tables, (name, hyper, rate)),
        )  # fmt: skip
    return tuple({table: one[c] for table, c in configs.items()} for one in (tables, slots))


def expected_by_optax(transform, dtype):
    """Return (tables, leaves of the state) of the transform on dense float64 tables.

    After each update, untouched rows and their state are restored.
    """
    tables, leaves = {}, {}

    @jax.jit
    def step(gradient, state, rows):
        steps, state = transform.update(gradient, state, rows)
        return optax.apply_updates(rows, steps), state

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        for table, size in VOCABULARY.items():
            rows = stored(np.float64(start(table)), dtype)
            state = transform.init(jnp.asarray(rows))
            for t in range(STEPS):
                dense, touched = np.zeros((size, D)), np.zeros((size, 1), bool)
                for one in occurrences()[t][table]:
                    dense[one.row] += one.gradient
                    touched[one.row] = True
                after, new = step(dense, state, rows)
                rows = np.where(touched, stored(np.asarray(after), dtype), rows)
                where = partial(np.where, touched)
                state = jax.tree.map(lambda a, b, f=where: f(a, b) if np.ndim(a) else a, new, state)
            tables[table] = rows
            leaves[table] = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    return tables, leaves

"""One training run for all tests of whole steps: features, batches, gradients, and two runners.

`run` runs the library in a layout. `expected` and `expected_by_optax` run the oracle, which has no
layout. Batches and activation gradients are fixed, so that layouts can be compared bit by bit.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import optimizer_cases
import oracle
import oracle_rules
from facade_cases import mesh

import tpu_embed
from tpu_embed import FeatureConfig, RaggedIds, SparseIds, TableConfig

B, D, STEPS = 16, 4, 20
VOCABULARY = {"item": 37, "shop": 5}
COMBINERS = {"item": "mean", "shop": "sqrtn"}
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


def make_features(placement="mod", dtype="float32", **options):
    """Return features with every kind of input over two tables, one shared by three features."""
    item, shop = (
        TableConfig(
            size,
            D,
            name=name,
            combiner=COMBINERS[name],
            placement=placement,
            dtype=dtype,
            initializer=functools.partial(_initial, name=name),
            **options,
        )
        for name, size in VOCABULARY.items()
    )
    return {
        "bag": FeatureConfig(item),
        "clicks": FeatureConfig(item),
        "history": FeatureConfig(shop, max_sequence_length=2),
        "here": FeatureConfig(shop),
        "visits": FeatureConfig(item),
    }


@functools.cache
def start(name):
    """Return the initial rows of a table, float32 [V, D]."""
    rng = np.random.default_rng(len(name) + VOCABULARY[name])
    return rng.normal(size=(VOCABULARY[name], D)).astype(np.float32)


def _initial(key, shape, dtype, shard_info, *, name):
    """Fill rows from `start`, which needs no compilation and is known to the oracle."""
    return jnp.asarray(start(name))[shard_info.rows].astype(dtype)


@functools.cache
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


@functools.cache
def gradients():
    """Return the activation gradients of all steps, one float32 [STEPS, B, …, D] per feature."""
    rng = np.random.default_rng(6)
    shapes = {name: (B, 2) if name == "history" else (B,) for name in batches()[0]}
    return {
        name: rng.normal(size=(STEPS, *shape, D)).astype(np.float32)
        for name, shape in shapes.items()
    }


def make_engine(optimizer, case, **options):
    """Return an engine of the case's layout."""
    options |= {"mesh": mesh(case.devices), "stack_tables": case.stacking}
    features = make_features(case.placement, case.dtype)
    return tpu_embed.EmbeddingEngine(features, optimizer, **options)


def place_all(engine, steps):
    """Return batches of one spec, stacked along a new first axis."""
    spec = tpu_embed.BatchSpec.union(*(engine.place(ids).spec for ids in steps))
    placed = [engine.place(ids, spec=spec) for ids in steps]
    return jax.tree.map(lambda *arrays: np.stack(arrays), *placed)


def run(optimizer, case):
    """Return (tables, slots) by name after all steps, which one program scans over."""
    engine = make_engine(optimizer, case)

    @jax.jit
    def steps(key, placed, gradients):
        def one(state, now):
            return engine.update(state, *now), None

        state = jax.lax.scan(one, engine.init(key), (placed, gradients))[0]
        return engine.tables(state), engine.slots(state)

    done = steps(jax.random.key(0), place_all(engine, batches()), gradients())
    assert engine.compilations["update"] == 1
    return jax.device_get(done)


def rounded(dtype):
    """Return a function that rounds a row as a table of this dtype stores it, to float64."""
    if dtype == "float32":
        return lambda row: row
    return lambda row: np.asarray(row, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def of_step(features, t):
    """Return the features with their ids, and their gradients, as the oracle takes them."""
    order = sorted(features)
    ids = [(features[name], batches()[t][name]) for name in order]
    return ids, [gradients()[name][t] for name in order]


@functools.cache
def occurrences():
    """Return for each step the oracle's lookups in order, by table name."""
    features = make_features()
    steps = [oracle.row_gradients(*of_step(features, t)) for t in range(STEPS)]
    return [{name: [o for o in s if o.table.name == name] for name in VOCABULARY} for s in steps]


def expected(optimizer, dtype):
    """Return the oracle's (tables, slots) after all steps: float64, rows rounded as stored."""
    name, hyper = type(optimizer).__name__, optimizer_cases.hyper(optimizer)
    stored, features = rounded(dtype), make_features()
    configs = {feature.table.name: feature.table for feature in features.values()}
    first = oracle_rules.initial_slots(name, hyper, D)
    tables = {c: stored(start(table).astype(np.float64)) for table, c in configs.items()}
    slots = {
        config: {slot: np.stack([value] * size) for slot, value in first.items()}
        for config, size in zip(configs.values(), map(VOCABULARY.get, configs), strict=True)
    }

    def apply(*given):
        row, own = oracle_rules.apply(*given)
        return stored(row), own

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
    tables, leaves, stored = {}, {}, rounded(dtype)

    @jax.jit
    def step(gradient, state, rows):
        steps, state = transform.update(gradient, state, rows)
        return optax.apply_updates(rows, steps), state

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        for table, size in VOCABULARY.items():
            rows = stored(start(table).astype(np.float64))
            state = transform.init(jnp.asarray(rows))
            for t in range(STEPS):
                dense, touched = np.zeros((size, D)), np.zeros((size, 1), bool)
                for one in occurrences()[t][table]:
                    dense[one.row] += one.gradient
                    touched[one.row] = True
                after, new = step(dense, state, rows)
                rows = np.where(touched, stored(np.asarray(after)), rows)
                state = jax.tree.map(
                    lambda a, b, touched=touched: np.where(touched, a, b) if np.ndim(a) else a,
                    new,
                    state,
                )
            tables[table] = rows
            leaves[table] = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    return tables, leaves

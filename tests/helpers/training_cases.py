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
from jax.sharding import Mesh

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


def mesh_of(devices):
    """Return a mesh of the first devices."""
    return Mesh(np.array(jax.devices()[:devices]), ("devices",))


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
    features = make_features(case.placement, case.dtype)
    mesh = mesh_of(case.devices)
    return tpu_embed.EmbeddingEngine(
        features, optimizer, mesh=mesh, stack_tables=case.stacking, **options
    )


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


@functools.cache
def occurrences():
    """Return for each step the oracle's lookups in order, by table name."""
    features = make_features()
    found = []
    for t, ids in enumerate(batches()):
        order = sorted(features)
        steps = oracle.row_gradients(
            [(features[name], ids[name]) for name in order],
            [gradients()[name][t] for name in order],
        )
        found.append({name: [o for o in steps if o.table.name == name] for name in VOCABULARY})
    return found


def expected(optimizer, dtype):
    """Return the oracle's (tables, slots) after all steps: float64, rows rounded as stored."""
    name, hyper = type(optimizer).__name__, optimizer_cases.hyper(optimizer)
    stored = rounded(dtype)
    tables, slots = {}, {}
    for table, size in VOCABULARY.items():
        rows = [stored(row.astype(np.float64)) for row in start(table)]
        mine = [oracle_rules.initial_slots(name, hyper, D) for _ in range(size)]
        for t in range(STEPS):
            lr = rate_at(optimizer.learning_rate, t)
            for row, gradient in updates_of(t, table, hyper):
                w, mine[row] = oracle_rules.apply(
                    name, hyper, rows[row], mine[row], gradient, t + 1, lr
                )
                rows[row] = stored(w)
        tables[table] = np.stack(rows)
        slots[table] = {slot: np.stack([one[slot] for one in mine]) for slot in mine[0]}
    return tables, slots


def rate_at(rate, t):
    """Return the learning rate at step t, counted from 0, also of a schedule."""
    return float(rate(t)) if callable(rate) else rate


def updates_of(t, table, hyper):
    """Return (row, gradient) of every update of a table at step t, in order."""
    one_by_one = [(o.row, o.gradient) for o in occurrences()[t][table]]
    if not hyper["use_gradient_accumulation"]:
        return one_by_one
    sums = dict.fromkeys(range(VOCABULARY[table]) if not hyper.get("lazy_adam", True) else (), 0.0)
    for row, gradient in one_by_one:
        sums[row] = sums.get(row, 0.0) + gradient
    return [(row, np.zeros(D) + gradient) for row, gradient in sums.items()]


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
            rows = rounded(dtype)(start(table).astype(np.float64))
            state = transform.init(jnp.asarray(rows))
            for t in range(STEPS):
                dense, touched = np.zeros((size, D)), np.zeros((size, 1), bool)
                for row, gradient in updates_of(t, table, {"use_gradient_accumulation": True}):
                    dense[row], touched[row] = gradient, True
                after, new = step(dense, state, rows)
                rows = np.where(touched, rounded(dtype)(np.asarray(after)), rows)
                state = jax.tree.map(
                    lambda a, b, touched=touched: np.where(touched, a, b) if np.ndim(a) else a,
                    new,
                    state,
                )
            tables[table] = rows
            leaves[table] = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    return tables, leaves

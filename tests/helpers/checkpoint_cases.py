"""Shared by tests of checkpoints: tables of many kinds, one engine per layout, a training run."""

import functools

import jax
import numpy as np
import optax
from facade_cases import assert_same, mesh

from tpu_embed import BatchSpec, EmbeddingEngine, FeatureConfig, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.core.rows import host_arrays
from tpu_embed.io import restore, save

BATCH, BEFORE, AFTER = 16, 2, 12
"""Examples of a batch; steps until a checkpoint is saved; steps in all."""

TABLES = {
    "a/b": (11, 3, "float32", o.Adagrad(0.5)),
    "..": (13, 5, "bfloat16", o.Adam(0.25)),
    "ü ?": (7, 2, "float32", o.FTRL(0.5)),
    "rates": (9, 4, "bfloat16", o.SGD(0.25)),
    "optax": (6, 2, "float32", optax.adam(0.25)),
    "b": (5, 3, "float32", o.Adagrad(0.5)),
}
"""Rows, dim, dtype, optimizer; the first and the last are stacked. `optax` has a shared count."""

PLACEMENTS = ("mod", "div", "replicated")


def features(turn):
    """Return one feature per table; each turn gives every table another placement.

    Between turns 0, 3 and 4, some table changes from each placement to each other one.
    """
    found = {}
    for i, (name, (rows, dim, dtype, optimizer)) in enumerate(TABLES.items()):
        options = {"dtype": dtype, "optimizer": optimizer, "combiner": "sum", "name": name}
        options["placement"] = PLACEMENTS[(i % 5 * (1 + turn // 3) + turn) % 3]
        found[name] = FeatureConfig(TableConfig(rows, dim, **options))
    return found


@functools.cache
def engine(devices, turn=0):
    """Return the engine of a layout; on 8 devices no tables are stacked."""
    return EmbeddingEngine(features(turn), mesh=mesh(devices), stack_tables=devices < 8)


def ids(step):
    rng = np.random.default_rng(step)
    return {name: rng.integers(-1, rows, (BATCH, 3)) for name, (rows, *_) in TABLES.items()}


def gradients(step):
    """Return activation gradients that depend only on the step."""
    rng = np.random.default_rng([1, step])
    shapes = {name: (BATCH, dim) for name, (_, dim, *_) in TABLES.items()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@functools.cache
def spec(devices, turn):
    placed = [engine(devices, turn).place(ids(step)) for step in range(AFTER)]
    return BatchSpec.union(*(batch.spec for batch in placed))


def trained(layout, state, first, last):
    """Return the state after steps [first, last); the given state is donated."""
    for step in range(first, last):
        batch = engine(*layout).place(ids(step), spec=spec(*layout))
        state = engine(*layout).update_in_place(state, batch, gradients(step))
    return state


@functools.cache
def saved_state(layout):
    """Return the state at the step at which it is saved; callers must not donate it."""
    return trained(layout, engine(*layout).init(jax.random.key(0)), 0, BEFORE)


def contents(engine, state):
    """Return tables, slots and step on the host."""
    return (*host_arrays(state, engine.layout), int(state.step))


@functools.cache
def never_stopped():
    """Return the contents after BEFORE and after AFTER steps of an uninterrupted run."""
    layout = (1, 0)
    state = trained(layout, engine(*layout).init(jax.random.key(0)), 0, BEFORE)
    before = contents(engine(*layout), state)
    return before, contents(engine(*layout), trained(layout, state, BEFORE, AFTER))


def check_moved(path, source, target):
    """Save on one layout, restore on another and train on; compare with an uninterrupted run."""
    before, after = never_stopped()
    save(path, engine(*source), saved_state(source))
    state = restore(path, engine(*target)).state
    assert_same(contents(engine(*target), state), before)
    state = trained(target, state, BEFORE, AFTER)
    assert_same(contents(engine(*target), state), after)


def small(rows=5, dim=2, *, name="item", optimizer=None, devices=1, **options):
    """Return an engine of one table, by default with Adagrad."""
    table = TableConfig(rows, dim, name=name, **options)
    rule = o.Adagrad(0.5) if optimizer is None else optimizer
    return EmbeddingEngine({"x": FeatureConfig(table)}, rule or None, mesh=mesh(devices))


@functools.cache
def small_engine():
    return small()


def small_state(seed=0):
    return small_engine().init(jax.random.key(seed))


def table_of(engine, state, name="item"):
    return np.asarray(engine.tables(state)[name])

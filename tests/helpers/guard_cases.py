"""Tables, batches and gradients for the tests of `on_bad_gradient`, some gradients not finite."""

import functools

import jax
import numpy as np
import optax
import pytest
from facade_cases import mesh
from optimizer_cases import CASES

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig
from tpu_embed import optimizers as o

BATCH, V, D = 16, 11, 2


def make_table(name, optimizer=None, size=V, **options):
    ones = jax.nn.initializers.ones
    return TableConfig(size, D, ones, name=name, optimizer=optimizer, **options)


PATHS = {
    "kernel": make_table("kernel", o.Adagrad(0.1)),
    "every_row": make_table("every_row", o.Adam(0.1, lazy_adam=False), placement="div"),
    "psum": make_table("psum", o.Momentum(0.1), 5, placement="replicated"),
    "copies": make_table("copies", o.Adagrad(0.2), 90, placement="replicated"),
    "half": make_table("half", o.RowWiseAdagrad(0.1), dtype="bfloat16"),
    "shared_scalar": make_table("shared_scalar", optax.adam(0.1)),
    "each": make_table("each", o.SGD(0.1, use_gradient_accumulation=False), combiner="sum"),
}
"""A table for every way that an update takes."""
KNOWN = ("SGD", "Momentum", "Adagrad", "RowWiseAdagrad", "Adam")
OTHERS = {name: make_table(name, cases[0]) for name, cases in CASES.items() if name not in KNOWN}
FEATURES = {
    **{name: FeatureConfig(table) for name, table in (PATHS | OTHERS).items()},
    "again": FeatureConfig(PATHS["kernel"]),
    "sequence": FeatureConfig(PATHS["kernel"], max_sequence_length=2),
    "fixed": FeatureConfig(make_table("fixed", trainable=False)),
}
SHARED = ("again", "sequence", "fixed")
ALONE = ("kernel", "every_row", "each", *SHARED)
MET = {1: ALONE, 2: ("kernel", "psum", *SHARED), 8: (*PATHS, *SHARED)}
DEVICES = [*(pytest.param(n, marks=pytest.mark.whole) for n in (1, 2)), 8]
"""The features of the engines on so many devices."""
NAN, INFINITY = np.float32("nan"), np.float32("inf")


def draw_ids(names, step=0):
    rng, found = np.random.default_rng(step), {}
    for name, feature in FEATURES.items():
        ids = rng.integers(-9, 90, (BATCH, 3)).astype(np.int32)
        found[name] = np.where(ids < 0, np.int32(-1), ids % feature.table.vocabulary_size)
    return {name: found[name] for name in names}


def draw_gradients(names, step=0):
    rng, found = np.random.default_rng(step), {}
    for name in FEATURES:
        shape = (BATCH, 2, D) if name == "sequence" else (BATCH, D)
        found[name] = rng.normal(size=shape).astype(np.float32)
    return {name: found[name] for name in names}


def spoil(names, bad, value=NAN, example=BATCH - 1):
    """Return gradients of which those of `bad` have one bad number, in one example."""
    gradients = draw_gradients(names)
    for name in bad:
        gradients[name][example, ..., 1] = value
    return gradients


def engine_of(names, devices, policy="skip", grid=None):
    """Return an engine of some of the features, an initial state, a batch, finite gradients."""
    axes = {"mesh": mesh(devices)} if grid is None else {"mesh": grid, "batch_axes": "data"}
    features = {name: FEATURES[name] for name in names}
    engine = EmbeddingEngine(features, **axes, on_bad_gradient=policy)
    state = engine.init(jax.random.key(0))
    return engine, state, engine.place(draw_ids(names)), draw_gradients(names)


@functools.cache
def trained(policy, devices, names):
    """Return an engine, and its state after two finite steps."""
    engine, state, _, _ = engine_of(names, devices, policy)
    for step in range(2):
        batch = engine.place(draw_ids(names, step))
        state = engine.update(state, batch, draw_gradients(names, step))
    return engine, state


def held_by(state):
    return jax.device_get((state.tables, state.slots, state.step))


def logical(engine, state):
    return jax.device_get((engine.tables(state), engine.slots(state)))


def counts(state):
    return np.asarray(state.counters["bad_gradients"]).tolist()


def by_feature(engine, state):
    paths = [feature.path for feature in engine.layout.features]
    return {path: n for path, n in zip(paths, counts(state), strict=True) if n}

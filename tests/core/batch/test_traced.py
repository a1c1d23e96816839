"""Dense ids inside a jit give what placed ids give; bad ids are counted or reported."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import assert_same, mesh
from jax.experimental import checkify

import tpu_embed
from tpu_embed import FeatureConfig, RaggedIds, TableConfig
from tpu_embed import optimizers as o

B, V, D = 4, 9, 2


@functools.cache
def make_engine():
    table = TableConfig(V, D, name="t")
    features = dict.fromkeys(("bag", "bags", "one"), FeatureConfig(table))
    features["row"] = FeatureConfig(table, max_sequence_length=3)
    return tpu_embed.EmbeddingEngine(features, o.Adagrad(0.1), mesh=mesh(2))


def draw(low=-1, high=V, width=4):
    rng = np.random.default_rng(0)
    shapes = {"bag": (B, 3), "bags": (B, 2, 3), "one": (B,), "row": (B, width)}
    return {name: rng.integers(low, high, s).astype(np.int32) for name, s in shapes.items()}


def assert_close(found, expected):
    """Assert equal numbers but for rounding.

    The host rounds gains once and a program three times; and shards add their parts of traced bags.
    """
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(close, found, expected)


UNLIKE = {
    "clipped": (5, "clip", np.int8, -4, 9),
    "counted": (3, "error", np.int32, -1, 3),
    "dropped": (9, "drop", np.uint16, 0, 14),
    "last": (21, "error", np.int16, -1, 21),
}
"""By feature of one stack: rows, policy, dtype of its ids, and their range."""


@pytest.mark.parametrize("placement", ["mod", "replicated", "div"])
@pytest.mark.quick(1)
def test_each_table_of_a_stack_keeps_its_rows_and_policy(placement):
    tables = {n: TableConfig(r[0], D, name=n, placement=placement) for n, r in UNLIKE.items()}
    features = {n: FeatureConfig(t, on_bad_id=UNLIKE[n][1]) for n, t in tables.items()}
    engine = tpu_embed.EmbeddingEngine(features, o.Adagrad(0.1), mesh=mesh(2))
    rng = np.random.default_rng(2)
    ids = {
        name: rng.integers(low, high, (B, 1 + f)).astype(dtype)
        for f, (name, (_, _, dtype, low, high)) in enumerate(UNLIKE.items())
    }
    assert len(engine.layout.stacks) == 1

    @jax.jit
    def step(state, given):
        activations = engine.lookup(state, given)
        new = engine.update(state, given, activations)
        return activations, engine.tables(new), new.counters

    state = engine.init(jax.random.key(0))
    assert_close(step(state, ids), step(state, engine.place(ids)))
    ids["counted"][:2], ids["last"][1:3, 1:] = 3, -2
    assert step(state, ids)[2]["bad_ids"].tolist() == [0, 4, 0, 6]


def test_bad_ids_are_dropped_and_counted_by_feature():
    engine, ids = make_engine(), draw(low=-5, high=V + 5)
    state = engine.init(jax.random.key(0))
    kept = {name: np.where((a < 0) | (a >= V), -1, a) for name, a in ids.items()}
    update = jax.jit(engine.update)
    gradients = jax.tree.map(np.asarray, engine.lookup(state, engine.place(kept)))
    new, expected = update(state, ids, gradients), update(state, kept, gradients)
    seen = ids | {"row": ids["row"][:, :3]}  # a sequence ends at 3
    bad = [((a < -1) | (a >= V)).sum() for _, a in sorted(seen.items())]  # -1 is padding
    assert min(bad) > 0
    assert new.counters["bad_ids"].tolist() == bad
    assert not expected.counters["bad_ids"].any()
    assert_same(new.tables, expected.tables)


def test_checkify_reports_bad_ids(refused):
    engine, ids = make_engine(), draw()
    state = engine.init(jax.random.key(0))
    checked = jax.jit(checkify.checkify(engine.lookup))
    checked(state, ids)[0].throw()
    ids["one"] = np.array([0, V, -1, -7], np.int32)
    error, activations = checked(state, ids)
    refused(r"feature 'one': 2 id\(s\) outside \[0", error.throw, error=checkify.JaxRuntimeError)
    assert not np.asarray(activations["one"])[[1, 3]].any()


ODD = {
    "a container": ({"bag": RaggedIds([1], [0, 1])}, {}, ValueError, "feature 'bag': .*engine.pl"),
    "floats": ({"bag": jnp.ones((B, 3))}, {}, TypeError, "feature 'bag': expected ids of an integ"),
    "rank 0": ({"bag": jnp.int32(1)}, {}, ValueError, "bag"),
    "batches": ({"bag": jnp.ones((B + 1, 3), int)}, {}, ValueError, "feature .bag.: batch size"),
    "odd batch": ({n: a[:3] for n, a in draw().items()}, {}, ValueError, "positive multiple of 2"),
    "shape": ({}, {"bag": np.ones((B, 2), "f")}, ValueError, r"weights of .*'bag'.* \(4, 3\)"),
    "bools": ({}, {"bag": np.ones((B, 3), bool)}, ValueError, "'bag': expected real numbers"),
    "weights [B]": ({}, {"one": np.ones(B, "f")}, ValueError, "one"),
}


@pytest.mark.parametrize("case", ODD)
def test_what_is_refused_while_tracing(case):
    given, weights, kind, says = ODD[case]
    engine, ids = make_engine(), draw() | given
    state = engine.init(jax.random.key(0))
    weights = dict.fromkeys(ids) | weights if weights else None
    leaves = {name: ids.pop(name) for name in list(ids) if isinstance(ids[name], RaggedIds)}
    with pytest.raises(kind, match=says):
        jax.jit(lambda ids, weights: engine.lookup(state, ids | leaves, weights))(ids, weights)


def test_weights_may_be_integers_as_outside():
    engine, ids = make_engine(), draw()
    state, numbers = engine.init(jax.random.key(0)), np.arange(B * 3).reshape(B, 3) - 5
    lookup = jax.jit(lambda ids, weights: engine.lookup(state, ids, weights))

    def weights_as(dtype):
        return dict.fromkeys(ids) | {"bag": numbers.astype(dtype)}

    placed = engine.lookup(state, engine.place(ids, weights_as(np.int32)))
    for dtype in (np.float32, np.int32, np.int8):
        assert_close(lookup(ids, weights_as(dtype)), placed)

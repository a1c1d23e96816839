"""Searches of dynamic vocabularies: only rows with keys are found, and keys come back."""

from functools import partial

import jax
import numpy as np
import pytest
from facade_cases import mesh

from tpu_embed import DynamicVocabulary, EmbeddingEngine, FeatureConfig, TableConfig, retrieval
from tpu_embed import optimizers as o

CAPACITY, DIM = 12, 2


def make(devices):
    table = TableConfig(CAPACITY, DIM, name="t", vocabulary=DynamicVocabulary())
    engine = EmbeddingEngine(FeatureConfig(table), o.SGD(1.0), mesh=mesh(devices))
    return engine, engine.init(jax.random.key(0))


def test_random_steps_against_a_dictionary():
    """Keys come and go; after each step a search finds the best keys that have a row."""
    (engine, state), rng = make(2), np.random.default_rng(0)
    queries = np.array([[1.0, 0.0], [0.0, -1.0], [2.0, 1.0]], np.float32)
    searched = jax.jit(lambda s, q, a: retrieval.top_k(engine, s, "t", q, 3, allowed=a))
    for step in range(8):
        keys = rng.choice(40, size=rng.integers(1, 5), replace=False).astype(np.uint64) + 2**60
        values = rng.integers(-9, 10, (len(keys), DIM)).astype(np.float32)
        state = engine.set_rows(state, "t", keys=keys, values=values)
        known, rows = engine.vocabularies.keys("t")
        held = np.asarray(engine.tables(state)["t"], np.float64)[rows]
        found = retrieval.top_k(engine, state, "t", queries, 3)
        named = retrieval.keys_of(engine, state, "t", found.ids)
        for b, query in enumerate(queries):
            order = sorted(range(len(known)), key=lambda i: (-(held[i] @ query), rows[i]))[:3]
            wanted = [int(known[i]) for i in order] + [None] * (3 - len(order))
            assert named[b].tolist() == wanted, step
        inside = searched(state, queries, retrieval.keyed_rows(engine, state, "t"))
        np.testing.assert_array_equal(inside.ids, found.ids)
    assert len(engine.vocabularies) == CAPACITY  # so keys were evicted
    own = np.zeros(CAPACITY, bool)
    own[[2, 5]] = True
    found = retrieval.top_k(engine, state, "t", queries, 3, allowed=own)
    assert {2, 5, -1} == set(np.asarray(found.ids).reshape(-1).tolist())


def test_what_is_refused():
    engine, state = make(1)
    before = jax.tree.map(lambda x: x.copy(), state)
    state = engine.set_rows(state, "t", keys=[5], values=[[1, 1]])
    plain = EmbeddingEngine(FeatureConfig(TableConfig(4, DIM, name="p")), mesh=mesh(1))
    queries = np.ones((1, DIM), np.float32)
    search = partial(retrieval.top_k, engine, table="t", queries=queries, k=1)
    rows = partial(retrieval.keyed_rows, engine, table="t")
    of_plain = partial(retrieval.keyed_rows, plain, plain.init(jax.random.key(0)), "p")
    keys = partial(retrieval.keys_of, engine, state, "t")
    for words, call in (
        (r"allowed= inside a jit.*retrieval.keyed_rows\(engine", lambda: jax.jit(search)(state)),
        ("the newest state, of step 1", lambda: search(before)),
        ("the newest state, of step 1", lambda: rows(before)),
        ("expected a table with a dynamic vocabulary, got 'p'", of_plain),
        ("keyed_rows: expected a call outside a jit", lambda: jax.jit(rows)(state)),
        (r"keys_of: .* outside a jit.*what the jit", lambda: jax.jit(keys)(np.arange(2))),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(TypeError, match="keys_of: ids: expected integers, got float64"):
        keys([0.5])
    assert keys([[], []]).shape == (2, 0)

"""The counters of a state after a few steps."""

import json

import jax
import numpy as np
import pytest
from facade_cases import mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.metrics import counters


def test_counters_are_plain_numbers():
    table = TableConfig(4, 2, name="t")
    features = {"a": FeatureConfig(table), "b": [FeatureConfig(table)]}
    engine = EmbeddingEngine(features, o.SGD(0.1), mesh=mesh(2), on_bad_gradient="skip")
    state = engine.init(jax.random.key(0))
    ids = {"a": np.array([0, 9, 9, 1]), "b": [np.array([0, 1, 2, 3])]}
    ones = np.ones((4, 2), np.float32)
    update = jax.jit(engine.update)
    for given in (ones, ones * np.float32("nan")):
        state = update(state, ids, {"a": ones, "b": [given]})
    found = counters(engine, state)
    expected = {"bad_ids": {"a": 4, "b/0": 0}, "bad_gradients": {"a": 0, "b/0": 1}}
    assert found == {"step": 1, "overflows": 0, **expected}
    assert json.loads(json.dumps(found)) == found


def test_without_a_guard_there_is_nothing_to_count():
    table = TableConfig(7, 5, name="t", trainable=False)
    engine = EmbeddingEngine([FeatureConfig(table)], mesh=mesh(1))
    assert set(counters(engine, engine.init(jax.random.key(0)))) == {"step", "overflows", "bad_ids"}
    with pytest.raises(ValueError, match="state: expected a TableState, got dict"):
        counters(engine, {})

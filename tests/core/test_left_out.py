"""A batch that is only looked up may leave out features, and the rest is as if it had them."""

import functools

import jax
import numpy as np
import pandas as pd
import pytest
from facade_cases import mesh

import tpu_embed
from tpu_embed import DynamicVocabulary, FeatureConfig, HostStorage, RaggedIds, TableConfig
from tpu_embed.data import Prefetcher
from tpu_embed.optimizers import SGD

ITEMS = TableConfig(20, 2, combiner="sum", name="items")
KEYS = TableConfig(12, 2, name="keys", vocabulary=DynamicVocabulary())
FAR = TableConfig(30, 2, name="far", storage=HostStorage(device_rows=24))
FEATURES = {
    "far": FeatureConfig(FAR),
    "history": FeatureConfig(ITEMS, jagged=True),
    "item": FeatureConfig(ITEMS),
    "key": FeatureConfig(KEYS),
    "last": FeatureConfig(ITEMS, max_sequence_length=2),
    "shaped": FeatureConfig(ITEMS, output_shape=(16, 3)),
}
ALL = {
    "far": np.arange(8),
    "history": RaggedIds.from_lists([[7, 3], [], [5], [1, 2, 3, 4]] * 2),
    "item": np.arange(16).reshape(8, 2),
    "key": np.arange(8) + 2**40,
    "last": np.arange(24).reshape(8, 3) % 20,
    "shaped": np.arange(48).reshape(16, 3, 1) % 20,
}


@functools.cache
def trained(devices):
    """Return an engine, a state in which all ids of the batch have rows, and all activations."""
    engine = tpu_embed.EmbeddingEngine(FEATURES, SGD(0.1), mesh=mesh(devices))
    state, batch = engine.admit(engine.init(jax.random.key(0)), engine.place(ALL))
    return engine, state, engine.lookup(state, batch)


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("names", [["history"], ["far", "item"], ["key", "last", "shaped"]])
@pytest.mark.quick(3)
def test_what_is_left_has_the_rows_that_it_has_among_all(names, devices):
    engine, state, expected = trained(devices)
    batch = engine.place({name: ALL[name] for name in names}, training=False)
    state, batch = engine.admit(state, batch)
    for lookup in (engine.lookup, jax.jit(engine.lookup)):
        found = lookup(state, batch)
        assert sorted(found) == names
        jax.tree.map(np.testing.assert_array_equal, found, {name: expected[name] for name in names})


def test_nests_frames_weights_and_sources():
    user = FeatureConfig(TableConfig(9, 2, name="users"))
    config = {"of": {"user": user, "item": FeatureConfig(ITEMS)}, "item": FeatureConfig(ITEMS)}
    engine = tpu_embed.EmbeddingEngine(config, SGD(0.1), mesh=mesh(2))
    state = engine.init(jax.random.key(0))
    ids, weights = ({"of": {"item": np.full((2, 1), x)}} for x in (3, 2.0))
    sources = ([(ids, weights)] * 2, [({"item": pd.Series([3, 3])}, None)])
    twice, again, alone = (
        engine.lookup(state, batch)
        for source in sources
        for (batch,) in Prefetcher(engine, source, weighted=True, training=False)
    )
    row = engine.tables(state)["items"][3]
    assert list(twice) == list(again) == ["of"]
    np.testing.assert_array_equal(twice["of"]["item"], [2 * row] * 2)
    assert (list(alone), alone["of"]) == (["of", "item"], {})
    np.testing.assert_array_equal(alone["item"], [row] * 2)
    frame = pd.DataFrame({"item": [3, 3], "price": [0.5, 1.5]})
    batch = engine.place(frame, training=False)
    np.testing.assert_array_equal(engine.lookup(state, batch)["item"], [row] * 2)


def test_only_lookups_may_leave_out_features_and_only_those_that_exist(refused):
    engine, state, activations = trained(1)
    some = {"item": ALL["item"]}
    refused(r"far is missing: expected 6 entries.*got 1 entries", engine.place, some)
    for wrong in ({}, some | {"itm": ALL["item"]}):
        refused(r"features: ", engine.place, wrong, training=False)
    batch = engine.place(some, training=False)
    refused("leave training=False out of place", engine.update, state, batch, activations)

"""Jagged features outside of training: served as they are looked up, planned by their ids."""

import jax
import numpy as np
import pytest

from tpu_embed import EmbeddingEngine, FeatureConfig, RaggedIds, TableConfig
from tpu_embed.io import export_model, serving_lookup
from tpu_embed.optimizers import SGD

ITEM = TableConfig(30, 4, name="item")
FEATURES = {
    "history": FeatureConfig(ITEM, 5, jagged=True, on_bad_id="drop"),
    "bag": FeatureConfig(ITEM),
}


@pytest.mark.parametrize("kind", [np.asarray, jax.numpy.asarray])
def test_serving_has_the_bits_of_a_lookup(kind):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    engine = EmbeddingEngine(FEATURES, SGD(0.1), mesh=mesh)
    state, rng = engine.init(jax.random.key(0)), np.random.default_rng(0)
    lengths = rng.integers(0, 8, 12)
    splits = np.concatenate([[0], np.cumsum(lengths)])
    weights = rng.normal(size=splits[-1]).astype(np.float32)
    ids = {
        "history": RaggedIds(rng.integers(0, 33, splits[-1]), splits, weights),
        "bag": rng.integers(-1, 30, (12, 3)),
    }
    tables = {"item": kind(engine.tables(state)["item"])}
    served = serving_lookup(tables, ids, FEATURES)
    looked_up = engine.lookup(state, engine.place(ids))
    np.testing.assert_array_equal(served["bag"], looked_up["bag"])
    one, other = served["history"].to_padded(5), looked_up["history"].to_padded(5)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def test_ids_inside_a_jit_are_served():
    tables = {"item": np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)}
    ids = {"history": np.array([[3, -1, 4], [-1, -1, -1]]), "bag": np.array([[1], [2]])}
    served = jax.jit(lambda tables, ids: serving_lookup(tables, ids, FEATURES))(tables, ids)
    values = np.asarray(served["history"].values)[0]
    assert np.asarray(served["history"].row_splits).tolist() == [[0, 3, 3]]
    np.testing.assert_array_equal(values[[0, 2]], tables["item"][[3, 4]])
    np.testing.assert_array_equal(values[[1, 3, 4, 5]], 0)


def test_export_is_refused(tmp_path):
    tables = {"item": np.zeros((30, 4), np.float32)}
    ids = {"history": np.zeros((2, 3), np.int32), "bag": np.zeros((2, 1), np.int32)}
    with pytest.raises(ValueError, match=r"feature 'history'.*jagged.*serving_lookup"):
        export_model(tmp_path / "m", lambda found: found["bag"], tables, FEATURES, ids)

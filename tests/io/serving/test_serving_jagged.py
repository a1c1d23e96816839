"""Jagged features outside of training: served as they are looked up, planned by their ids."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embed import FeatureConfig, Jagged, RaggedIds, TableConfig
from tpu_embed.io import export_model, load_model, serving_lookup

ITEM = TableConfig(30, 4, name="item")
HISTORY = FeatureConfig(ITEM, 5, jagged=True, on_bad_id="drop")
FEATURES = {"history": HISTORY, "bag": FeatureConfig(ITEM)}


def score(found):
    """Score candidates by attention over the history of one user, `[items]`."""
    rows, mask = (one[0] for one in found["history"].to_padded(5))  # [L, D], [L]
    attention = jax.nn.softmax(jnp.where(mask, found["bag"] @ rows.T, -jnp.inf))
    return jnp.sum(attention @ rows * found["bag"], axis=1)


def test_one_users_history_beside_many_candidates_in_one_call(tmp_path):
    """Neither array is repeated: one example of the history, 500 of the candidates."""
    rng = np.random.default_rng(0)
    tables = {"item": rng.normal(size=(30, 4)).astype(np.float32)}
    seen, items = [4, 7, 4, 29], np.arange(500) % 30
    ids = {"history": RaggedIds.from_lists([seen]), "bag": items}
    found = serving_lookup(tables, ids, FEATURES)
    history = found["history"]
    assert history.row_splits.tolist() == [[0, 4]]
    np.testing.assert_array_equal(history.values[0, :4], tables["item"][seen])
    assert not np.asarray(history.values[0, 4:]).any()
    np.testing.assert_array_equal(found["bag"], tables["item"][items])

    rows = tables["item"].astype(np.float64)
    logits = rows[items] @ rows[seen].T
    weights = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = (weights @ rows[seen] * rows[items]).sum(1)
    scored = jax.jit(score)(found)
    np.testing.assert_allclose(scored, expected, rtol=1e-4, atol=1e-5)  # 4 terms of size 1, float32
    # The same model exported: the user and the candidates keep batch sizes of their own.
    dense = {"history": np.array([[*seen, -1]]), "bag": items}
    examples = dense | {"bag": items[:7]}
    with pytest.raises(ValueError, match="batch: expected None for features of the sizes 7, 1"):
        export_model(tmp_path / "no", score, tables, FEATURES, examples, batch=7)
    export_model(tmp_path / "m", score, tables, FEATURES, examples)
    np.testing.assert_allclose(load_model(tmp_path / "m")(dense), expected, rtol=1e-4, atol=1e-5)


def test_a_jagged_result_is_one_and_bad_ids_are_named(tmp_path):
    feature, tables = FeatureConfig(ITEM, jagged=True), {"item": np.ones((30, 4), np.float32)}
    export_model(tmp_path / "m", lambda found: found, tables, feature, np.zeros((2, 3), np.int32))
    served = load_model(tmp_path / "m")
    found = served(np.array([[1, -1, 2], [3, -1, -1], [-1, -1, -1], [4, 5, -1]]))
    assert isinstance(found, Jagged)
    assert found.row_splits.tolist() == [[0, 3, 4, 4, 6]]
    expected = np.repeat([1, 0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 6])
    np.testing.assert_array_equal(found.values[0, :, 0], expected)
    outputs = {one["path"]: one["shape"] for one in served.metadata["outputs"]}
    assert outputs == {".values": [1, None, 4], ".row_splits": [1, None]}
    with pytest.raises(ValueError, match=r"feature 'feature'.*30.*table 'item'"):
        served(np.array([[1, 2, 30]]))
    with pytest.raises(ValueError, match=r"'feature': expected shape \[B, 3\].*pad with -1"):
        served(np.zeros((2, 4), np.int32))
    assert served(RaggedIds.from_lists([[1], [2, 3]])).row_splits.tolist() == [[0, 1, 3]]

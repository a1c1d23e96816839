"""Jagged features outside of training: served as they are looked up, planned by their ids."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embed import EmbeddingEngine, FeatureConfig, Jagged, RaggedIds, TableConfig
from tpu_embed.io import export_model, load_model, serving_lookup
from tpu_embed.optimizers import SGD

ITEM = TableConfig(30, 4, name="item")
FEATURES = {
    "history": FeatureConfig(ITEM, 5, jagged=True, on_bad_id="drop"),
    "bag": FeatureConfig(ITEM),
}


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
    export_model(tmp_path / "m", score, tables, FEATURES, examples)
    np.testing.assert_allclose(load_model(tmp_path / "m")(dense), expected, rtol=1e-4, atol=1e-5)


def padded_ids(size, seed=0):
    """Return histories of 7 ids, some of them bad, absent or missing at the end; and bags."""
    rng = np.random.default_rng(seed)
    history = rng.integers(-1, 33, (size, 7))
    history[np.arange(7) >= rng.integers(0, 8, (size, 1))] = -1
    history[0] = [4, -1, 31, -1, -1, -1, -1]  # ends with a bad id, which is dropped
    return {"history": history, "bag": rng.integers(-1, 30, (size, 3))}


@pytest.mark.parametrize("batch", [None, pytest.param(12, marks=pytest.mark.whole)])
@pytest.mark.whole
def test_an_exported_model_has_the_bits_of_a_lookup(batch, tmp_path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    engine = EmbeddingEngine(FEATURES, SGD(0.1), mesh=mesh)
    state, ids = engine.init(jax.random.key(0)), padded_ids(12)
    weights = {"history": np.random.default_rng(1).normal(size=(12, 7)).astype(np.float32)}
    weights["bag"] = None

    def model(found, times):
        history = found["history"]
        replicas, capacity = history.values.shape[:2]
        times = Jagged.from_padded(times, history.lengths.reshape(-1), replicas, capacity)
        last = jax.vmap(lambda x, t: x.with_values(x.values * t.values[:, None]))(history, times)
        return {**found, "last": last.sums(), "first": history.to_padded(1)[0]}

    # Powers of two, so that a product has no rounding that XLA might fuse with that of the sum.
    times = (2.0 ** np.random.default_rng(2).integers(-2, 3, (12, 5))).astype(np.float32)
    tables, given = engine.tables(state), {"weights": weights, "inputs": (times,)}
    export_model(tmp_path / "m", model, tables, FEATURES, ids, batch=batch, **given)
    served = load_model(tmp_path / "m")
    for size in (12, 3, 1) if batch is None else (batch,):
        some = {name: array[:size] for name, array in ids.items()}
        scales = {"history": weights["history"][:size], "bag": None}
        found = served(some, times[:size], weights=scales)
        looked_up = engine.lookup(state, engine.place(some, scales))
        expected = jax.jit(model)(looked_up, times[:size])
        assert isinstance(found["history"], Jagged)
        lengths = found["history"].lengths
        np.testing.assert_array_equal(lengths, expected["history"].lengths)
        for name in ("last", "first", "bag"):
            np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
        both = [found["history"].to_padded(5)[0], expected["history"].to_padded(5)[0]]
        np.testing.assert_array_equal(*both)
        used = int(np.asarray(lengths).sum())
        np.testing.assert_array_equal(found["history"].values[0, used:], 0)


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

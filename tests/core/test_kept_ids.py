"""`keep="last"`: the same activations and updates from every form of ids, placed and traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import mesh

import tpu_embed
from tpu_embed import FeatureConfig, Jagged, RaggedIds, SparseIds, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.io import serving_lookup

B, H, L, V, D = 8, 7, 3, 20, 2


@pytest.mark.whole
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("jagged", [False, True])
def test_every_form_keeps_the_last_ids(devices, jagged):
    rng = np.random.default_rng(0)
    lengths = np.array([7, 0, 3, 5, 1, 4, 7, 2])
    dense = np.where(np.arange(H) < lengths[:, None], rng.integers(0, V, (B, H)), -1)
    weights = rng.uniform(0.5, 2, (B, H)).astype(np.float32)
    flat, scales = dense[dense >= 0], weights[dense >= 0]
    splits = np.concatenate([[0], np.cumsum(lengths)])
    forms = {
        "dense": (dense, weights),
        "sparse": (SparseIds(np.argwhere(dense >= 0), flat, (B, H), scales), None),
        "ragged": (RaggedIds(flat, splits, scales), None),
    }
    table = TableConfig(V, D, name="t")
    feature = FeatureConfig(table, L, jagged=jagged, keep="last")
    engine = tpu_embed.EmbeddingEngine(feature, o.Adagrad(0.5), mesh=mesh(devices))
    state = engine.init(jax.random.key(0))
    values = np.asarray(engine.tables(state)["t"])
    expected = np.zeros((B, L, D), np.float32)
    for e, row in enumerate(dense):
        kept = [(n, w) for n, w in zip(row, weights[e], strict=True) if n >= 0][-L:]
        for position, (number, weight) in enumerate(kept):
            expected[e, position] = values[number] * weight
    given = rng.normal(size=(B, L, D)).astype(np.float32)

    def padded(found):
        return found.to_padded(L)[0] if jagged else found

    def step(state, *ids):
        found = engine.lookup(state, *ids)
        gradients = given
        if jagged:
            width = found.values.shape[1]
            gradients = Jagged.from_padded(given, np.minimum(lengths, L), devices, width)
        return padded(found), engine.tables(engine.update(state, ids[0], gradients, *ids[1:]))

    results = {name: step(state, engine.place(*pair)) for name, pair in forms.items()}
    results["traced"] = jax.jit(step)(state, jnp.asarray(dense), jnp.asarray(weights))
    for name, (found, tables) in results.items():
        np.testing.assert_array_equal(found, expected, name)
        np.testing.assert_array_equal(tables["t"], results["dense"][1]["t"], name)
    # Rows of which no id is among the last L are not touched.
    touched = np.unique([n for row in dense for n in row[row >= 0][-L:]])
    changed = np.flatnonzero((np.asarray(results["dense"][1]["t"]) != values).any(axis=1))
    assert changed.tolist() == touched.tolist()
    served = serving_lookup({"t": values}, dense, feature, weights)
    np.testing.assert_allclose(padded(served), expected, rtol=1e-6)

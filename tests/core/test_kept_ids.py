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
    """As if the batch had no others."""
    rng, lengths = np.random.default_rng(0), np.array([7, 0, 3, 5, 1, 4, 7, 2])
    filled = np.arange(H) < lengths[:, None]
    dense = np.where(filled, rng.integers(0, V, (B, H)), -1)
    weights = rng.uniform(0.5, 2, (B, H)).astype(np.float32)
    flat, scales, splits = dense[filled], weights[filled], np.append(0, np.cumsum(lengths))
    sparse = SparseIds(np.argwhere(filled), flat, (B, H), scales)
    forms = [(dense, weights), (sparse, None), (RaggedIds(flat, splits, scales), None)]
    # Columns from the first that is kept on; there are L of padding behind the last.
    columns = np.maximum(lengths - L, 0)[:, None] + np.arange(L)
    wide = [np.pad(x, ((0, 0), (0, L)), constant_values=-1) for x in (dense, weights)]
    last = [np.take_along_axis(x, columns, axis=1) for x in wide]
    given = rng.normal(size=(B, L, D)).astype(np.float32)
    table = TableConfig(V, D, name="t")
    feature, plain = (FeatureConfig(table, L, jagged=jagged, keep=k) for k in ("last", "first"))
    engine, other = (
        tpu_embed.EmbeddingEngine(f, o.Adagrad(0.5), mesh=mesh(devices)) for f in (feature, plain)
    )
    state = engine.init(jax.random.key(0))

    def padded(found):
        return found.to_padded(L)[0] if jagged else found

    def step(made, state, *ids):
        found, gradients = made.lookup(state, *ids), given
        if jagged:
            width = found.values.shape[1]
            gradients = Jagged.from_padded(given, np.minimum(lengths, L), devices, width)
        return padded(found), made.tables(made.update(state, ids[0], gradients, *ids[1:]))

    expected = step(other, state, other.place(*last))
    found = [step(engine, state, engine.place(*pair)) for pair in forms]
    in_jit = jax.jit(lambda *given: step(engine, *given))
    for one in (*found, in_jit(state, jnp.asarray(dense), jnp.asarray(weights))):
        jax.tree.map(np.testing.assert_array_equal, one, expected)
    served = serving_lookup(engine.tables(state), dense, feature, weights)
    np.testing.assert_allclose(padded(served), expected[0], rtol=1e-6)

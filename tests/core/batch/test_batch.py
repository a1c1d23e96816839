"""What a batch has of ids and weights does not depend on where and how these lie in memory."""

import jax
import numpy as np
import oracle
import pytest
from facade_cases import mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, RaggedIds, SparseIds, TableConfig

B, H = 8, 3


def make_engine(dtype="float32"):
    table = TableConfig(23, 4, name="item", dtype=dtype, combiner="sum")
    features = {"bag": FeatureConfig(table), "clicks": FeatureConfig(table)}
    return EmbeddingEngine(features, mesh=mesh(2))


def in_a_record(array):
    record = np.zeros(array.shape, [("odd", "i1"), ("one", array.dtype)])
    record["one"] = array
    return record["one"]


LAID = {
    "strided": lambda array: np.stack([array, array], axis=1)[:, 0],
    "reversed": lambda array: array[::-1].copy()[::-1],
    "broadcast": lambda array: np.broadcast_to(array[0], array.shape),
    "in a record": in_a_record,
    "big-endian": lambda array: array.astype(array.dtype.newbyteorder(">")),
}


@pytest.mark.parametrize("laid", LAID.values(), ids=LAID)
def test_ids_and_weights_may_lie_anywhere_in_memory(laid):
    """The compiled loops read contiguous arrays, which a column of a matrix is not."""
    engine, rng = make_engine(), np.random.default_rng(0)
    indices = np.argwhere(rng.random((B, H)) < 0.5)
    splits = np.searchsorted(indices[:, 0], np.arange(B + 1))
    values = laid(rng.integers(0, 23, len(indices)).astype(np.int32))
    weights = laid(np.arange(1, 1 + values.size, dtype=np.float32))
    bags = {"bag": rng.integers(-1, 23, (B, H))}
    plain = RaggedIds(values.astype(np.int32), splits, weights.astype(np.float32))
    expected = engine.place(bags | {"clicks": plain})
    for one in (RaggedIds(values, splits, weights), SparseIds(indices, values, (B, H), weights)):
        placed = engine.place(bags | {"clicks": one})
        assert placed.spec == expected.spec
        np.testing.assert_array_equal(placed.packed, expected.packed)


def test_weights_of_float64_tables_keep_their_digits():
    with jax.enable_x64(True):
        engine, rng = make_engine("float64"), np.random.default_rng(1)
        state = engine.init(jax.random.key(0))
        ids = {name: rng.integers(-1, 23, (B, H)) for name in ("bag", "clicks")}
        weights = {"bag": rng.normal(size=(B, H)), "clicks": None}
        found = engine.lookup(state, engine.place(ids, weights))
        rows = np.asarray(engine.tables(state)["item"])
        for feature, (name, activations) in zip(engine.layout.features, found.items(), strict=True):
            expected = oracle.lookup(rows, feature.config, ids[name], weights[name])
            np.testing.assert_allclose(activations, expected, rtol=1e-12, atol=1e-12)

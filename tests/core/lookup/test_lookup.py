"""Activations of every kind of input, compared with float64 loops, on 1 and 8 devices."""

from __future__ import annotations

import functools
import itertools

import jax
import numpy as np
import oracle
import pytest
from bag_cases import draw_bags, draw_weights
from facade_cases import mesh

import tpu_embed
from tpu_embed import EmbeddingEngine, FeatureConfig, RaggedIds, SparseIds, TableConfig, optimizers
from tpu_embed.kernels import dispatch, reference

BATCH, ROWS, DIM = 8, 13, 5
RNG = np.random.default_rng(7)


def dense(*shape, low=-1, high=ROWS, dtype=np.int32):
    return RNG.integers(low, high, (BATCH, *shape)).astype(dtype)


def ragged(count=BATCH):
    return RaggedIds.from_lists(draw_bags(RNG, count, ROWS))


def weights(*shape):
    return RNG.normal(size=shape).astype(np.float32)


RAGGED = RaggedIds.from_lists([[ROWS, 1, -1, 2], [ROWS, 3], [], [4]] * (BATCH // 4))
BAGS, SHAPE = draw_bags(RNG, BATCH, ROWS), (BATCH, 2, 3)
SPARSE = SparseIds(np.argwhere(np.ones(SHAPE)), np.arange(BATCH * 6) % ROWS, SHAPE)

INPUTS = {
    "one id": (dense(), None, {}),
    "dense": (dense(4), None, {}),
    "dense weighted": (dense(4), weights(BATCH, 4), {}),
    "many bags": (dense(2, 3, 2), None, {}),
    "sequence, longer": (dense(5), None, {"max_sequence_length": 3}),
    "sequence, shorter": (dense(2), None, {"max_sequence_length": 3}),
    "sparse": (SparseIds.from_lists(BAGS, weights=draw_weights(RNG, BAGS)), None, {}),
    "ragged": (RaggedIds.from_lists(BAGS, weights=draw_weights(RNG, BAGS)), None, {}),
    "ragged sequence": (ragged(), None, {"max_sequence_length": 2}),
    "ragged, 3 rows": (ragged(BATCH * 3), None, {"output_shape": (BATCH, 3)}),
    "ragged, first 2": (ragged(), None, {"output_shape": (BATCH, 2)}),
    "small integers": (dense(4, dtype=np.int8), None, {}),
    "unsigned": (dense(4, low=0, dtype=np.uint16), None, {}),
    "many sparse bags": (SPARSE, weights(BATCH * 6), {}),
    "ragged, dropped": (RAGGED, None, {"on_bad_id": "drop"}),
    "sequence, dropped": (RAGGED, None, {"on_bad_id": "drop", "max_sequence_length": 2}),
    "sequence, clipped": (RAGGED, None, {"on_bad_id": "clip", "max_sequence_length": 4}),
    "dropped": (dense(4, low=-3, high=ROWS + 3), None, {"on_bad_id": "drop"}),
    "clipped": (dense(4, low=-3, high=ROWS + 3), None, {"on_bad_id": "clip"}),
    "no ids": (RaggedIds.from_lists([[]] * BATCH), None, {}),
    "no columns": (np.zeros((BATCH, 0), np.int32), None, {}),
    "no bags": (np.zeros((BATCH, 0, 3), np.int32), None, {}),
}


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.quick(1)
def test_every_form_equals_the_oracle(devices):
    """For each combiner, plain and quantized."""
    features, grids = {}, {"": None, " quantized": tpu_embed.QuantizationConfig(9, -0.5, 0.5)}
    for combiner, (kind, grid) in itertools.product(("sum", "mean", "sqrtn"), grids.items()):
        options = {"combiner": combiner, "quantization_config": grid}
        table = TableConfig(ROWS, DIM, name=combiner + kind, **options)
        for name, (_, _, options) in INPUTS.items():
            features[f"{table.name}: {name}"] = FeatureConfig(table, **options)
    engine = EmbeddingEngine(features, mesh=mesh(devices))
    state = engine.init(jax.random.key(3))
    ids, weights = ({path: INPUTS[path.split(": ")[1]][i] for path in features} for i in (0, 1))
    activations = engine.lookup(state, engine.place(ids, weights))
    stored = jax.device_get(engine.tables(state))
    for path, feature in features.items():
        expected = oracle.lookup(stored[feature.table.name], feature, ids[path], weights[path])
        assert activations[path].dtype == np.float32
        # A handful of float32 sums and one division; negative weights make small denominators.
        np.testing.assert_allclose(activations[path], expected, rtol=2e-5, atol=2e-6, err_msg=path)


@pytest.mark.parametrize("name", ["no ids", "no columns", "no bags"])
@pytest.mark.quick(1)
def test_a_batch_without_a_single_id_goes_the_whole_way(name):
    engine = EmbeddingEngine(FeatureConfig(TableConfig(ROWS, DIM, name="t")), optimizers.Adam(0.1))
    state = engine.init(jax.random.key(0))
    batch = engine.place(INPUTS[name][0])
    activations = engine.lookup(state, batch)
    assert not np.any(activations)
    after = engine.update(state, batch, activations)
    np.testing.assert_array_equal(engine.tables(after)["t"], engine.tables(state)["t"])
    assert int(after.step) == 1


@pytest.mark.parametrize("scan", [False, True])
def test_bags_with_absent_ids_and_weights_of_zero(scan, monkeypatch):
    """A weight of zero adds nothing even of a row that is not finite; GPUs sum runs by a scan."""
    if scan:
        summed = reference.segment_sum_scan
        gather_sum = functools.partial(reference.gather_sum, segment_sum=summed)
        monkeypatch.setattr(dispatch, "segment_sum", summed)
        monkeypatch.setattr(dispatch, "gather_sum", gather_sum)
    ids = np.tile(np.array([[2, -1, 3, -1, 1], [0, 0, -1, 4, -1], [-1] * 5], np.int32), (8, 1))
    weights = np.where((ids == 0) | (ids == 4), np.float32(0), np.float32(0.5))
    feature = FeatureConfig(TableConfig(5, 2, combiner="sum", name="t"))
    engine = EmbeddingEngine(feature, optimizers.SGD(1.0))
    rows = np.arange(10, dtype=np.float32).reshape(5, 2)
    rows[0], rows[4] = np.inf, np.nan
    state = engine.load_arrays(engine.init(jax.random.key(0)), {"t": rows})
    expected = np.tile([0.5 * rows[1:4].sum(0), [0, 0], [0, 0]], (8, 1))
    for found in (
        engine.lookup(state, engine.place(ids, weights)),
        jax.jit(engine.lookup)(state, ids, weights),
    ):
        np.testing.assert_array_equal(found, expected)
    state = engine.update(state, engine.place(ids, weights), np.ones((24, 2), np.float32))
    rows[1:4] -= 4  # half of eight examples
    np.testing.assert_array_equal(engine.tables(state)["t"], rows)

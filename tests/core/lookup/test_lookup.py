"""Activations of every kind of input, compared with float64 loops, on 1 and 8 devices."""

from __future__ import annotations

import jax
import numpy as np
import oracle
import pytest
from bag_cases import draw_bags, draw_weights
from jax.sharding import Mesh

from tpu_embed import (
    EmbeddingEngine,
    FeatureConfig,
    QuantizationConfig,
    RaggedIds,
    SparseIds,
    TableConfig,
    optimizers,
)

BATCH, ROWS, DIM = 8, 13, 5
RNG = np.random.default_rng(7)


def bags(count):
    return draw_bags(RNG, count, ROWS)


def weights_of(lists):
    return draw_weights(RNG, lists)


SEVEN, MANY, PAIRS = bags(BATCH), bags(BATCH), bags(BATCH * 3)

INPUTS = {
    "one id": (RNG.integers(-1, ROWS, BATCH), None, {}),
    "dense": (RNG.integers(-1, ROWS, (BATCH, 4)), None, {}),
    "dense weighted": (
        RNG.integers(-1, ROWS, (BATCH, 4)),
        RNG.normal(size=(BATCH, 4)).astype(np.float32),
        {},
    ),
    "many bags": (RNG.integers(-1, ROWS, (BATCH, 2, 3, 2)), None, {}),
    "sequence, longer": (RNG.integers(-1, ROWS, (BATCH, 5)), None, {"max_sequence_length": 3}),
    "sequence, shorter": (RNG.integers(-1, ROWS, (BATCH, 2)), None, {"max_sequence_length": 3}),
    "sparse": (SparseIds.from_lists(SEVEN, weights=weights_of(SEVEN)), None, {}),
    "ragged": (RaggedIds.from_lists(MANY, weights=weights_of(MANY)), None, {}),
    "ragged sequence": (RaggedIds.from_lists(bags(BATCH)), None, {"max_sequence_length": 2}),
    "ragged, 3 rows": (RaggedIds.from_lists(PAIRS), None, {"output_shape": (BATCH, 3)}),
    "ragged, first 2": (RaggedIds.from_lists(bags(BATCH)), None, {"output_shape": (BATCH, 2)}),
    "dropped": (RNG.integers(-3, ROWS + 3, (BATCH, 4)), None, {"on_bad_id": "drop"}),
    "clipped": (RNG.integers(-3, ROWS + 3, (BATCH, 4)), None, {"on_bad_id": "clip"}),
    "no ids": (RaggedIds.from_lists([[]] * BATCH), None, {}),
    "no columns": (np.zeros((BATCH, 0), np.int32), None, {}),
    "no bags": (np.zeros((BATCH, 0, 3), np.int32), None, {}),
}


def declared_features():
    """Return every input form for each combiner, plain and quantized, by path."""
    features = {}
    for combiner in ("sum", "mean", "sqrtn"):
        for quantization in (None, QuantizationConfig(9, -0.5, 0.5)):
            kind = combiner if quantization is None else f"{combiner} quantized"
            table = TableConfig(
                ROWS, DIM, combiner=combiner, name=kind, quantization_config=quantization
            )
            for name, (_, _, options) in INPUTS.items():
                features[f"{kind}: {name}"] = FeatureConfig(table, **options)
    return features


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.whole), 8])
def test_every_form_equals_the_oracle(devices):
    features = declared_features()
    mesh = Mesh(np.asarray(jax.devices()[:devices]), ("d",))
    engine = EmbeddingEngine(features, mesh=mesh)
    state = engine.init(jax.random.key(3))
    given = {path: INPUTS[path.split(": ")[1]] for path in features}
    batch = engine.place(
        {path: ids for path, (ids, _, _) in given.items()},
        {path: weights for path, (_, weights, _) in given.items()},
    )
    activations = engine.lookup(state, batch)
    stored = {name: np.asarray(table) for name, table in engine.tables(state).items()}
    for path, (ids, weights, _) in given.items():
        expected = oracle.lookup(stored[path.split(":")[0]], features[path], ids, weights)
        assert activations[path].dtype == np.float32
        # A handful of float32 sums and one division; negative weights make small denominators.
        np.testing.assert_allclose(activations[path], expected, rtol=2e-5, atol=2e-6, err_msg=path)


@pytest.mark.parametrize("name", ["no ids", "no columns", "no bags"])
@pytest.mark.quick(1)
def test_a_batch_without_a_single_id_goes_the_whole_way(name):
    table = TableConfig(ROWS, DIM, name="t")
    engine = EmbeddingEngine(FeatureConfig(table), optimizers.Adam(0.1))
    state = engine.init(jax.random.key(0))
    batch = engine.place(INPUTS[name][0])
    activations = engine.lookup(state, batch)
    assert not np.any(activations)
    after = engine.update(state, batch, activations)
    np.testing.assert_array_equal(engine.tables(after)["t"], engine.tables(state)["t"])
    assert int(after.step) == 1

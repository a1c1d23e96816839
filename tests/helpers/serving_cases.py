"""Features with every kind of input over every kind of table, with ids, for tests of serving."""

import numpy as np
from bag_cases import draw_bags, draw_weights

from tpu_embed import FeatureConfig, QuantizationConfig, RaggedIds, SparseIds, TableConfig

BATCH, ROWS, DIM = 8, 13, 5
RNG = np.random.default_rng(11)


def bags(count):
    return draw_bags(RNG, count, ROWS)


def weights_of(lists):
    return draw_weights(RNG, lists)


SEVEN, MANY = bags(BATCH), bags(BATCH)

DENSE = {
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
    "sequence, weighted": (
        RNG.integers(-1, ROWS, (BATCH, 3)),
        RNG.normal(size=(BATCH, 3)).astype(np.float32),
        {"max_sequence_length": 3},
    ),
    "dropped": (RNG.integers(-3, ROWS + 3, (BATCH, 4)), None, {"on_bad_id": "drop"}),
    "clipped": (RNG.integers(-3, ROWS + 3, (BATCH, 4)), None, {"on_bad_id": "clip"}),
    "no columns": (np.zeros((BATCH, 0), np.int32), None, {}),
    "no bags": (np.zeros((BATCH, 0, 3), np.int32), None, {}),
}
"""Kind of input -> ids, weights, options of its `FeatureConfig`."""

HOST = {
    "sparse": (SparseIds.from_lists(SEVEN, weights=weights_of(SEVEN)), None, {}),
    "sparse, weights beside": (
        SparseIds.from_lists(SEVEN),
        SparseIds.from_lists(weights_of(SEVEN)),
        {},
    ),
    "sparse sequence": (SparseIds.from_lists(MANY), None, {"max_sequence_length": 2}),
    "ragged": (RaggedIds.from_lists(MANY, weights=weights_of(MANY)), None, {}),
    "ragged sequence": (RaggedIds.from_lists(bags(BATCH)), None, {"max_sequence_length": 2}),
    "ragged, 3 rows": (RaggedIds.from_lists(bags(BATCH * 3)), None, {"output_shape": (BATCH, 3)}),
    "ragged, first 2": (RaggedIds.from_lists(bags(BATCH)), None, {"output_shape": (BATCH, 2)}),
    "ragged, dropped": (RaggedIds.from_lists([[ROWS, 1], [-1]] * 4), None, {"on_bad_id": "drop"}),
    "no ids": (RaggedIds.from_lists([[]] * BATCH), None, {}),
}
"""The same for kinds of input that only the host accepts."""


def declared(forms):
    """Return features, ids and weights by path, for each combiner, plain and quantized."""
    features, ids, weights = {}, {}, {}
    for combiner in ("sum", "mean", "sqrtn"):
        for quantization in (None, QuantizationConfig(9, -0.5, 0.5)):
            kind = combiner if quantization is None else f"{combiner} quantized"
            options = {"combiner": combiner, "quantization_config": quantization}
            options["dtype"] = "bfloat16" if combiner == "mean" else "float32"
            table = TableConfig(ROWS, DIM, name=kind, **options)
            for name, (given, scales, rest) in forms.items():
                path = f"{kind}: {name}"
                features[path] = FeatureConfig(table, **rest)
                ids[path], weights[path] = given, scales
    return features, ids, weights


def as_numpy(tables):
    """Return tables as NumPy arrays that are not aligned in memory."""
    found = {}
    for name, table in tables.items():
        table = np.asarray(table)
        raw = np.empty(table.nbytes + 4, np.uint8)[4:]
        raw[:] = table.reshape(-1).view(np.uint8)
        found[name] = raw.view(table.dtype).reshape(table.shape)
    return found

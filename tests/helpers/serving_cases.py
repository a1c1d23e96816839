"""Features with every kind of input over every kind of table, with ids, for tests of serving."""

import itertools

import numpy as np
from bag_cases import draw_bags, draw_weights

from tpu_embed import FeatureConfig, QuantizationConfig, RaggedIds, SparseIds, TableConfig

BATCH, ROWS, DIM = 8, 13, 5
RNG = np.random.default_rng(11)


def bags(count):
    return draw_bags(RNG, count, ROWS)


def weights_of(lists):
    return draw_weights(RNG, lists)


def ids(*shape, beyond=0):
    return RNG.integers(-1 - beyond, ROWS + beyond, (BATCH, *shape))


def numbers(*shape):
    return RNG.normal(size=(BATCH, *shape)).astype(np.float32)


SEVEN, MANY = bags(BATCH), bags(BATCH)
SEQUENCE = {"max_sequence_length": 3}

DENSE = {
    "one id": (ids(), None, {}),
    "dense": (ids(4), None, {}),
    "dense weighted": (ids(4), numbers(4), {}),
    "many bags": (ids(2, 3, 2), None, {}),
    "sequence, longer": (ids(5), None, SEQUENCE),
    "sequence, shorter": (ids(2), None, SEQUENCE),
    "sequence, weighted": (ids(3), numbers(3), SEQUENCE),
    "dropped": (ids(4, beyond=3), None, {"on_bad_id": "drop"}),
    "clipped": (ids(4, beyond=3), None, {"on_bad_id": "clip"}),
    "no columns": (np.zeros((BATCH, 0), np.int32), None, {}),
    "no bags": (np.zeros((BATCH, 0, 3), np.int32), None, {}),
}
"""Kind of input -> ids, weights, options of its `FeatureConfig`."""

sparse, ragged = SparseIds.from_lists, RaggedIds.from_lists
HOST = {
    "sparse": (sparse(SEVEN, weights=weights_of(SEVEN)), None, {}),
    "sparse, weights beside": (sparse(SEVEN), sparse(weights_of(SEVEN)), {}),
    "sparse sequence": (sparse(MANY), None, {"max_sequence_length": 2}),
    "ragged": (ragged(MANY, weights=weights_of(MANY)), None, {}),
    "ragged sequence": (ragged(bags(BATCH)), None, {"max_sequence_length": 2}),
    "ragged, 3 rows": (ragged(bags(BATCH * 3)), None, {"output_shape": (BATCH, 3)}),
    "ragged, first 2": (ragged(bags(BATCH)), None, {"output_shape": (BATCH, 2)}),
    "ragged, dropped": (ragged([[ROWS, 1], [-1]] * 4), None, {"on_bad_id": "drop"}),
    "no ids": (ragged([[]] * BATCH), None, {}),
}
"""The same for kinds of input that only the host accepts."""


def declared(forms):
    """Return features, ids and weights by path, for each combiner, plain and quantized."""
    features, given, weights = {}, {}, {}
    grids = {"": None, " quantized": QuantizationConfig(9, -0.5, 0.5)}
    for combiner, (end, grid) in itertools.product(("sum", "mean", "sqrtn"), grids.items()):
        options = {"combiner": combiner, "quantization_config": grid, "name": combiner + end}
        options["dtype"] = "bfloat16" if combiner == "mean" else "float32"
        table = TableConfig(ROWS, DIM, **options)
        for name, (some, scales, rest) in forms.items():
            path = f"{table.name}: {name}"
            features[path] = FeatureConfig(table, **rest)
            given[path], weights[path] = some, scales
    return features, given, weights


def as_numpy(tables):
    """Return tables as NumPy arrays that are not aligned in memory."""
    arrays = {name: np.asarray(table) for name, table in tables.items()}
    raw = {name: np.frombuffer(b"four" + x.tobytes(), np.uint8)[4:] for name, x in arrays.items()}
    return {name: raw[name].view(x.dtype).reshape(x.shape) for name, x in arrays.items()}

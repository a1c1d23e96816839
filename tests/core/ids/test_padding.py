"""`pad_batch` adds empty bags to every kind of input, in any nesting."""

import collections

import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from tpu_embed.config import FeatureConfig, TableConfig
from tpu_embed.core.ids import RaggedIds, SparseIds, pad_batch

Pair = collections.namedtuple("Pair", ["left", "right"])

FEATURES = {
    "one": np.array([3, 1, 2], np.int32),
    "bag": [np.array([[1, 2], [3, -1], [0, 4]]), jnp.ones((3, 2, 1), jnp.int32)],
    "pair": Pair(
        SparseIds([[0, 0], [2, 1]], [1, 2], (3, 2), [0.5, 2.0]),
        (RaggedIds([1, 2, 3], [0, 2, 2, 3], [1.0, 2.0, 3.0]), None),
    ),
}


def test_every_form_gets_empty_bags():
    padded = pad_batch(FEATURES, 4)
    assert list(padded) == ["one", "bag", "pair"]
    assert padded["one"].tolist() == [3, 1, 2, -1]
    assert padded["one"].dtype == np.int32
    assert padded["bag"][0].tolist() == [[1, 2], [3, -1], [0, 4], [-1, -1]]
    assert padded["bag"][1].shape == (4, 2, 1)
    assert (padded["bag"][1][3] == -1).all()
    sparse, (ragged, nothing) = padded["pair"]
    assert type(padded["pair"]) is Pair
    assert nothing is None
    assert sparse.dense_shape == (4, 2)
    assert sparse.weights.tolist() == [0.5, 2.0]
    assert ragged.row_splits.tolist() == [0, 2, 2, 3, 3]
    assert ragged.weights.tolist() == [1.0, 2.0, 3.0]


def test_added_examples_have_zero_activations():
    table = np.arange(20.0).reshape(5, 4)
    feature = FeatureConfig(TableConfig(5, 4))
    for before, after in [
        (FEATURES["one"], pad_batch(FEATURES, 4)["one"]),
        (FEATURES["pair"].left, pad_batch(FEATURES, 4)["pair"].left),
        (FEATURES["pair"].right[0], pad_batch(FEATURES, 4)["pair"].right[0]),
    ]:
        old, new = oracle.lookup(table, feature, before), oracle.lookup(table, feature, after)
        np.testing.assert_array_equal(new, np.concatenate([old, np.zeros((1, 4))]))


def test_a_batch_that_divides_is_returned_as_it_is():
    assert pad_batch(FEATURES, 3) is FEATURES
    assert pad_batch(FEATURES, 1) is FEATURES
    assert pad_batch({"x": None}, 4) == {"x": None}


def test_inputs_are_not_written_to():
    ids = np.array([1, 2, 3])
    pad_batch(ids, 8)
    assert ids.tolist() == [1, 2, 3]


def test_floats_get_zeros_and_unsigned_ids_a_sign():
    assert pad_batch({"w": np.ones((1, 2), np.float32)}, 2)["w"].tolist() == [[1, 1], [0, 0]]
    assert pad_batch(np.array([200], np.uint8), 2).tolist() == [200, -1]
    largest = pad_batch(np.array([2**64 - 1], np.uint64), 2)
    assert largest.tolist() == [2**63 - 1, -1]


def test_many_ragged_rows_an_example():
    features = [np.array([1, 2, 3]), RaggedIds([1, 2], [0, 0, 1, 1, 1, 2, 2])]
    ids, ragged = pad_batch(features, 2)
    assert ids.tolist() == [1, 2, 3, -1]
    assert ragged.row_splits.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("features", "multiple", "says"),
    [
        ({"x": np.zeros(3, int)}, 0, "pad_batch: multiple: expected an integer >= 1, got 0"),
        (
            {"x": np.zeros(3, int), "y": [np.zeros(4, int)]},
            2,
            "pad_batch: y/0: expected the batch size of x, 3, got 4",
        ),
        (
            [SparseIds([], [], (2, 2)), RaggedIds([], [0, 0, 0, 0])],
            2,
            "pad_batch: 1: expected the batch size of 0, 2, got 3",
        ),
        ({"x": 3}, 2, r"pad_batch: x: expected an array \[B, …\], SparseIds.*got 3"),
        (np.int32(3), 2, r"pad_batch: feature: expected an array"),
        ({"x": "abc"}, 2, r"pad_batch: x: expected an array .*got 'abc'"),
    ],
)
def test_refusals(features, multiple, says):
    with pytest.raises(ValueError, match=says):
        pad_batch(features, multiple)

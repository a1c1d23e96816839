"""`pad_batch` adds empty bags to every kind of input, in any nesting."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from facade_cases import mesh

import tpu_embed
from tpu_embed import FeatureConfig, RaggedIds, SparseIds, TableConfig, pad_batch

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
    assert (padded["one"].tolist(), padded["one"].dtype) == ([3, 1, 2, -1], np.int32)
    assert FEATURES["one"].size == 3
    assert padded["bag"][0].tolist() == [[1, 2], [3, -1], [0, 4], [-1, -1]]
    assert padded["bag"][1].tolist() == [[[1], [1]]] * 3 + [[[-1], [-1]]]
    sparse, (ragged, nothing) = padded["pair"]
    assert (type(padded["pair"]), nothing) == (Pair, None)
    assert (sparse.dense_shape, sparse.weights.tolist()) == ((4, 2), [0.5, 2.0])
    assert (ragged.row_splits.tolist(), ragged.weights.tolist()) == ([0, 2, 2, 3, 3], [1, 2, 3])


def test_a_batch_that_divides_is_returned_as_it_is():
    assert pad_batch(FEATURES, 3) is FEATURES
    assert pad_batch({"x": None}, 4) == {"x": None}


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.uint64])
def test_unsigned_ids_stay_unsigned_in_a_masked_array(dtype, refused):
    largest = int(np.iinfo(dtype).max)
    padded = pad_batch(np.array([[7, largest]], dtype), 2)
    assert (padded.dtype, padded.tolist()) == (dtype, [[7, largest], [None, None]])
    assert pad_batch(padded, 4)[1:].mask.all()
    refused("masked arrays are not supported", jnp.asarray, padded)


UNSIGNED = [np.array([4, 0, 2], np.uint64), np.array([[4, 4], [0, 1], [2, 3]], np.uint8)]


@pytest.mark.parametrize(
    "ids", [FEATURES["one"], FEATURES["pair"].left, FEATURES["pair"].right[0], *UNSIGNED]
)
def test_added_examples_have_zero_activations(ids, refused):
    engine = tpu_embed.EmbeddingEngine(FeatureConfig(TableConfig(5, 4, name="items")), mesh=mesh(1))
    state = engine.init(jax.random.key(0))
    old, new = (engine.lookup(state, engine.place(given)) for given in (ids, pad_batch(ids, 4)))
    np.testing.assert_array_equal(new, np.concatenate([old, np.zeros((1, 4))]))
    largest = pad_batch(np.array([2**64 - 1], np.uint64), 2)
    refused(r"got id 18446744073709551615 at example 0;", engine.place, largest)


def test_columns_of_a_data_set():
    columns = {
        "int": (pd.Series([3, None, 2], dtype="Int64"), [3, -1, 2, -1]),
        "unsigned": (pd.Series([3, None, 2], dtype="UInt8"), [3, None, 2, None]),
        "arrow": (pa.array([3, None, 2]), [3, -1, 2, -1]),
        "bags": (pa.array([[1, 2], None, [3]]), [0, 2, 2, 3, 3]),
        "list": ([3, 1, 2], [3, 1, 2, -1]),
        "lists": ([[], [1, 2], [3]], [0, 0, 2, 3, 3]),
        "floats": ([0.5, 1.0, 2.0], [0.5, 1.0, 2.0, 0.0]),
        "names": (pd.Series(["a", None, "b"]), ["a", None, "b", None]),
    }
    padded = pad_batch({name: column for name, (column, _) in columns.items()}, 4)
    for name, (_, expected) in columns.items():
        assert getattr(padded[name], "row_splits", padded[name]).tolist() == expected
    assert padded["unsigned"].dtype == np.uint8
    assert tpu_embed.hash_ids(padded["names"], 1000).tolist()[1::2] == [-1, -1]
    nest = {"nest": [np.array([3, 1, 2]), [0.5, 1.0, 2.0]], "none": [None, None]}
    padded = pad_batch(nest, 4)
    assert [leaf.tolist() for leaf in padded["nest"]] == [[3, 1, 2, -1], [0.5, 1.0, 2.0, 0.0]]
    assert padded["none"] == [None, None]


def test_a_column_becomes_an_array_whether_or_not_rows_are_added():
    for size in (3, 4):
        column = pd.Series([7, None, 2, 5][:size], dtype="Int64")
        labels = pa.array([0.5, 1.0, 2.0, 3.0][:size])
        padded = pad_batch((column, labels, [[7]] * size, np.ones(size)), 4)
        assert [type(leaf) for leaf in padded] == [np.ndarray, np.ndarray, RaggedIds, np.ndarray]
        assert padded[0].tolist() == [7, -1, 2, 5 if size == 4 else -1]
    assert pad_batch([[], None], 4) == [[], None]
    assert pad_batch({"x": pa.array([], pa.list_(pa.int64()))}, 4)["x"].row_splits.tolist() == [0]


def test_strings_get_none_and_floats_zeros():
    assert pad_batch(np.array(["a"]), 2).tolist() == ["a", None]
    assert pad_batch({"w": np.ones((1, 2), np.float32)}, 2)["w"].tolist() == [[1, 1], [0, 0]]
    masked = np.ma.masked_array([0.5, 1.0, 2.0], [False, True, False])
    assert pad_batch(masked, 2).tolist() == [0.5, None, 2.0, 0.0]


def test_each_leaf_is_padded_from_its_own_size():
    features = {
        "item": [np.arange(6), SparseIds([[2, 0]], [1], (3, 2))],
        "tags": RaggedIds([1, 2], [0, 1, 1, 1, 2, 2]),
        "none": (np.zeros(0, np.int32), SparseIds([], [], (0, 2)), RaggedIds([], [0])),
        "full": jnp.ones((4, 2), jnp.int32),
    }
    padded = pad_batch(features, 4)
    assert padded["item"][0].tolist() == [0, 1, 2, 3, 4, 5, -1, -1]
    assert padded["item"][1].dense_shape == (4, 2)
    assert padded["tags"].row_splits.tolist() == [0, 1, 1, 1, 2, 2, 2, 2, 2]
    empty, sparse, ragged = padded["none"]
    assert (len(empty), sparse.dense_shape, ragged.row_splits.tolist()) == (0, (0, 2), [0])
    assert padded["full"].shape == (4, 2)


RAGGED_ROWS = [
    ((3,), 6, 8),
    ((3,), 12, 16),  # 4 rows for each of 3 examples, which become 4
    ((3, 4), 12, 12),  # 3 rows for each of 4 examples
    ((3, 4), 15, 20),  # 5 rows for each of 3
    ((3, 12), 12, 12),
    ((3, 4), 5, 8),  # no size divides the rows: each is an example
    ((3, 0), 3, 4),
    ((0,), 5, 8),
    ((1,), 5, 20),
    ((), 5, 8),
]


@pytest.mark.parametrize(("arrays", "ragged", "after"), RAGGED_ROWS)
def test_ragged_rows_belong_to_the_largest_size_that_divides_them(arrays, ragged, after):
    leaves = [np.zeros(size, np.int32) for size in arrays]
    *_, padded = pad_batch([*leaves, RaggedIds([7], [0] + [1] * ragged)], 4)
    assert padded.row_splits.tolist() == [0] + [1] * after


@pytest.mark.parametrize("rows", [[3, 6, 9], [6, 3, 9], [3, 6, 0, 9]])
def test_ragged_rows_alone_belong_to_the_fewest(rows):
    padded = pad_batch([RaggedIds([], [0] * (n + 1)) for n in rows], 4)
    assert [len(leaf.row_splits) - 1 for leaf in padded] == [n * 4 // 3 for n in rows]


def test_refusals(refused):
    says = "pad_batch: multiple: expected an integer >= 1, got 0"
    refused(says, pad_batch, {"x": np.zeros(3, int)}, 0)
    for wrong in (3, "abc"):
        refused(r"pad_batch: x: expected an array \[B, …\]", pad_batch, {"x": wrong}, 2)

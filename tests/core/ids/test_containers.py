"""Containers of ids: construction from lists, scipy, BCOO and Arrow."""

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import sparse as jsparse

from tpu_embed import RaggedIds, SparseIds

BAGS = [[7, 3], [], [5, 0, 9], []]
WEIGHTS = [[0.5, 1.0], [], [2.0, 0.0, -1.0], []]
VALUES = [7, 3, 5, 0, 9]
SPLITS = [0, 2, 2, 5, 5]
INDICES = [[0, 0], [0, 1], [2, 0], [2, 1], [2, 2]]
NUMBERS = [0.5, 1.0, 2.0, 0.0, -1.0]


def _check(ids, weights=None, shape=(4, 3), values=VALUES):
    assert ids.values.tolist() == values
    assert (None if ids.weights is None else ids.weights.tolist()) == weights
    if isinstance(ids, RaggedIds):
        assert ids.row_splits.tolist() == SPLITS
    else:
        assert (ids.indices.tolist(), ids.dense_shape) == (INDICES, shape)


def test_lists():
    _check(RaggedIds.from_lists(BAGS))
    _check(RaggedIds.from_lists(BAGS, weights=WEIGHTS), NUMBERS)
    _check(RaggedIds.from_lists([np.array(bag, int) for bag in BAGS]))
    _check(SparseIds.from_lists(BAGS))
    _check(SparseIds.from_lists(BAGS, width=9, weights=WEIGHTS), NUMBERS, (4, 9))


def test_empty_lists_are_integers():
    assert RaggedIds.from_lists([[], []]).values.dtype == np.int64
    assert RaggedIds.from_lists([]).row_splits.tolist() == [0]
    empty = SparseIds.from_lists([[], []])
    assert (empty.indices.shape, empty.dense_shape) == ((0, 2), (2, 1))
    assert SparseIds([], [], jnp.array([2, 3, 4])).indices.shape == (0, 3)


def test_scipy_entries_are_sorted_and_zeros_kept():
    order = [4, 1, 0, 3, 2]
    places = tuple(np.array(INDICES)[order].T)
    values, numbers = np.array(VALUES)[order], np.array(NUMBERS)[order]
    matrix = scipy.sparse.coo_matrix((values, places), shape=(4, 3))
    weights = scipy.sparse.coo_matrix((numbers, places), shape=(4, 3))
    _check(SparseIds.from_scipy(matrix, weights=weights), NUMBERS)
    for form in ("coo", "csr", "csc"):
        _check(SparseIds.from_scipy(matrix.asformat(form)))


def test_scipy_weights_elsewhere_are_refused(refused):
    ids = scipy.sparse.coo_array(([1, 2], ([0, 1], [0, 0])), shape=(2, 2))
    weights = scipy.sparse.coo_array(([1.0, 2.0], ([0, 1], [0, 1])), shape=(2, 2))
    says = "from_scipy: weights: expected entries where the ids are"
    refused(says, SparseIds.from_scipy, ids, weights=weights)


def test_multi_hot():
    columns = [3, 7, 0, 5, 9]
    entries = NUMBERS, (np.array(INDICES)[:, 0], columns)
    matrix = scipy.sparse.csr_array(entries, shape=(4, 10))
    _check(RaggedIds.from_multi_hot(matrix), NUMBERS, values=columns)


def test_bcoo_is_sorted_and_its_padding_left_out():
    order = [4, 1, 0, 3, 2, 5, 6]
    indices = jnp.array([*INDICES, [4, 3], [4, 3]])[jnp.array(order)]
    values = jnp.array([*VALUES, 0, 0])[jnp.array(order)]
    _check(SparseIds.from_bcoo(jsparse.BCOO((values, indices), shape=(4, 3))))
    higher = jsparse.BCOO((jnp.array([5]), jnp.array([[1, 0, 2]])), shape=(2, 1, 3))
    assert SparseIds.from_bcoo(higher).dense_shape == (2, 1, 3)


def test_bcoo_with_batch_dims_is_refused(refused):
    ids = jsparse.BCOO.fromdense(jnp.ones((2, 3), jnp.int32), n_batch=1)
    refused("without batch and dense dims, got 1 and 0", SparseIds.from_bcoo, ids)


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.large_list(pa.int32())])
def test_arrow(kind):
    _check(RaggedIds.from_arrow(pa.array(BAGS, kind)))
    numbers = pa.array(WEIGHTS, pa.list_(pa.float32()))
    _check(RaggedIds.from_arrow(pa.array(BAGS, kind), weights=numbers), NUMBERS)


def test_arrow_slices_nulls_and_chunks():
    array = pa.array([[1], [7, 3], None, [5, 0, 9], [], [8]])
    _check(RaggedIds.from_arrow(array[1:5]))
    _check(RaggedIds.from_arrow(pa.chunked_array([array[1:3], array[3:5]])))
    # A null list may cover values; they are no ids.
    ends, values = pa.array([0, 2, 4, 7, 7], pa.int32()), pa.array([7, 3, 1, 1, 5, 0, 9])
    mask = pa.array([False, True, False, False])
    _check(RaggedIds.from_arrow(pa.ListArray.from_arrays(ends, values, mask=mask)))


def test_arrow_fixed_size_lists():
    array = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2))
    ids = RaggedIds.from_arrow(array)
    assert ids.values.tolist() == [1, 2, 3, 4]
    assert ids.row_splits.tolist() == [0, 2, 2, 4]
    assert RaggedIds.from_arrow(array[2:]).values.tolist() == [3, 4]


def test_what_is_missing_inside_lists_is_masked():
    for ids in (
        RaggedIds.from_arrow(pa.array([[1, None], [2]])),
        RaggedIds.from_lists([[1, None], [2]]),
        RaggedIds([1, None, 2], [0, 2, 3]),
        RaggedIds(pd.Series([1, None, 2], dtype="Int64"), pa.array([0, 2, 3])),
        SparseIds.from_lists([[1, None], [2]]),
    ):
        assert ids.values.dtype == np.int64
        assert ids.values.tolist() == [1, None, 2]


SHORT = [[0.5, 1.0], [], [2.0], []]
REFUSED = [
    (lambda: RaggedIds.from_lists(BAGS, weights=SHORT), "from_lists: .* 3 .* for bag 2, got 1"),
    (lambda: RaggedIds.from_lists(BAGS, weights=SHORT[:2]), "from_lists: .* 4 lists, got 2"),
    (lambda: RaggedIds.from_arrow(pa.array(BAGS), weights=pa.array(SHORT)), "for bag 2, got 1"),
    (lambda: RaggedIds.from_arrow(pa.array(BAGS), weights=pa.array([[1]])), "4 lists, got 1"),
    (lambda: RaggedIds.from_arrow(pa.array([1, 2])), "a pyarrow array of lists, got int64"),
    (lambda: RaggedIds.from_arrow([[1]]), "got list"),
    (lambda: SparseIds([], [], (2, -1)), r"SparseIds.dense_shape\[1\]: expected an integer >= 0"),
    (lambda: SparseIds([[0, 0]], [1], 8), r"SparseIds.dense_shape: expected \(B, H\), or "),
    (lambda: SparseIds([[0, 0]], [1], "ab"), r"SparseIds.dense_shape: expected \(B, H\), or "),
    (lambda: RaggedIds([[1, 2], [3]], [0, 1, 2]), r"RaggedIds.values: .* lists of different len"),
    (lambda: RaggedIds.from_lists([1, 2]), "RaggedIds.from_lists: expected a list of lists, got 1"),
    (lambda: RaggedIds.from_lists([n] for n in range(2)), "a list of lists, got <generator"),
    (lambda: RaggedIds.from_lists([[1]], weights=[None]), "weights: .* a list of lists, got None"),
]


@pytest.mark.parametrize(("call", "says"), REFUSED)
def test_what_is_no_container(call, says, refused):
    refused(says, call, error=(TypeError, ValueError))


@given(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=6))
def test_lists_and_arrow_agree_for_any_bags(bags):
    ragged = RaggedIds.from_lists(bags)
    arrow = RaggedIds.from_arrow(pa.array(bags, pa.list_(pa.int64())))
    assert arrow.values.tolist() == ragged.values.tolist() == [i for bag in bags for i in bag]
    assert arrow.row_splits.tolist() == ragged.row_splits.tolist()
    places = [[r, c] for r, bag in enumerate(bags) for c in range(len(bag))]
    assert SparseIds.from_lists(bags).indices.tolist() == places

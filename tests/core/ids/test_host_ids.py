"""Every kind of input becomes the bags that the oracle reads; other input is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

from tpu_embed import FeatureConfig, RaggedIds, SparseIds, TableConfig
from tpu_embed.core.ids import host_ids


def _feature(**options) -> FeatureConfig:
    return FeatureConfig(TableConfig(6, 4), **options)


def _host(feature, ids, weights=None):
    return host_ids("user/x", feature, "items", ids, weights)


def test_int32_ids_are_not_copied():
    ids = np.arange(4, dtype=np.int32).reshape(2, 2)
    assert np.shares_memory(_host(_feature(), ids).ids, ids)
    assert np.shares_memory(_host(_feature(), RaggedIds(ids[0], [0, 2])).ids, ids)


def test_inputs_are_not_written_to():
    ids = np.array([[9, -1, 2]])
    weights = np.ones((1, 3), np.float32)
    _host(_feature(on_bad_id="drop"), ids, weights)
    _host(_feature(on_bad_id="clip"), ids, weights)
    assert (ids.tolist(), weights.tolist()) == ([[9, -1, 2]], [[1.0, 1.0, 1.0]])


def test_arrays_of_jax_are_taken():
    assert _host(_feature(), jnp.array([[1, -1]])).ids.tolist() == [[[1, -1]]]
    ragged = RaggedIds(jnp.array([1, 2]), jnp.array([0, 2]), jnp.array([0.5, 1.0]))
    host = _host(_feature(), ragged)
    assert (host.ids.tolist(), host.bags.tolist()) == ([1, 2], [0, 0])


def test_trailing_empty_rows_and_repeated_ids_are_kept():
    host = _host(_feature(), SparseIds([[0, 0], [0, 5], [1, 0]], [2, 2, 2], (5, 6)))
    assert host.shape.batch == 5
    assert (host.ids.tolist(), host.bags.tolist()) == ([2, 2, 2], [0, 0, 1])


NO_INTEGERS = [
    (np.ones((2, 2)), "float64"),
    (np.ones(2, bool), "bool"),
    (jnp.ones(2, jnp.bfloat16), "bfloat16"),
    (np.array(["a"]), r"<U1; tpu_embed.hash_ids"),
    (np.array(["a"], object), r"objects of str; tpu_embed.hash_ids"),
    (RaggedIds([1.0], [0, 1]), "float64"),
    (SparseIds([[0, 0]], [True], (1, 1)), "bool"),
]


@pytest.mark.parametrize(("ids", "got"), NO_INTEGERS)
def test_ids_that_are_not_integers(ids, got, refused):
    says = f"user/x: expected ids of an integer dtype, got {got}"
    refused(says, _host, _feature(), ids, error=TypeError)


def test_traced_ids_are_refused(refused):
    says = "user/x: expected ids whose values are known, got a tracer; place outside the jitted"
    refused(says, jax.jit(lambda ids: _host(_feature(), ids).ids), np.ones((1, 2), int))


def test_masked_weights_and_indices_are_refused(refused):
    """NumPy drops the mask when it makes a plain array of one."""
    masked = np.ma.masked_array([[1, 2]], mask=[[False, True]])
    for call, what in (
        (lambda: RaggedIds([1, 2], [0, 2], masked[0]), "RaggedIds.weights"),
        (lambda: SparseIds(masked, [1], (2, 3)), "SparseIds.indices"),
        (lambda: _host(_feature(), np.ones((1, 2), int), masked), "weights of user/x"),
        (lambda: _host(_feature(), RaggedIds([1, 2], [0, 2]), masked[0]), "weights of user/x"),
    ):
        refused(f"{what}: expected an array, got a masked", call, error=TypeError)


BAD_SHAPES = [
    ({}, np.int32(3), r"expected ids of rank 1 or more, got rank 0"),
    ({}, 3, r"expected an array of ids, SparseIds or RaggedIds, got int; .*constructors"),
    ({}, None, r"expected an array of ids, .*got NoneType"),
    ({}, scipy.sparse.csr_array((2, 2), dtype=int), r"expected an array .*got csr_array"),
    ({"max_sequence_length": 2}, np.zeros(3, int), r"expected a sequence's ids as \[B, H\]"),
    ({"max_sequence_length": 2}, SparseIds([], [], (2, 2, 2)), "expected a sequence's"),
    ({"output_shape": (2, 3)}, np.zeros((2, 4, 3), int), "expected ids that give"),
    ({"output_shape": (3,)}, np.zeros(2, int), r"output_shape \(3,\), got ids that give"),
    ({"output_shape": (2, 2)}, SparseIds([], [], (2, 2)), r"\(2, 2\), got ids that give"),
    ({"output_shape": (3,)}, RaggedIds([], [0, 0, 0]), "product of R or kR for 2 rows"),
    ({"output_shape": (1,)}, RaggedIds([], [0]), r"for 0 rows, got \(1,\), product 1"),
]


@pytest.mark.parametrize(("options", "ids", "says"), BAD_SHAPES)
def test_shapes_that_are_refused(options, ids, says, refused):
    refused("user/x: .*" + says, _host, _feature(**options), ids)


BAD_CONTAINERS = [
    (SparseIds([0], [1], (2,)), r"SparseIds.dense_shape \(B, H\) or longer, got \(2,\)"),
    (SparseIds([[0, 0]], [[1]], (1, 1)), r"SparseIds.values \[N\], got shape \(1, 1\)"),
    (SparseIds([[0, 0]], [1, 2], (1, 2)), r"SparseIds.indices \[2, 2\] of integers, got int64"),
    (SparseIds([[0, 0, 0]], [1], (1, 2)), r"indices \[1, 2\] .*of shape \(1, 3\)"),
    (SparseIds([[0.0, 0.0]], [1], (1, 2)), r"indices \[1, 2\] of integers, got float64"),
    (SparseIds([[0, 2]], [1], (1, 2)), r"indices inside dense_shape \(1, 2\), got \[0, 2\]"),
    (SparseIds([[0, 0], [-1, 0]], [1, 1], (1, 2)), r"inside dense_shape .*got \[-1, 0\]"),
    (SparseIds([[1, 0], [0, 1]], [1, 2], (2, 2)), "sorted by row, then column, none twice"),
    (SparseIds(np.array([[0, 1], [0, 0]], np.uint8), [1, 2], (2, 2)), r"\[0, 1\] before \[0, 0\]"),
    (SparseIds([[0, 1], [0, 1]], [1, 2], (2, 2)), r"none twice, got \[0, 1\] before \[0, 1\]"),
    (SparseIds([[0, 1, 0], [0, 0, 1]], [1, 2], (2, 2, 2)), r"sorted .*\[0, 1, 0\] before \[0"),
    (RaggedIds([[1]], [0, 1]), r"RaggedIds.values \[N\], got shape \(1, 1\)"),
    (RaggedIds([1], [[0, 1]]), r"RaggedIds.row_splits \[B \+ 1\] of integers, got int64"),
    (RaggedIds([], []), r"row_splits \[B \+ 1\] of integers, got int64 of shape \(0,\)"),
    (RaggedIds([1], [0]), r"row_splits that rise from 0 to 1, got \[0\]"),
    (RaggedIds([1, 2], [1, 2]), r"rise from 0 to 2, got \[1 2\]"),
    (RaggedIds([1, 2], [0, 1]), r"rise from 0 to 2, got \[0 1\]"),
    (RaggedIds([1, 2], np.array([0, 2, 1, 2], np.uint8)), r"rise from 0 to 2, got \[0 2 1 2\]"),
]


@pytest.mark.parametrize(("ids", "says"), BAD_CONTAINERS)
def test_containers_that_are_refused(ids, says, refused):
    refused("user/x: expected .*" + says, _host, _feature(), ids)


def test_more_bags_than_int32_can_number(refused):
    says = r"at most 2147483647 bags in a batch, got 65536 x 65536"
    refused(says, _host, _feature(), SparseIds([], [], (2**16, 2**16, 1)))

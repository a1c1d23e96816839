"""Bad ids: the three policies, and the text of the error; weights: where, which and how stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embed import FeatureConfig, RaggedIds, SparseIds, TableConfig
from tpu_embed.core.ids import host_ids


def _host(ids, weights=None, *, size=10, dtype="float32", **options):
    feature = FeatureConfig(TableConfig(size, 4, dtype=dtype), **options)
    return host_ids("user/x", feature, "items", ids, weights)


BAD_IDS = [
    (np.array([1, 2, 10]), "id 10 at example 2;"),
    (np.array([1, -2, 3]), "id -2 at example 1;"),
    (np.array([[1, 2, 3], [4, 12, 5]]), "id 12 at example 1, position 1;"),
    (np.array([[1, -5, 11], [4, 12, 5]]), r"id -5 at example 0, position 1 \(and 2 more\);"),
    (np.full((1, 2, 2, 1), 99), r"id 99 at example 0, bag \(0, 0\), position 0 \(and 3"),
    (np.array([2**64 - 1], np.uint64), "id 18446744073709551615 at example 0;"),
    (np.array([2**31], np.int64), "id 2147483648 at example 0;"),
    (SparseIds([[0, 0], [1, 3]], [1, 10], (2, 4)), "id 10 at example 1, position 3;"),
    (SparseIds([[0, 0], [1, 3]], [1, -1], (2, 4)), "id -1 at example 1, position 3;"),
    (SparseIds([[1, 0, 3]], [10], (2, 1, 4)), "id 10 at example 1, bag 0, position 3;"),
    (SparseIds([[1, 0, 2, 3]], [10], (2, 1, 3, 4)), r"id 10 at example 1, bag \(0, 2\)"),
    (RaggedIds([1, 2, 3, 10], [0, 1, 1, 4]), "id 10 at example 2, position 2;"),
    (RaggedIds([-1, 2, 3], [0, 1, 1, 3]), "id -1 at example 0, position 0;"),
]


@pytest.mark.parametrize(("ids", "where"), BAD_IDS)
def test_error_names_everything(ids, where, refused):
    says = r"user/x: expected ids in \[0, 10\) of table 'items', got " + where + ".*on_bad_id="
    refused(says, _host, ids)


def test_errors_of_what_is_reshaped_or_cut(refused):
    """Bad ids past a sequence's end are bad, too."""
    shaped = RaggedIds([1, 2, 3, 10], [0, 1, 1, 3, 4])
    refused("got id 10 at row 3, position 0;", _host, shaped, output_shape=(2, 2))
    for ids in (np.array([[1, 2, 99]]), RaggedIds([1, 2, 99], [0, 3])):
        refused("id 99 at example 0, position 2", _host, ids, max_sequence_length=2)


def test_minus_one_is_padding_in_dense_arrays_only():
    assert _host(np.array([-1, 3])).ids.tolist() == [[[-1]], [[3]]]
    assert _host(np.array([[-1, 30]]), on_bad_id="clip").ids.tolist() == [[[-1, 9]]]
    assert _host(RaggedIds([-1, 30], [0, 2]), on_bad_id="clip").ids.tolist() == [0, 9]


def test_drop_takes_the_weight_too():
    ids, weights = np.array([[1, 99, -1, -7]]), np.array([[0.5, 2.0, 3.0, 4.0]])
    dense = _host(ids, weights, on_bad_id="drop")
    assert dense.ids.tolist() == [[[1, -1, -1, -1]]]
    assert dense.weights.tolist() == [[[0.5, 0.0, 0.0, 0.0]]]
    flat = _host(RaggedIds(ids[0], [0, 4], weights[0]), on_bad_id="drop")
    assert (flat.ids.tolist(), flat.weights.tolist()) == ([1], [0.5])
    assert flat.bags.tolist() == [0]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int64, np.uint64])
def test_policies_in_dtypes_narrower_than_the_vocabulary(dtype):
    ids = np.array([-5 if np.iinfo(dtype).min else 0, 3, min(np.iinfo(dtype).max, 2**63)], dtype)
    numbers, size = ids.tolist(), 1000
    clipped = [min(max(number, 0), size - 1) for number in numbers]
    dropped = [number if 0 <= number < size else -1 for number in numbers]
    for policy, expected in {"clip": clipped, "drop": dropped}.items():
        options = {"size": size, "on_bad_id": policy}
        assert _host(ids, **options).ids.ravel().tolist() == expected
        ragged = _host(RaggedIds(ids, [0, 3]), **options).ids
        assert ragged.tolist() == [number for number in expected if number >= 0]


def test_ids_are_cast_after_they_are_judged(refused):
    assert _host(np.array([[2**31 - 2]]), size=2**31 - 1).ids.dtype == np.int32
    refused("got id 4294967297", _host, np.array([[2**32 + 1]]))


def test_a_larger_vocabulary_needs_x64(refused):
    ids = np.array([[2**31]])
    says = "user/x: .* at most 2147483647 rows while x64 is off, got 4294967296 in table 'items'"
    refused(says, _host, ids, size=2**32)
    with jax.enable_x64(True):
        judged = _host(ids, size=2**32).ids
        assert (judged.dtype, judged.tolist()) == (np.int64, [[[2**31]]])
        assert _host(RaggedIds(np.array([5], np.int8), [0, 1]), size=2**32).ids.dtype == np.int64
        clipped = _host(np.array([[-2, 2**40]]), size=2**32, on_bad_id="clip").ids
        assert clipped.tolist() == [[[0, 2**32 - 1]]]


# -- Weights ---------------------------------------------------------------------------------------

DENSE = np.array([[1, 2], [3, -1]])
INDICES = [[0, 0], [0, 1], [1, 0]]
NUMBERS = np.array([0.5, -1.0, 0.0])


def _sparse(weights=None) -> SparseIds:
    return SparseIds(INDICES, [1, 2, 3], (2, 2), weights)


def _ragged(weights=None) -> RaggedIds:
    return RaggedIds([1, 2, 3], [0, 2, 3], weights)


FLAT_WEIGHTS = [
    (_sparse(NUMBERS), None),
    (_sparse(), NUMBERS),
    (_sparse(), jnp.asarray(NUMBERS, jnp.float32)),
    (_sparse(), SparseIds(INDICES, NUMBERS, (2, 2))),
    (_ragged(NUMBERS), None),
    (_ragged(), NUMBERS),
    (_ragged(), RaggedIds(NUMBERS, [0, 2, 3])),
    (_ragged(), NUMBERS.astype(jnp.bfloat16)),
    (_ragged(), NUMBERS.astype(np.float16)),
]


@pytest.mark.parametrize(("ids", "weights"), FLAT_WEIGHTS)
def test_places_of_flat_weights(ids, weights):
    kept = _host(ids, weights).weights
    assert (kept.dtype, kept.tolist()) == (np.float32, NUMBERS.tolist())


def test_dense_weights_are_zero_at_padding():
    kept = _host(DENSE, np.array([[0.5, -1.0], [0.0, 7.0]])).weights
    assert kept[:, 0].tolist() == [[0.5, -1.0], [0.0, 0.0]]


def test_weights_have_the_tables_arithmetic_dtype():
    for ids in (DENSE, _sparse(), _ragged()):
        assert _host(ids).weights is None  # they are all ones
    assert _host(_ragged(), np.array([1, 0, -2])).weights.tolist() == [1.0, 0.0, -2.0]
    assert _host(_ragged(), NUMBERS, dtype="bfloat16").weights.dtype == np.float32
    with jax.enable_x64(True):
        assert _host(_ragged(), NUMBERS, dtype="float64").weights.dtype == np.float64


def test_weights_of_a_sequence_stay_with_their_ids():
    assert _host(_ragged(NUMBERS), max_sequence_length=1).weights.tolist() == [0.5, 0.0]
    dense = _host(DENSE, DENSE * 0.5, max_sequence_length=1).weights
    assert dense.ravel().tolist() == [0.5, 1.5]


BAD_WEIGHTS = [
    (DENSE[:, 0], NUMBERS[:2], r"expected no weights for ids \[B\], got some; use ids \[B"),
    (DENSE, _ragged(), "expected an array, as the ids, got RaggedIds"),
    (DENSE, NUMBERS, r"expected shape \(2, 2\), as the ids, got shape \(3,\)"),
    (_sparse(NUMBERS), NUMBERS, "one place, inside SparseIds or in weights=, got both"),
    (_ragged(NUMBERS), NUMBERS, "one place, inside RaggedIds or in weights=, got both"),
    (_sparse(), NUMBERS[:2], r"expected shape \(3,\), as the ids, got shape \(2,\)"),
    (_ragged(NUMBERS[:2]), None, r"expected shape \(3,\), as the ids, got shape \(2,\)"),
    (_sparse(), RaggedIds(NUMBERS, [0, 2, 3]), "an array or SparseIds, as the ids"),
    (_ragged(), SparseIds(INDICES, NUMBERS, (2, 2)), "expected an array or RaggedIds"),
    (_ragged(), 0.5, "expected an array or RaggedIds, as the ids, got float"),
    (_sparse(), SparseIds(INDICES, NUMBERS, (2, 3)), "expected the dense_shape of the ids"),
    (_sparse(), SparseIds([[0, 0], [1, 0], [1, 1]], NUMBERS, (2, 2)), "expected the indices"),
    (_ragged(), RaggedIds(NUMBERS, [0, 1, 3]), "expected the row_splits of the ids"),
    (_ragged(), RaggedIds(NUMBERS, [0, 2, 3], NUMBERS), "expected floats as RaggedIds.values"),
    (_ragged(), np.array([1.0, np.nan, 2.0]), r"numbers finite in float32, got nan at \[1\]"),
    (DENSE, np.array([[1.0, np.inf], [0, 0]]), r"finite in float32, got inf at \[0, 1\]"),
    (DENSE, np.array([[1.0, 1.0], [0, np.nan]]), r"finite in float32, got nan at \[1, 1\]"),
    (_ragged(), np.array([1.0, 1e39, 2.0]), r"numbers finite in float32, got 1e\+39 at \[1\]"),
    (_ragged(), np.array([True, False, True]), "expected real numbers, got bool"),
    (_ragged(), np.array(["a", "b", "c"]), "expected real numbers, got <U1"),
]


@pytest.mark.parametrize(("ids", "weights", "says"), BAD_WEIGHTS)
def test_weights_that_are_refused(ids, weights, says, refused):
    refused("weights of user/x: .*" + says, _host, ids, weights)

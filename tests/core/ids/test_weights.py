"""Weights: where they may be given, how they are stored, and which are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embed import FeatureConfig, RaggedIds, SparseIds, TableConfig
from tpu_embed.core.ids import host_ids

DENSE = np.array([[1, 2], [3, -1]])
INDICES = [[0, 0], [0, 1], [1, 0]]
NUMBERS = np.array([0.5, -1.0, 0.0])


def _sparse(weights=None) -> SparseIds:
    return SparseIds(INDICES, [1, 2, 3], (2, 2), weights)


def _ragged(weights=None) -> RaggedIds:
    return RaggedIds([1, 2, 3], [0, 2, 3], weights)


def _weights(ids, weights=None, dtype="float32", **options):
    feature = FeatureConfig(TableConfig(10, 4, dtype=dtype), **options)
    return host_ids("user/x", feature, "items", ids, weights).weights


@pytest.mark.parametrize(
    ("ids", "weights"),
    [
        (_sparse(NUMBERS), None),
        (_sparse(), NUMBERS),
        (_sparse(), jnp.asarray(NUMBERS, jnp.float32)),
        (_sparse(), SparseIds(INDICES, NUMBERS, (2, 2))),
        (_ragged(NUMBERS), None),
        (_ragged(), NUMBERS),
        (_ragged(), RaggedIds(NUMBERS, [0, 2, 3])),
        (_ragged(), NUMBERS.astype(jnp.bfloat16)),
        (_ragged(), NUMBERS.astype(np.float16)),
    ],
)
def test_places_of_flat_weights(ids, weights):
    kept = _weights(ids, weights)
    assert kept.dtype == np.float32
    assert kept.tolist() == NUMBERS.tolist()


def test_dense_weights_are_zero_at_padding():
    kept = _weights(DENSE, np.array([[0.5, -1.0], [0.0, 7.0]]))
    assert kept[:, 0].tolist() == [[0.5, -1.0], [0.0, 0.0]]


def test_weights_have_the_tables_arithmetic_dtype():
    for ids in (DENSE, _sparse(), _ragged()):
        assert _weights(ids) is None  # they are all ones
    assert _weights(_ragged(), np.array([1, 0, -2])).tolist() == [1.0, 0.0, -2.0]
    assert _weights(_ragged(), NUMBERS, dtype="bfloat16").dtype == np.float32
    with jax.enable_x64(True):
        assert _weights(_ragged(), NUMBERS, dtype="float64").dtype == np.float64


def test_weights_of_a_sequence_stay_with_their_ids():
    assert _weights(_ragged(NUMBERS), max_sequence_length=1).tolist() == [0.5, 0.0]
    assert _weights(DENSE, DENSE * 0.5, max_sequence_length=1)[..., 0].tolist() == [[0.5], [1.5]]


@pytest.mark.parametrize(
    ("ids", "weights", "says"),
    [
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
    ],
)
def test_refusals(ids, weights, says):
    with pytest.raises(ValueError, match="weights of user/x: .*" + says):
        _weights(ids, weights)

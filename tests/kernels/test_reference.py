"""The reference kernels define the results of all kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import magnitudes

from tpu_embed.kernels import reference

R, N = 6, 16
TABLE = np.random.default_rng(0).normal(size=(R, 3)).astype(np.float32)
ABSENT_ROWS = np.array([0, 5, -1, 6, -6, 100, 5], np.int32)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.int32])
@pytest.mark.parametrize("trailing", [(), (3,)])
def test_gather_reads_absent_rows_as_zeros(dtype, trailing):
    table = (np.abs(TABLE) * 100 + 1).astype(dtype) if trailing else TABLE[:, 0].astype(dtype)
    found = jax.jit(reference.gather_rows)(table, ABSENT_ROWS)
    assert found.dtype == dtype
    zero = np.zeros(trailing, dtype)
    expected = [table[0], table[5], zero, zero, zero, zero, table[5]]
    np.testing.assert_array_equal(found, np.stack(expected))


@pytest.mark.parametrize("table", [TABLE, TABLE[:, 0]], ids=["rows", "numbers"])
def test_set_leaves_absent_rows_out(table):
    rows = np.array([4, -1, 6, 0, -6, 100], np.int32)
    values, expected = 10 + table, table.copy()
    expected[4], expected[0] = values[0], values[3]
    np.testing.assert_array_equal(jax.jit(reference.set_rows)(table, rows, values), expected)


def test_rows_none_at_all():
    none = np.zeros(0, np.int32)
    assert reference.gather_rows(jnp.asarray(TABLE), none).shape == (0, 3)
    values = np.zeros((0, 3), np.float32)
    assert reference.set_rows(jnp.asarray(TABLE), none, values).tolist() == TABLE.tolist()
    empty = reference.gather_rows(jnp.zeros((0, 3)), np.zeros(2, np.int32))
    assert empty.tolist() == [[0.0] * 3] * 2
    for kernel in (reference.segment_sum, reference.segment_sum_scan):
        assert kernel(jnp.asarray(values), none, 2).tolist() == [[0.0] * 3] * 2


@settings(max_examples=30)
@given(st.lists(st.integers(-2, 5), min_size=N, max_size=N))
def test_sort_keeps_the_order_of_equal_rows(rows):
    ordered, positions = reference.sort_rows(np.array(rows, np.int32))
    expected = sorted(range(N), key=lambda i: rows[i])
    assert np.asarray(positions).tolist() == expected
    assert np.asarray(ordered).tolist() == sorted(rows)


def sequential(values, segments, n):
    """Sum in float32, entry after entry: the order that is promised."""
    sums, kept = np.zeros((n, *values.shape[1:]), np.float32), segments < n
    np.add.at(sums, segments[kept], values[kept])
    return sums


SUM = jax.jit(reference.segment_sum, static_argnums=2)
SCAN = jax.jit(reference.segment_sum_scan, static_argnums=2)


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 7), min_size=N, max_size=N).map(sorted),
    st.integers(0, 100),
    st.sampled_from([(), (3,)]),
)
def test_segment_sums(segments, seed, trailing):
    # Magnitudes that differ widely: another order of a sum has other bits.
    values = magnitudes(np.random.default_rng(seed), (N, *trailing))
    segments = np.array(segments, np.int32)
    expected = sequential(values, segments, 5)
    np.testing.assert_array_equal(SUM(values, segments, 5), expected)
    # The scan adds in a tree of depth 4: at most 16 roundings of partial sums below Σ|x|.
    bound = sequential(np.abs(values), segments, 5) * 16 * 2.0**-24
    assert (np.abs(np.asarray(SCAN(values, segments, 5)) - expected) <= bound).all()

"""Rows quantized to int8: the error bound, the exact cases, and refusals."""

from __future__ import annotations

import hypothesis
import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tpu_embed.io import QuantizedTable, quantize, quantize_rows

MOST = float(np.float32(8e37))
NUMBERS = st.floats(-MOST, MOST, width=32, allow_subnormal=False)


def assert_within_the_bound(table, quantized):
    exact = np.asarray(table).astype(np.float64)
    error = np.abs(exact - np.asarray(quantized.dequantized(), np.float64))
    largest = np.abs(exact).max(axis=1)
    bound = quantized.scale.astype(np.float64) / 2 + 2.0**-22 * largest
    assert (error <= bound[:, None]).all()


@hypothesis.settings(max_examples=200)
@hypothesis.given(arrays.arrays(np.float32, (3, 5), elements=NUMBERS))
def test_error_is_at_most_half_a_step(table):
    quantized = quantize_rows(table)
    assert_within_the_bound(table, quantized)
    span = np.ptp(table.astype(np.float64), axis=1)
    steps = np.maximum(span / 255, np.finfo(np.float32).smallest_normal)
    steps = np.where(span == 0, 0, steps)
    assert (quantized.scale >= steps).all()
    assert (quantized.scale <= steps * (1 + 2.0**-15)).all()
    assert (np.frexp(quantized.scale)[0] * 2**16 % 1 == 0).all()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float64])
def test_table_is_read_block_by_block(dtype, monkeypatch):
    table = np.random.default_rng(0).normal(size=(37, 6)).astype(dtype)
    whole = quantize_rows(table)
    monkeypatch.setattr(quantize, "_BLOCK", 24)
    by_blocks = quantize_rows(table)
    assert_within_the_bound(table, whole)
    for name, kind in (("values", np.int8), ("scale", np.float32), ("offset", np.float32)):
        assert getattr(whole, name).dtype == kind
        np.testing.assert_array_equal(getattr(whole, name), getattr(by_blocks, name))


def test_constant_rows_and_smallest_numbers_are_exact():
    table = np.float32([[0.1, 0.1, 0.1], [-0.0, 0.0, 0.0], [-3e38, -3e38, -3e38], [0.1, 7.3, 2]])
    quantized = quantize_rows(jnp.asarray(table))
    assert quantized.scale[:3].tolist() == [0, 0, 0]
    np.testing.assert_array_equal(quantized.dequantized()[:3], table[:3])
    assert quantized.dequantized()[3, 0] == table[3, 0]
    wide = np.full((1, 3), 0.1)  # float64 is rounded to float32
    quantized = quantize_rows(wide)
    assert_within_the_bound(wide, quantized)
    assert quantized.offset.tolist() == [np.float32(0.1)]
    half = wide.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(quantize_rows(half).dequantized(), half)


def test_it_is_a_pytree_of_a_quarter_of_the_bytes_and_its_bits_do_not_depend_on_the_program():
    quantized = quantize_rows(np.random.default_rng(0).normal(size=(64, 33)).astype(np.float32))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(quantized)) == 64 * (33 + 8)
    on_device = jax.device_put(quantized)
    for dequantized in (QuantizedTable.dequantized, jax.jit(QuantizedTable.dequantized)):
        np.testing.assert_array_equal(dequantized(on_device), quantized.dequantized())


@pytest.mark.parametrize(
    ("bad", "got"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf"), (-3e38, "-3")]
)
def test_row_that_cannot_be_quantized_is_named(bad, got, monkeypatch):
    monkeypatch.setattr(quantize, "_BLOCK", 9)
    table = np.ones((20, 3), np.float32)
    table[17] = [3e38, bad, 0]
    with pytest.raises(ValueError, match=rf"row 17: expected finite .* got numbers from .*{got}"):
        quantize_rows(table)


@pytest.mark.parametrize(
    ("table", "error", "text"),
    [
        (np.ones((2, 2), np.int32), TypeError, "an array of floats, got int32"),
        ([[1.0]], TypeError, "got list"),
        (np.ones(3, np.float32), ValueError, r"\[V, D\], got shape \(3,\)"),
    ],
)
def test_what_is_no_table_is_refused(table, error, text):
    with pytest.raises(error, match=text):
        quantize_rows(table)

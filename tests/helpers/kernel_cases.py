"""Operands for the compiled CPU kernels, and comparison bit by bit."""

import functools

import jax
import ml_dtypes
import numpy as np

from tpu_embed.kernels import cpu, reference
from tpu_embed.kernels.operands import GradientLayout, RowGradients, RowsToSum, SumLayout

DIMS = [1, 3, 4, 5, 8, 16, 20, 33, 64, 100, 130]
"""Whole vectors of every width, and every possible remainder."""


def assert_same_bits(found, expected):
    """Assert that arrays, or tuples of them, have the same bits; any NaN equals any other."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        nan = np.isnan(x) & np.isnan(y) if x.dtype.kind == "f" else np.zeros(x.shape, bool)
        bits = f"u{x.dtype.itemsize}"
        np.testing.assert_array_equal(*(np.where(nan, 0, one.view(bits)) for one in (x, y)))


def magnitudes(rng, shape, *, tiny=False):
    """Return numbers whose sum depends on the order, with zeros of both signs among them."""
    numbers = (rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(np.float32)
    special = rng.choice(np.float32([0.0, -0.0] + [1e-40, -3e-39, 2e-38] * tiny), shape)
    return np.where(rng.random(shape) < 0.1, special, numbers)


def stored(rows, dtype):
    """Return float32 rows as a table of this dtype stores them."""
    return rows if dtype == "float32" else rows.astype(ml_dtypes.bfloat16).view(np.uint16)


def widened(table):
    """Return the rows of a table as float32."""
    return table if table.dtype == np.float32 else table.view(ml_dtypes.bfloat16).astype(np.float32)


def row_numbers(rng, rows, n, dtype=np.int32):
    """Return n row ids, some of them outside of the table, a few far outside."""
    limits = np.iinfo(dtype)
    outside = [-1, rows, rows + 1, -rows, limits.min, limits.max]
    if dtype == np.int64:
        outside += [2**32, 2**32 + 1, -(2**32)]  # in range if they were truncated to 32 bits
    numbers = rng.integers(0, rows, n)
    return np.where(rng.random(n) < 0.2, rng.choice(outside, n), numbers).astype(dtype)


BAGS = (1000, 500, 1500)
SEGMENTS = sum(BAGS)


def draw_sums(rng, dim, dtype, *, rows=90, n=4000, index_type=np.int32, tiny=True):
    """Return source, index, segments (some past the last), and weights with zeros."""
    weights = magnitudes(rng, n)
    segments = np.sort(rng.choice(SEGMENTS + SEGMENTS // 20, n)).astype(np.int32)
    source = stored(magnitudes(rng, (rows, dim), tiny=tiny), dtype)
    return source, row_numbers(rng, rows, n, index_type), segments, weights


def sums_of(kernel, source, index, segments, weights=None, **layout):
    """Return what a `gather_sum` makes of rows."""
    return kernel(RowsToSum(source, index, segments, weights), SumLayout(**layout))


def update_of(table, slots, *given, rule, rounding=None, blocks=(), **layout):
    """Return what the compiled update makes of the gradients of ids."""
    starts = np.array(blocks, np.int32).reshape(-1) if blocks else None
    gradients, layout = RowGradients(*given)._replace(blocks=starts), GradientLayout(**layout)
    return cpu.update_rows(table, slots, gradients, layout, rule, rounding)


def every_sum(kernel, source, index, segments, weights):
    """Return sums with and without weights."""
    return [sums_of(kernel, source, index, segments, w, bags=BAGS) for w in (weights, None)]


REFERENCE_SUMS = jax.jit(functools.partial(every_sum, reference.gather_sum))

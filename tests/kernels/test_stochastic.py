"""Rounding at random: the bits of XLA and C++ are those of NumPy, and their draws are fair."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle_rounding as oracle
import pytest

from tpu_embed.kernels import cpu, stochastic
from tpu_embed.kernels.operands import CompiledRule, GradientLayout, RowGradients
from tpu_embed.kernels.stochastic import Draws, Rounding, RowPlaces

SEED, STEP, NAMES, SHARD = 2**31 + 77, 12, ("films", "users"), 3
SPECIAL = np.array(
    [0, 0x80000000, 1, 0x007FFFFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF],
    np.uint32,
).view(np.float32)
"""Zeros, denormal numbers, the largest number, infinities, and two kinds of NaN."""


def rounding_of(rows, table_ids=None):
    """Return how two tables are rounded, of `rows` and 3 local rows, on shard 3 of 4 (MOD)."""
    crcs = np.array([oracle.zlib.crc32(name.encode()) for name in NAMES], np.uint32)
    tables = stochastic.table_draws(jnp.uint32(SEED), crcs, jnp.int32(STEP))
    numbers = None if table_ids is None else jnp.asarray(stochastic.number_ids(table_ids))
    return Rounding(Draws(tables, jnp.uint32(SHARD), numbers), RowPlaces((0, rows), (1, 1), 4))


def expected(values, table_ids=None):
    """Return what NumPy rounds `[rows + 3, D]` to: the first table's rows, then the second's."""
    n, dim = values.shape
    if table_ids is None:
        table_ids = np.concatenate([np.arange(n - 3), np.arange(3)]) * 4 + SHARD
    parts = zip(NAMES, np.split(table_ids, [n - 3]), strict=True)
    columns = np.arange(dim)
    bits = [oracle.random_bits(SEED, name, STEP, own[:, None], columns) for name, own in parts]
    return oracle.round_up_or_down(values, np.concatenate(bits))


def by_xla(values, rounding):
    @jax.jit
    def run(values):
        rows = jnp.arange(len(values), dtype=jnp.int32)
        keys = stochastic.row_draws(rounding, rows, rounding.draws.numbers)
        return stochastic.round_rows(values, keys)

    return np.asarray(run(values))


def by_compiled_kernel(values, rounding):
    """Return rows of zeros after an update that makes them `values`."""
    given = RowGradients(np.arange(len(values), dtype=np.int32), None, None, (-values,))
    layout, rule = GradientLayout((len(values),)), CompiledRule("sgd", (), (1.0,))
    run = jax.jit(lambda table: cpu.update_rows(table, (), given, layout, rule, rounding))
    return np.asarray(run(jnp.zeros(values.shape, jnp.uint16))[0])


def stored_bits(rounded):
    return (rounded.view(np.uint32) >> 16).astype(np.uint16)


def drawn(n, dim=61):
    """Return about n values between and around numbers of bfloat16, with special ones at first."""
    rng = np.random.default_rng(n)
    values = rng.standard_normal((-(-n // dim) + 3, dim)).astype(np.float32)
    values[:, -1] = np.round(values[:, -1] * 8) / 8 + 0.0  # bfloat16 holds these; no -0
    return values


@pytest.mark.parametrize("n", [10**6, pytest.param(10**7, marks=pytest.mark.whole)])
@pytest.mark.parametrize("keyed", [False, True])
def test_bits_are_the_same_in_numpy_xla_and_cpp(n, keyed):
    values, rng = drawn(n), np.random.default_rng(1)
    own = rng.integers(0, 2**64, len(values), np.uint64, endpoint=False) if keyed else None
    rounding, wanted = rounding_of(len(values) - 3, own), stored_bits(expected(values, own))
    np.testing.assert_array_equal(by_xla(values, rounding), wanted)
    if cpu.load().path is not None:
        np.testing.assert_array_equal(by_compiled_kernel(values, rounding), wanted)


def test_special_numbers_are_kept_and_nan_is_quiet():
    values = np.tile(SPECIAL, (40, 1))
    wanted = stored_bits(expected(values))
    np.testing.assert_array_equal(by_xla(values, rounding_of(37)), wanted)
    # The sum of gradients loses -0, denormal numbers and the sign of NaN.
    if cpu.load().path is not None:
        came = by_compiled_kernel(values, rounding_of(37))
        np.testing.assert_array_equal(came[:, 4:7], wanted[:, 4:7])
        assert np.isnan((came[:, 7:].astype(np.uint32) << 16).view(np.float32)).all()
    assert set(wanted[:, 4].tolist()) <= {0x7F7F, 0x7F80}  # the largest number, or infinity
    assert (wanted[:, 5] == 0x7F80).all()
    assert (wanted[:, 6] == 0xFF80).all()
    assert (wanted[:, 7:] & 0x7FC0 == 0x7FC0).all()


def test_a_number_becomes_one_of_its_neighbours_and_its_mean_stays():
    values = drawn(10**6)
    rounded, exact = expected(values).astype(np.float64), values.astype(np.float64)
    bits = values.view(np.uint32) & 0xFFFF0000
    low, high = (x.view(np.float32).astype(np.float64) for x in (bits, bits + 0x10000))
    assert (rounded[:, -1] == exact[:, -1]).all()
    between = low != exact
    assert ((rounded == low) | ((rounded == high) & between)).all()
    # The error in gaps is (1 - p) with probability p, else -p: its variance is p (1 - p).
    gap, share = high - low, (exact - low) / (high - low)
    error = (rounded - exact)[between] / gap[between]
    deviation = np.sqrt((share * (1 - share))[between].sum())
    assert abs(error.sum()) < 4 * deviation


def test_random_bits_are_even():
    """χ² of the lower 16 bits, in 256 cells of their upper and of their lower half."""
    n = 10**6
    for step, name in ((1, "a"), (2, "a"), (1, "b")):
        rows, columns = np.arange(n // 64)[:, None], np.arange(64)
        bits = oracle.random_bits(5, name, step, rows, columns) & np.uint64(0xFFFF)
        for half in (bits >> np.uint64(8), bits & np.uint64(0xFF)):
            counts = np.bincount(half.ravel().astype(np.int64), minlength=256)
            cells = (counts - counts.mean()) ** 2 / counts.mean()
            # 255 degrees of freedom: mean 255, variance 510; four deviations.
            assert abs(cells.sum() - 255) < 4 * 510**0.5


@pytest.mark.skipif(cpu.load().path is None, reason="compiled library")
def test_the_kernel_refuses_draws_that_do_not_fit():
    values = np.zeros((8, 4), np.float32)
    fits = rounding_of(5)
    wrong_tables = fits._replace(places=RowPlaces((0,), (1,), 4))
    wrong_numbers = fits._replace(draws=fits.draws._replace(numbers=jnp.zeros(7, jnp.uint32)))
    for rounding in (wrong_tables, wrong_numbers):
        with pytest.raises(Exception, match="draws of other tables"):
            by_compiled_kernel(values, rounding)

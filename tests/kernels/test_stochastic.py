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
DRAWS = [10**6, pytest.param(10**7, marks=pytest.mark.whole)]
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
    columns, rows = np.arange(dim), n - 3
    own = [np.arange(rows) * 4 + SHARD, np.arange(3) * 4 + SHARD]
    if table_ids is not None:
        own = [table_ids[:rows], table_ids[rows:]]
    bits = [
        oracle.random_bits(SEED, name, STEP, numbers[:, None], columns)
        for name, numbers in zip(NAMES, own, strict=True)
    ]
    return oracle.round_up_or_down(values, np.concatenate(bits))


def by_xla(values, rounding):
    n = values.shape[0]
    numbers = rounding.draws.numbers

    @jax.jit
    def run(values):
        keys = stochastic.row_draws(rounding, jnp.arange(n, dtype=jnp.int32), numbers)
        return stochastic.round_rows(values, keys)

    return np.asarray(run(values))


def by_compiled_kernel(values, rounding):
    """Return rows of zeros after an update that makes them `values`."""
    n = values.shape[0]
    rule = CompiledRule("sgd", (), (1.0,))
    ids = jnp.arange(n, dtype=jnp.int32)
    given = RowGradients(ids, None, None, (jnp.asarray(-values),))
    table = jnp.zeros(values.shape, jnp.uint16)
    layout = GradientLayout((n,))
    (new,) = jax.jit(lambda table: cpu.update_rows(table, (), given, layout, rule, rounding))(table)
    return np.asarray(new)


def stored_bits(rounded):
    return (rounded.view(np.uint32) >> 16).astype(np.uint16)


def drawn(n, dim=61):
    """Return about n values between and around numbers of bfloat16, with special ones at first."""
    rng = np.random.default_rng(n)
    values = rng.standard_normal((-(-n // dim) + 3, dim)).astype(np.float32)
    values[:, -1] = np.round(values[:, -1] * 8) / 8 + 0.0  # bfloat16 holds these; no -0
    return values


@pytest.mark.parametrize("n", DRAWS)
@pytest.mark.parametrize("keyed", [False, True])
def test_bits_are_the_same_in_numpy_xla_and_cpp(n, keyed):
    values = drawn(n)
    table_ids = None
    if keyed:
        rng = np.random.default_rng(1)
        table_ids = rng.integers(0, 2**64, values.shape[0], np.uint64, endpoint=False)
    rounding = rounding_of(values.shape[0] - 3, table_ids)
    wanted = stored_bits(expected(values, table_ids))
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
    rounded = expected(values).astype(np.float64)
    low = (values.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)
    high = ((values.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32).astype(np.float64)
    exact = values.astype(np.float64)
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


def test_whatever_bits_depend_on_changes_them():
    one = oracle.random_bits(1, "a", 1, np.arange(99)[:, None], np.arange(9))
    others = [
        oracle.random_bits(2, "a", 1, np.arange(99)[:, None], np.arange(9)),
        oracle.random_bits(1, "b", 1, np.arange(99)[:, None], np.arange(9)),
        oracle.random_bits(1, "a", 2, np.arange(99)[:, None], np.arange(9)),
        oracle.random_bits(1, "a", 1, np.arange(99, 198)[:, None], np.arange(9)),
        oracle.random_bits(1, "a", 1, np.arange(99)[:, None] + 2**32, np.arange(9)),
    ]
    for other in others:
        assert (one == other).mean() < 0.01
        # Whether a number just above the middle goes up: half of the time both agree.
        assert 0.4 < ((one & 0x8000) == (other & 0x8000)).mean() < 0.6


@pytest.mark.skipif(cpu.load().path is None, reason="compiled library")
def test_the_kernel_refuses_draws_that_do_not_fit():
    values = np.zeros((8, 4), np.float32)
    fits = rounding_of(5)
    wrong_tables = fits._replace(places=RowPlaces((0,), (1,), 4))
    wrong_numbers = fits._replace(draws=fits.draws._replace(numbers=jnp.zeros(7, jnp.uint32)))
    for rounding in (wrong_tables, wrong_numbers):
        with pytest.raises(Exception, match="draws of other tables"):
            by_compiled_kernel(values, rounding)

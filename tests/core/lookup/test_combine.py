"""Rows of bags to activations, and gradients back, compared with plain loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import make_stack

from tpu_embed import QuantizationConfig
from tpu_embed._types import PADDING_ID
from tpu_embed.core.batch import LocalIds
from tpu_embed.core.lookup import combine, sum_gradients
from tpu_embed.core.lookup.sharded import quantize
from tpu_embed.kernels import dispatch, reference
from tpu_embed.kernels.operands import RowsToSum, SumLayout

D, N = 2, 10
COUNTS = (6, 3)  # the bags of two features
BAGS = sum(COUNTS)
STACK = make_stack([5], 1, dim=D)
GAINS = st.sampled_from([1.0, 0.5, 2.0, 0.0, -0.3, -1.0])
IDS = st.lists(
    st.tuples(st.integers(-1, 4), st.integers(0, BAGS - 1), GAINS), min_size=N, max_size=N
).map(lambda entries: sorted(entries, key=lambda entry: entry[1]))
ROWS = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
GRADIENTS = np.random.default_rng(1).normal(size=(BAGS, D)).astype(np.float32)
# At most ten products and additions of numbers below ten, each rounded by 2^-24.
TOLERANCE = {"rtol": 2e-6, "atol": 2e-6}


def local(entries, *, with_gains=True):
    rows, bags, gains = (np.array(column) for column in zip(*entries, strict=True))
    return LocalIds(
        jnp.asarray(rows, jnp.int32),
        jnp.asarray(bags, jnp.int32),
        jnp.asarray(gains, jnp.float32) if with_gains else None,
    )


def by_feature(bags):
    """Return bags [BAGS, D] as one array per feature."""
    return tuple(np.split(bags, [COUNTS[0]]))


def found_of(rows, ids):
    """Return rows [N, D] of ids as they are found: in another order, absent ids nowhere."""
    index = np.where(np.asarray(ids.index) >= 0, np.arange(N)[::-1], PADDING_ID)
    source, index = jnp.asarray(rows[::-1]), jnp.asarray(index, jnp.int32)
    return RowsToSum(source, index, ids.bags, ids.gains)


@jax.jit
def both(found, ids, gradients, order, segments):
    activations = combine(found, SumLayout(COUNTS), STACK)
    gains = None if ids.gains is None else ids.gains[order]
    rows = RowsToSum(jnp.concatenate(gradients), ids.bags[order], segments, gains)
    return activations, sum_gradients(rows, N, STACK)


def run(entries, order, segments, rows=ROWS, **options):
    """Return activations [BAGS, D] and sums of gradients [N, D]."""
    ids = local(entries, **options)
    given = found_of(rows, ids), ids, by_feature(GRADIENTS), np.int32(order), np.int32(segments)
    activations, sums = both(*given)
    return np.concatenate(activations), np.asarray(sums)


@settings(max_examples=50)
@given(
    IDS,
    st.permutations(range(N)),
    st.lists(st.integers(0, N), min_size=N, max_size=N).map(sorted) | st.just(range(N)),
)
def test_activations_and_gradients(entries, order, segments):
    absent = [row < 0 for row, _, _ in entries]
    order = sorted(order, key=lambda i: absent[i])  # absent ids come last, and go nowhere
    segments = [N if absent[i] else segment for i, segment in zip(order, segments, strict=True)]
    activations, sums = run(entries, order, segments)
    expected = np.zeros((BAGS, D))
    for i, (row, bag, gain) in enumerate(entries):
        expected[bag] += gain * ROWS[i] if row >= 0 else 0.0
    np.testing.assert_allclose(activations, expected, **TOLERANCE)
    expected = np.zeros((N + 1, D))
    for i, segment in zip(order, segments, strict=True):
        expected[segment] += entries[i][2] * GRADIENTS[entries[i][1]]
    np.testing.assert_allclose(sums, expected[:N], **TOLERANCE)


def test_sums_are_given_runs_of_one_bag(monkeypatch):
    """Also where ids are absent inside a bag: the scan of GPUs must find each bag in one run."""
    scan = reference.segment_sum_scan
    monkeypatch.setattr(dispatch, "segment_sum", scan)
    monkeypatch.setattr(
        dispatch, "gather_sum", functools.partial(reference.gather_sum, segment_sum=scan)
    )
    entries = [(row, bag, 1.0) for bag in (1, 4) for row in (2, -1, 3, -1, 1)]
    ids = local(entries, with_gains=False)

    @jax.jit
    def combined(found):
        return combine(found, SumLayout(COUNTS), STACK)

    activations = np.concatenate(combined(found_of(ROWS, ids)))
    expected = np.zeros((BAGS, D))
    for (row, bag, _), values in zip(entries, ROWS, strict=True):
        expected[bag] += values if row >= 0 else 0.0
    np.testing.assert_allclose(activations, expected, **TOLERANCE)


@settings(max_examples=20)
@given(IDS)
def test_no_gains_are_ones(entries):
    ones = [(row, bag, 1.0) for row, bag, _ in entries]
    given_ones, bare = (run(ones, range(N), range(N), with_gains=w) for w in (True, False))
    np.testing.assert_array_equal(bare[0], given_ones[0])
    present = np.array([row >= 0 for row, _, _ in entries])
    np.testing.assert_array_equal(bare[1][present], given_ones[1][present])


def test_a_gain_of_zero_adds_nothing_even_of_rows_that_are_not_finite():
    """It is that of every id of a bag whose denominator is zero."""
    entries = [(0, 1, 0.0), (1, 1, 0.0), (2, 2, 0.0), (3, 4, 0.0)]
    entries += [(-1, 8, 1.0)] * (N - len(entries))
    rows = ROWS.copy()
    rows[0], rows[4:] = np.inf, np.nan  # rows of absent ids are ignored
    activations, sums = run(entries, range(N), range(N), rows)
    assert not activations.any()
    assert not sums[:4].any()


@pytest.mark.parametrize("buckets", [2, 5, 256])
def test_rows_are_rounded_to_buckets(buckets):
    low, high = -1.0, 2.0
    config = QuantizationConfig(buckets, low, high)
    rows = np.linspace(-2, 3, 501).astype(np.float32)[:, None]
    found = np.asarray(quantize(jnp.asarray(rows), make_stack([5], 1, quantization_config=config)))
    grid = low + np.arange(buckets) * (high - low) / (buckets - 1)
    assert np.abs(found - grid[np.abs(found - grid).argmin(1)][:, None]).max() < 1e-6
    step = (high - low) / (buckets - 1)
    assert np.abs(found - np.clip(rows, low, high)).max() <= step / 2 + 1e-6
    np.testing.assert_array_equal(found[[0, -1], 0], [low, high])
    assert quantize(jnp.asarray(rows), make_stack([5], 1)).tolist() == rows.tolist()

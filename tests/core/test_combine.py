"""Rows of bags to activations, and gradients back: against plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import make_group

from tpu_embed import QuantizationConfig
from tpu_embed.core.combine import combine, gradients_in_order, quantize
from tpu_embed.core.located import BagForm, LocalIds
from tpu_embed.kernels import dispatch, reference

EXAMPLES, COMBINERS, D, N = 3, ("sum", "mean", "sqrtn"), 2, 10
FORM = BagForm(EXAMPLES, COMBINERS)
# Multiples of a half add exactly: a divisor is zero, or at least a half.
WEIGHTS = st.sampled_from([1.0, 0.5, 2.0, 0.0, -0.5, -1.0])
IDS = st.lists(
    st.tuples(st.integers(-1, 4), st.integers(0, FORM.bags - 1), WEIGHTS), min_size=N, max_size=N
).map(lambda entries: sorted(entries, key=lambda entry: entry[1]))
ROWS = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
GRADIENTS = np.random.default_rng(1).normal(size=(FORM.bags, D)).astype(np.float32)
# At most ten products, additions and a quotient of numbers below ten, each rounded by 2^-24.
TOLERANCE = {"rtol": 2e-6, "atol": 2e-6}


def local(entries, *, weighted=True):
    rows, bags, weights = (np.array(column) for column in zip(*entries, strict=True))
    return LocalIds(
        jnp.asarray(rows, jnp.int32),
        jnp.asarray(bags, jnp.int32),
        jnp.asarray(weights, jnp.float32) if weighted else None,
    )


def gains(entries):
    """Return the factor of each entry's row in its bag; 0 for an absent row."""
    found = np.zeros(N)
    for bag in range(FORM.bags):
        mine = [i for i, (row, b, _) in enumerate(entries) if b == bag and row >= 0]
        weights = np.array([entries[i][2] for i in mine])
        combiner = COMBINERS[bag % len(COMBINERS)]
        divisor = {"sum": 1.0, "mean": weights.sum(), "sqrtn": np.sqrt((weights**2).sum())}
        if divisor[combiner]:
            found[mine] = weights / divisor[combiner]
    return found


@jax.jit
def both(rows, ids, gradients, order):
    return combine(rows, ids, FORM), gradients_in_order(gradients, ids, FORM, order)


@settings(max_examples=50)
@given(IDS, st.permutations(range(N)))
def test_activations_and_gradients(entries, order):
    order = np.array(order, np.int32)
    activations, gradients = both(ROWS, local(entries), GRADIENTS, order)
    factors = gains(entries)
    expected = np.zeros((FORM.bags, D))
    for i, (_, bag, _) in enumerate(entries):
        expected[bag] += factors[i] * ROWS[i]
    np.testing.assert_allclose(activations, expected, **TOLERANCE)
    bags = np.array([bag for _, bag, _ in entries])
    present = np.array([row >= 0 for row, _, _ in entries])[order]
    expected = (factors[:, None] * GRADIENTS[bags])[order]
    np.testing.assert_allclose(np.asarray(gradients)[present], expected[present], **TOLERANCE)


def test_sums_are_given_runs_of_one_bag(monkeypatch):
    """Also where ids are absent inside a bag: the scan of GPUs must find each bag in one run."""
    monkeypatch.setattr(dispatch, "segment_sum", reference.segment_sum_scan)
    entries = [(row, bag, 1.0) for bag in (1, 4) for row in (2, -1, 3, -1, 1)]
    activations = combine(ROWS, local(entries, weighted=False), FORM)
    expected = np.zeros((FORM.bags, D))
    for (row, bag, _), values in zip(entries, ROWS, strict=True):
        expected[bag] += values / 3 if row >= 0 else 0.0  # both bags are means of three
    np.testing.assert_allclose(activations, expected, **TOLERANCE)


@settings(max_examples=20)
@given(IDS)
def test_no_weights_are_ones(entries):
    ones = [(row, bag, 1.0) for row, bag, _ in entries]
    order = np.arange(N, dtype=np.int32)
    weighted, given_ones = both(ROWS, local(ones), GRADIENTS, order)
    bare, without = both(ROWS, local(ones, weighted=False), GRADIENTS, order)
    np.testing.assert_array_equal(bare, weighted)
    present = np.array([row >= 0 for row, _, _ in entries])
    np.testing.assert_array_equal(np.asarray(without)[present], np.asarray(given_ones)[present])


def test_a_zero_divisor_gives_zeros_even_of_rows_that_are_not_finite():
    entries = [(0, 1, 1.0), (1, 1, -1.0), (2, 2, 0.0), (3, 4, 0.0)]
    entries += [(-1, 8, 1.0)] * (N - len(entries))
    rows = ROWS.copy()
    rows[4:] = np.nan  # rows of absent ids are ignored
    order = np.arange(N, dtype=np.int32)
    activations, gradients = both(rows, local(entries), GRADIENTS, order)
    assert not np.asarray(activations).any()
    assert not np.asarray(gradients)[:4].any()


@pytest.mark.parametrize("buckets", [2, 5, 256])
def test_rows_are_rounded_to_buckets(buckets):
    low, high = -1.0, 2.0
    config = QuantizationConfig(buckets, low, high)
    rows = np.linspace(-2, 3, 501).astype(np.float32)[:, None]
    found = np.asarray(quantize(jnp.asarray(rows), make_group([5], 1, quantization_config=config)))
    grid = low + np.arange(buckets) * (high - low) / (buckets - 1)
    assert np.abs(found - grid[np.abs(found - grid).argmin(1)][:, None]).max() < 1e-6
    step = (high - low) / (buckets - 1)
    assert np.abs(found - np.clip(rows, low, high)).max() <= step / 2 + 1e-6
    np.testing.assert_array_equal(found[[0, -1], 0], [low, high])
    assert quantize(jnp.asarray(rows), make_group([5], 1)).tolist() == rows.tolist()

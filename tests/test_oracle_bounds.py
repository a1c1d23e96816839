"""The intervals of the oracle contain float32 results, and little else."""

import functools
from types import SimpleNamespace

import numpy as np
import optax
import oracle_bounds
import pytest

RNG = np.random.default_rng(0)


class Config(SimpleNamespace):
    __hash__ = object.__hash__


def make_feature(**options):
    table = {"vocabulary_size": 9, "dim": 3, "combiner": "mean", "quantization_config": None}
    config = Config(**table | options)
    return SimpleNamespace(table=config, max_sequence_length=0, output_shape=None, on_bad_id="drop")


def inside(values, bounds):
    return not len(oracle_bounds.outside(values, bounds))


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_activation_holds_a_float32_sum_in_any_order(combiner):
    table = RNG.normal(size=(9, 3)).astype(np.float32)
    ids = np.array([[0, 1, 2, 3, 4, 5, 6, 7]])
    weights = RNG.normal(size=(1, 8)).astype(np.float32) ** 2
    bounds = oracle_bounds.activation(table, make_feature(combiner=combiner), ids, weights)
    denominators = {"sum": 1, "mean": weights.sum(), "sqrtn": np.sqrt((weights**2).sum())}
    for order in (np.arange(8), np.arange(8)[::-1], RNG.permutation(8)):
        terms = weights[0, order, None] * table[ids[0, order]]
        value = functools.reduce(np.add, terms) / np.float32(denominators[combiner])
        assert inside(value[None], bounds)
        assert not inside(value[None] * np.float32(1 + 1e-4), bounds)
    assert np.max(bounds.high - bounds.low) < 1e-4


def test_only_a_row_near_the_edge_of_two_buckets_may_be_in_either():
    grid = SimpleNamespace(num_buckets=4, lower=0.0, upper=3.0)
    feature = make_feature(quantization_config=grid, dim=2)
    table = np.array([[0.5 - 1e-8, 1.2]])
    bounds = oracle_bounds.activation(table, feature, np.array([[0]]))
    assert inside([[0.0, 1.0]], bounds)
    assert inside([[1.0, 1.0]], bounds)
    assert not inside([[1.0, 2.0]], bounds)


def given(*gradients):
    return oracle_bounds.Updates(
        [np.array(g) for g in gradients], [1e-6 * np.abs(g) for g in gradients]
    )


def updated(name, updates, *, row=(1.0, 0.5), dtype="float32", slots=None, lr=0.1, **hyper):
    args = (name, hyper, dtype, np.array(row), slots or {}, updates, 1, lr)
    return oracle_bounds.updated_row(*args)


def test_interval_is_narrow_where_a_rule_is_smooth_and_wide_where_it_jumps():
    row, _ = updated("SGD", given([0.3, -2.0]))
    assert inside([0.97, 0.7], row)
    assert np.all(row.high - row.low < 1e-5)
    row, _ = updated("Lion", given([0.3, 0.0]), slots={"momenta": np.zeros(2)})
    assert np.all(row.high - row.low < 1e-5)
    unsure = oracle_bounds.Updates([np.array([0.3, 1e-9])], [np.full(2, 1e-7)])
    row, _ = updated("Lion", unsure, slots={"momenta": np.zeros(2)})
    assert inside([0.9, 0.4], row)
    assert inside([0.9, 0.6], row)
    assert not inside([1.1, 0.4], row)


def test_row_is_rounded_as_it_is_stored_after_each_update():
    for step, count, expected in ((0.001, 1, 1.0), (0.001, 8, 1.0), (0.008, 1, 0.9921875)):
        row, _ = updated("SGD", given(*[[step, 0.0]] * count), dtype="bfloat16", lr=1.0)
        assert row.low.tolist() == row.high.tolist() == [expected, 0.5]


def test_roots_that_cancel_widen_ftrl():
    slots = {"accumulators": np.array([100.0, 0.1]), "linears": np.zeros(2)}
    _, bounds = updated("FTRL", given([1e-4, 1e-4]), slots=slots, learning_rate_power=-0.5)
    width = bounds["linears"].high - bounds["linears"].low
    assert width[0] > 2.0**-24 * 10 / 0.1  # a rounding of √100, over lr
    assert width[0] < 1e-3
    assert width[1] < width[0]


def test_updates_are_the_oracles_and_their_errors_grow_with_what_cancels():
    config = make_feature().table
    one, other = np.array([1e3, 1.0, 0.0]), np.array([-1e3, 1.0, 0.0])
    occurrences = [SimpleNamespace(table=config, row=4, gradient=g) for g in (one, other)]
    summed = oracle_bounds.updates(config, {}, occurrences)[4]
    assert summed.gradients[0].tolist() == [0.0, 2.0, 0.0]
    assert summed.errors[0][0] > 2.0**-24 * 2e3 > 10 * summed.errors[0][1]
    each = oracle_bounds.updates(config, {"use_gradient_accumulation": False}, occurrences)[4]
    assert [g.tolist() for g in each.gradients] == [one.tolist(), other.tolist()]
    every = oracle_bounds.updates(config, {"lazy_adam": False}, occurrences)
    assert sorted(every) == list(range(9))
    assert every[0].gradients[0].tolist() == [0.0, 0.0, 0.0]


def test_optax_runs_on_its_own_leaves():
    rows, trace = np.array([[1.0, 2.0]]), np.array([[0.5, 0.0]])
    transform = optax.sgd(0.1, momentum=0.5)
    updates = [given([0.25, 1.0])]
    row, leaves = oracle_bounds.updated_by_optax(transform, "float32", rows, [trace], updates)
    assert inside([[0.95, 1.9]], row)
    assert inside([[0.5, 1.0]], leaves[0])
    assert not inside([[0.951, 1.9]], row)


def test_nan_is_outside():
    bounds = oracle_bounds.Interval(np.array([0.0, 0.0]), np.array([1.0, 1.0]))
    assert oracle_bounds.outside([0.5, np.nan], bounds).tolist() == [[1]]

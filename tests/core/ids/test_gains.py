"""Gains: on the host and inside a program, of dense and of flat ids, for weights of any size."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from tpu_embed.core.ids import FeatureShape, HostIds, gains_in_program, host_gains

COMBINERS = ("sum", "mean", "sqrtn")


def host(ids, weights=None, bags=None, *, combines=True):
    width = None if bags is not None else ids.shape[-1]
    shape = FeatureShape(len(ids), (), combines, width, weights is not None)
    return HostIds(shape, ids, bags, weights, padded=True)


def bags_of(dtype):
    """Return weights `[B, 3]` of many sizes; the last bags have a gain of zero, or almost none."""
    limits = np.finfo(dtype)
    sizes = [limits.tiny, 1e-30, 2.0**-31, 1.0, 2.0**31, 1e30, limits.max / 4]
    bags = [[s, -1.5 * s, 0] for s in sizes] + [[limits.max, limits.tiny, 1]]
    bags += [[2.0**-30, 0, 0], [1, 1e-20, -(2.0**30)], [0, 0, 0], [1, -1, 0], [1e30, -1e30, 0]]
    return np.array(bags, dtype)


def expected(combiner, weights):
    return np.array([oracle.gains(bag, combiner) for bag in weights.tolist()])


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gains_of_any_weights(dtype, combiner):
    weights = bags_of(dtype)
    if combiner == "sqrtn" and dtype == "float64":  # the oracle squares them
        weights = np.clip(weights, -1e150, 1e150)
        weights[np.abs(weights) < 1e-150] = 0
    ids = np.arange(weights.size).reshape(weights.shape)
    found = host_gains(host(ids, weights), combiner, np.dtype(dtype))
    assert found.dtype == dtype
    # Once rounded: half a unit in the last place.
    rounding = {"rtol": np.finfo(dtype).eps, "atol": np.finfo(dtype).tiny}
    np.testing.assert_allclose(found, expected(combiner, weights), **rounding)
    with jax.enable_x64(dtype == "float64"):
        inside = jax.jit(gains_in_program, static_argnums=1)(jnp.asarray(weights), combiner)
    # XLA's CPU backend takes numbers below the least normal one for zero.
    np.testing.assert_allclose(inside, found, rtol=1e-6, atol=np.finfo(dtype).tiny)


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("weighted", [False, True])
def test_flat_ids_have_the_gains_of_dense_ones(weighted, combiner):
    weights = bags_of("float32") if weighted else np.ones((10, 3), np.float32)
    lengths = np.resize([3, 2, 0, 3, 1], len(weights))
    kept = np.arange(3) < lengths[:, None]
    ids = np.where(kept, 5, -1)
    scale = np.where(kept, weights, np.float32(0)) if weighted else None
    dense = host_gains(host(ids, scale), combiner, np.dtype("float32"))
    bags = np.repeat(np.arange(len(weights), dtype=np.int32), lengths)
    given = host(ids[kept], weights[kept] if weighted else None, bags)
    flat = host_gains(given, combiner, np.dtype("float32"))
    if combiner == "sum" and not weighted:
        assert dense is flat is None
    else:
        assert np.array_equal(flat, dense[kept])


def test_padding_adds_nothing():
    """However wide the array is, and in whatever order NumPy would add up whole rows."""
    weights = np.random.default_rng(0).normal(size=(50, 9)).astype(np.float32)
    ids = np.arange(450).reshape(50, 9)
    wide = np.pad(weights, ((0, 0), (0, 200))), np.pad(ids, ((0, 0), (0, 200)), constant_values=-1)
    narrow = host_gains(host(ids, weights), "sqrtn", np.dtype("float32"))
    found = host_gains(host(wide[1], wide[0]), "sqrtn", np.dtype("float32"))
    assert np.array_equal(found[:, :9], narrow)
    assert not found[:, 9:].any()


def test_rows_that_are_not_combined_are_multiplied_with_their_weights():
    weights = np.array([[3.0], [0.0]], np.float32)
    given = host(np.array([[1], [2]]), weights, combines=False)
    assert host_gains(given, "mean", np.dtype("float32")) is weights


def test_numbers_below_the_least_normal_one_count_on_the_host():
    found = host_gains(host(np.array([[1, 2]]), np.float32([[1e-40, 3e-40]])), "mean", np.float32)
    np.testing.assert_allclose(found, [[0.25, 0.75]], rtol=1e-4)  # the weights have 16 bits


def test_what_is_left_of_weights_that_cancel():
    """Less than float32 tells from zero is none; more gives gains that are finite."""
    weights = np.float32([[1, -1, 1e-39, 0], [1, -1, 9e-39, 9e-39], [3e38, -3e38, 2e-38, 1e-38]])
    found = host_gains(host(np.ones((3, 4), int), weights), "mean", np.dtype("float32"))
    assert not found[0].any()
    assert not found[2].any()
    np.testing.assert_allclose(found[1, 0], 1 / 1.8e-38, rtol=1e-4)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_nothing_to_combine(shape):
    empty = np.zeros(shape, np.float32)
    ids = np.zeros(shape, np.int32)
    for combiner in ("mean", "sqrtn"):
        assert host_gains(host(ids, empty), combiner, np.dtype("float32")).shape == shape
        assert gains_in_program(empty, combiner).shape == shape
        flat = host(ids.ravel(), empty.ravel(), ids.ravel())
        assert host_gains(flat, combiner, np.dtype("float32")).shape == (0,)

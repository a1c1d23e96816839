"""Weights are scaled near 1 by powers of two, one power per bag."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embed.core.ids import rescale_bags, rescale_dense_bags, rescale_flat_bags


def bags_of(dtype):
    """Return weights `[B, 3]`, far from 1 in the first bags and near it in the last three."""
    limits = np.finfo(dtype)
    far = [limits.tiny, 1e-30, 2.0**-31, 2.0**31, 1e30, limits.max / 4]
    far = [[s, -1.5 * s, 0] for s in far] + [[limits.max, limits.tiny, 1]]
    near = [[2.0**-30, 0, 0], [1, 1e-20, -(2.0**30)], [0, 0, 0]]
    return np.array(far + near, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_far_bags_are_brought_near_one_and_others_left(dtype):
    weights = bags_of(dtype)
    with jax.enable_x64(dtype == "float64"):
        inside = np.asarray(jax.jit(rescale_bags)(jnp.asarray(weights)))
    for found in (rescale_dense_bags(weights), inside):
        assert found.dtype == dtype
        assert np.array_equal(found[-3:], weights[-3:])
        assert ((np.abs(found[:-3]).max(1) >= 0.5) & (np.abs(found[:-3]).max(1) <= 4)).all()
        powers = found[:-3, :1] / weights[:-3, :1]
        assert (np.frexp(powers)[0] == 0.5).all()
        # An exact product, but where XLA's CPU backend makes zero of a number below the least.
        least = np.finfo(dtype).tiny
        np.testing.assert_allclose(found[:-3], weights[:-3] * powers, rtol=0, atol=least)


def test_flat_bags_are_those_of_a_matrix():
    weights = bags_of("float32")
    lengths = np.array([3, 2, 0, 3, 1, 3, 3, 1, 3, 2])
    kept = np.arange(3) < lengths[:, None]
    dense = rescale_dense_bags(np.where(kept, weights, 0).astype(np.float32))
    flat = rescale_flat_bags(weights[kept], np.repeat(np.arange(10), lengths))
    assert np.array_equal(flat, dense[kept])


def test_numbers_below_the_least_normal_one_are_brought_near_one_on_the_host():
    found = rescale_dense_bags(np.array([[1e-40, 3e-40]], np.float32))
    np.testing.assert_allclose(found[0, 1] / found[0, 0], 3, rtol=1e-4)  # they have 16 bits


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_nothing_to_bring_near_one(shape):
    empty = np.zeros(shape, np.float32)
    assert rescale_dense_bags(empty).shape == rescale_bags(jnp.asarray(empty)).shape == shape
    assert rescale_flat_bags(empty.ravel(), empty.ravel().astype(np.int32)).shape == (0,)

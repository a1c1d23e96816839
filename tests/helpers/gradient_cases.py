"""Arrays, a function and a comparison for the tests of `gradients` and `tag`."""

import jax.numpy as jnp
import numpy as np

X = jnp.array([0.5, -1.0, 2.0])
W = jnp.array([3.0, 0.25, -2.0])


def square(x):
    return x**2


def same(found, expected):
    """Assert as many gradients as expected, and their numbers; float32 against closed forms."""
    assert len(found) == len(expected)
    for g, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-6)

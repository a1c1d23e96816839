"""Softmax losses and their gradients in float64 loops, which share no code with the library."""

import math

import jax
import jax.numpy as jnp
import numpy as np

B, D, N = 8, 4, 5
EPS = float(np.finfo(np.float32).eps)


def loop_sampled(queries, positives, negatives, ids, log_q, temperature):
    """Return losses `[…]`, one negative after the other."""
    losses = np.zeros(queries.shape[:-1])
    for at in np.ndindex(losses.shape):
        own = ids[0][at] if ids else 0
        if own < 0:
            continue
        right = queries[at] @ positives[at] / temperature - (log_q[0][at] if log_q else 0)
        total = 1.0
        drawn = negatives if negatives.ndim == 2 else negatives[at]
        for n, item in enumerate(drawn):
            place = (n,) if negatives.ndim == 2 else (*at, n)
            if ids and (ids[1][place] == own or ids[1][place] < 0):
                continue
            logit = queries[at] @ item / temperature - (log_q[1][place] if log_q else 0)
            total += math.exp(logit - right)
        losses[at] = math.log(total)
    return losses


def numeric(loss, arrays, which, step=1e-5):
    """Return the gradient of the sum of a float64 loss by central differences."""
    found = np.zeros(arrays[which].shape)
    for at in np.ndindex(found.shape):
        for sign in (1, -1):
            moved = [a.copy() for a in arrays]
            moved[which][at] += sign * step
            found[at] += sign * loss(*moved).sum() / (2 * step)
    return found


def single(*arrays):
    """Return arrays as float32, on the devices."""
    return [jnp.asarray(a, jnp.float32) for a in arrays]


def check(ours, loop, arrays, bound):
    """Compare losses and gradients of float32 `ours` with those of a float64 `loop`."""
    np.testing.assert_allclose(jax.jit(ours)(*single(*arrays)), loop(*arrays), atol=bound)
    # Central differences are off by about step² and eps64 / step, both below 1e-9.
    slopes = jax.jit(jax.grad(lambda *a: ours(*a).sum(), range(len(arrays))))
    for which, gradient in enumerate(slopes(*single(*arrays))):
        np.testing.assert_allclose(gradient, numeric(loop, arrays, which), atol=B * bound)

"""Scale very small or very large weights to near 1, so that weighted means don't overflow.

The activations Σ c w / Σ c and Σ c w / √Σ c² do not change when all weights c of a bag are
multiplied by the same number. Weights of 1e-20 need this, because their squares are too small for
float32; weights of 2e19 need it, because their squares are too large. Each bag is multiplied by a
power of two, which is exact. A bag whose largest weight is near 1 keeps its weights.

Input: the weights of bags, on the host or inside a program. Output: weights with the same gains
(the gain of an id is its weight divided by Σ c or √Σ c²).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import Array

LEAST, MOST = 2.0**-30, 2.0**30
"""A bag is rescaled unless its largest weight lies in this range.

Within it, float32 holds the squares of the weights and their sums.
"""


def rescale_dense_bags(weights: np.ndarray) -> np.ndarray:
    """Return weights with the same gains, near 1 where they were far from it.

    Args:
      weights: floats `[…, H]`, finite; the last axis is the bag, with 0 where there is no id.

    Example:
      >>> rescale_dense_bags(np.array([[2.0**-100, 3 * 2.0**-100], [1.0, 3.0]])).tolist()
      [[0.25, 0.75], [1.0, 3.0]]
    """
    if not _any_far(weights):
        return weights
    return _near_one(weights, np.abs(weights).max(axis=-1, keepdims=True))


def rescale_flat_bags(weights: np.ndarray, bags: np.ndarray) -> np.ndarray:
    """Return flat weights with the same gains; the same as `rescale_dense_bags` for flat ids.

    Args:
      weights: floats `[N]`, finite.
      bags: integers `[N]`, the bag of each weight, non-decreasing.
    """
    if not _any_far(weights):
        return weights
    # Bags 0 0 2: runs start at 0 and 2, with lengths 2 and 1; empty bag 1 has no run.
    starts = np.flatnonzero(np.diff(bags, prepend=-1))
    lengths = np.diff(starts, append=bags.size)
    largest = np.maximum.reduceat(np.abs(weights), starts)
    return _near_one(weights, np.repeat(largest, lengths))


def _any_far(weights: np.ndarray) -> bool:
    """Tell whether any weight is far from 1.

    Every weighted batch is checked, and few need rescaling, so the common case is kept cheap.
    """
    # Common case: all weights are positive and near 1, and two reductions settle it.
    if not weights.size or (weights.min() >= LEAST and weights.max() <= MOST):
        return False
    # Otherwise there may be negative weights, and zeros (padding), which are not "far".
    sizes = np.abs(weights)
    small, zero = np.count_nonzero(sizes < LEAST), np.count_nonzero(sizes == 0)
    return bool(small > zero or sizes.max() > MOST)


def _near_one(weights: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """Multiply weights by the power of two that brings `largest` into [0.5, 1) if it is far."""
    # frexp(x) gives e with 0.5 <= x / 2**e < 1; ldexp(w, -e) is w / 2**e, exactly.
    exponents = np.where(_is_far(largest), np.frexp(largest)[1], 0)
    return np.ldexp(weights, -exponents)


def rescale_bags(weights: Array) -> Array:
    """Return weights with the same gains; like `rescale_dense_bags`, inside a program.

    The result is differentiable with respect to the weights. The powers of two count as constants,
    which is correct because the gains do not depend on them.

    Args:
      weights: floats `[…, H]`; the last axis is the bag, with 0 where there is no id. A bag that
        contains NaN or infinity has no gains to keep, so its result is arbitrary.
    """
    largest = jnp.max(jnp.abs(weights), axis=-1, keepdims=True, initial=0)
    limits = jnp.finfo(weights.dtype)
    least = float(limits.smallest_normal)
    # Without mantissa bits, `largest` is rounded to a power of two. The clip keeps both the power
    # and its inverse normal numbers.
    power = jax.lax.reduce_precision(largest, limits.nexp, mantissa_bits=0)
    factor = 1.0 / jnp.clip(power, least, 1.0 / least)
    factor = jnp.where(_is_far(largest), factor, jnp.ones_like(factor))
    return weights * jax.lax.stop_gradient(factor)


def _is_far(sizes: Any) -> Any:
    return (sizes > 0) & ((sizes < LEAST) | (sizes > MOST))

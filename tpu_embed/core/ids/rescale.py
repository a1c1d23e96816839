"""Weights that are far from 1 brought near it, so that means of any of them can be computed.

The activations Σ c w / Σ c and Σ c w / √Σ c² stay as they are when all weights c of a bag are
multiplied by one number. Weights of 1e-20 need that: their squares are less than float32 can hold.
So do weights of 2e19, whose squares are more. The numbers here are powers of two, whose products
are exact, and a bag whose largest weight is near 1 keeps its own.

Enters: the weights of bags, on the host or inside a program. Leaves: weights of the same gains.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import Array

__all__ = ["rescale_bags", "rescale_dense_bags", "rescale_flat_bags"]

LEAST, MOST = 2.0**-30, 2.0**30
"""If the largest weight of a bag is between these, float32 holds all that is made of them."""


def rescale_dense_bags(weights: np.ndarray) -> np.ndarray:
    """Return weights of the same gains, near 1 where they were far from it.

    Args:
      weights: floats `[…, H]`, finite; the last axis is the bag, 0 where there is no id.

    Example:
      >>> rescale_dense_bags(np.array([[2.0**-100, 3 * 2.0**-100], [1.0, 3.0]])).tolist()
      [[0.25, 0.75], [1.0, 3.0]]
    """
    if not _any_far(weights):
        return weights
    return _near_one(weights, np.abs(weights).max(axis=-1, keepdims=True))


def rescale_flat_bags(weights: np.ndarray, bags: np.ndarray) -> np.ndarray:
    """Do what `rescale_dense_bags` does with flat weights.

    Args:
      weights: floats `[N]`, finite.
      bags: integers `[N]`, the bag of each, non-decreasing.
    """
    if not _any_far(weights):
        return weights
    starts = np.flatnonzero(np.diff(bags, prepend=-1))  # bags 0 0 2: starts 0 2, lengths 2 1
    lengths = np.diff(starts, append=bags.size)
    largest = np.maximum.reduceat(np.abs(weights), starts)
    return _near_one(weights, np.repeat(largest, lengths))


def _any_far(weights: np.ndarray) -> bool:
    """Tell whether one of the weights is far from 1: few batches have any, and all are asked."""
    if not weights.size or (weights.min() >= LEAST and weights.max() <= MOST):
        return False
    sizes = np.abs(weights)
    small, zero = np.count_nonzero(sizes < LEAST), np.count_nonzero(sizes == 0)
    return bool(small > zero or sizes.max() > MOST)


def _near_one(weights: np.ndarray, largest: np.ndarray) -> np.ndarray:
    exponents = np.where(_is_far(largest), np.frexp(largest)[1], 0)
    return np.ldexp(weights, -exponents)


def rescale_bags(weights: Array) -> Array:
    """Do what `rescale_dense_bags` does, inside a program; differentiable.

    A derivative by the weights is that by the result times the powers, which count as constants:
    the gains do not depend on them.

    Args:
      weights: floats `[…, H]`; the last axis is the bag, 0 where there is no id. A bag with NaN or
        infinity in it has no gains to keep.
    """
    largest = jnp.max(jnp.abs(weights), axis=-1, keepdims=True, initial=0)
    limits = jnp.finfo(weights.dtype)
    least = float(limits.smallest_normal)
    power = jax.lax.reduce_precision(largest, limits.nexp, mantissa_bits=0)
    factor = 1.0 / jnp.clip(power, least, 1.0 / least)
    factor = jnp.where(_is_far(largest), factor, jnp.ones_like(factor))
    return weights * jax.lax.stop_gradient(factor)


def _is_far(sizes: Any) -> Any:
    return (sizes > 0) & ((sizes < LEAST) | (sizes > MOST))

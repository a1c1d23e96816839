"""Sums over the row in one order, whatever the compiler: what a rule that reduces is made of.

XLA sums in an order of its own choice, which changes with the number of rows that a device has, and
so with devices and placements; the last bits change with it. Here the upper half of the row is
added to the lower, until one number is left. The compiled kernels do the same.
"""

from __future__ import annotations

import jax.numpy as jnp

from tpu_embed._types import Array


def row_sum(x: Array) -> Array:
    """Return the sums over the last axis, added up in one order.

    A rule that reduces with it has the same bits on every number of devices and in every placement
    (on CPU); one that uses `jnp.sum` has not.

    Args:
      x: floats `[…, D]`.

    Returns:
      `[…, 1]`.

    Example:
      >>> row_sum(jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).tolist()
      [[6.0], [15.0]]
    """
    width = 1 << max(0, x.shape[-1] - 1).bit_length()
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x


def row_mean(x: Array) -> Array:
    """Return the means over the last axis, `[…, 1]`; as `row_sum`.

    Args:
      x: floats `[…, D]`.

    Example:
      >>> row_mean(jnp.array([1.0, 2.0, 6.0])).tolist()
      [3.0]
    """
    return row_sum(x) * (1.0 / x.shape[-1])


def row_norm(x: Array) -> Array:
    """Return the Euclidean norms over the last axis, `[…, 1]`; as `row_sum`.

    Args:
      x: floats `[…, D]`.

    Example:
      >>> row_norm(jnp.array([[3.0, 4.0]])).tolist()
      [[5.0]]
    """
    return jnp.sqrt(row_sum(x * x))

"""Sums over a row in a fixed order, for rules that reduce over the row.

XLA chooses the order of a sum itself. Its choice changes with the number of rows on a device, hence
with devices and placements, and the last bits of the sum change with it. Here the upper half of the
row is added to the lower half until one number is left. The compiled kernels do the same.

Input: rows `[…, D]`.
Output: their sums, means or norms, `[…, 1]`.
"""

from __future__ import annotations

import jax.numpy as jnp

from tpu_embed._types import Array


def row_sum(x: Array) -> Array:
    """Return the sums over the last axis, added up in a fixed order.

    A rule that reduces with this function gives the same bits for every number of devices and every
    placement (on CPU). A rule that uses `jnp.sum` does not.

    Args:
      x: floats `[…, D]`.

    Returns:
      `[…, 1]`.

    Example:
      >>> row_sum(jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).tolist()
      [[6.0], [15.0]]
    """
    # D = 3: pad to width 4, [a, b, c, 0] -> [a + c, b + 0] -> [(a + c) + (b + 0)].
    width = 1 << max(0, x.shape[-1] - 1).bit_length()
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x


def row_mean(x: Array) -> Array:
    """Return the means over the last axis, `[…, 1]`, summed as in `row_sum`.

    Args:
      x: floats `[…, D]`.

    Example:
      >>> row_mean(jnp.array([1.0, 2.0, 6.0])).tolist()
      [3.0]
    """
    return row_sum(x) * (1.0 / x.shape[-1])


def row_norm(x: Array) -> Array:
    """Return the Euclidean norms over the last axis, `[…, 1]`, summed as in `row_sum`.

    Args:
      x: floats `[…, D]`.

    Example:
      >>> row_norm(jnp.array([[3.0, 4.0]])).tolist()
      [[5.0]]
    """
    return jnp.sqrt(row_sum(x * x))

"""Arithmetic of rules that gives the same bits in every program and in the compiled kernels.

On CPU, XLA may fuse a product and a sum into one multiply-add, which rounds once instead of twice.
Whether it does depends on the surrounding program, and optimization barriers are gone by then. It
may also turn a division by a root into a product with a reciprocal root. `round_now` prevents both.

XLA chooses the order of a sum itself, too. Its choice changes with the number of rows on a device,
hence with devices and placements, and the last bits of the sum change with it. `row_sum` adds the
upper half of the row to the lower half until one number is left.

A moving average that starts at 0 is too small in the first steps; dividing by 1 - βᵗ corrects that.

Input: floats of any shape and, where something is rounded, the step; or rows `[…, D]`.
Output: the same numbers, rounded; moving averages; sums, means or norms `[…, 1]`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from tpu_embed._types import Array, ArrayLike

_INTEGERS = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}


def round_now(x: Array, step: ArrayLike) -> Array:
    """Return x, and prevent the compiler from fusing its computation with its uses.

    Args:
      x: floats of any shape.
      step: int32 scalar that is never negative and not known when the program is compiled.
    """
    # min(step, 0) is 0 for every step >= 0, but the compiler cannot know that.
    return _add_zero(x, jnp.minimum(jnp.asarray(step), 0))


@jax.custom_jvp
def _add_zero(x: Array, zero: Array) -> Array:
    integers = _INTEGERS[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, integers) + zero.astype(integers)
    return jax.lax.bitcast_convert_type(bits, x.dtype)


# Without this rule the conversion to integers would cut the gradient.
@_add_zero.defjvp
def _derivative_of_identity(primals: tuple, tangents: tuple) -> tuple:
    return _add_zero(*primals), tangents[0]


def average(old: Array, new: Array, rate: float, *, t: Array) -> Array:
    """Return the moving average rate * old + (1 - rate) * new; t is the step."""
    # Both products are rounded: fused, one of them would not be, in some programs and not others.
    return round_now(rate * old, t) + round_now((1.0 - rate) * new, t)


def one_minus_power(beta: float, t: Array, dtype: jnp.dtype) -> Array:
    """Return 1 - βᵗ without the cancellation that float32 has when β is near 1.

    Args:
      beta: β in [0, 1).
      t: int32 scalar >= 1, the step.
      dtype: the dtype of the result.
    """
    if beta == 0.0:
        return jnp.ones((), dtype)
    # βᵗ = exp(t log β), and expm1(x) = exp(x) - 1 is exact for small x.
    return -jnp.expm1(t.astype(dtype) * math.log(beta))


def adam_rate(lr: Array, beta_1: float, beta_2: float, *, t: Array) -> Array:
    """Return α = lr √(1 - β₂ᵗ) / (1 - β₁ᵗ), a scalar of lr's dtype."""
    second = jnp.sqrt(one_minus_power(beta_2, t, lr.dtype))
    return lr * second / one_minus_power(beta_1, t, lr.dtype)


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

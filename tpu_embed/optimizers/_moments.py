"""Moving averages of gradients and their bias correction, shared by the rules like Adam.

A moving average that starts at 0 is too small in the first steps; dividing by 1 - βᵗ corrects that.

Input: an old average, a new value and the rate; or the rates and the step.
Output: the new average; a corrected learning rate.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from tpu_embed._types import Array
from tpu_embed.optimizers._rounding import round_now


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

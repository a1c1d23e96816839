"""Copy the caller's NumPy arrays before JAX gets them, because JAX reads them after the call.

A jitted function returns before it has run, and until then it reads its NumPy arguments from the
caller's memory. JAX copies large arrays in the background; on CPU it even uses memory that begins
at a multiple of 64 bytes as its own, for as long as the array lives. `jnp.array` and
`device_put(…, may_alias=False)` do not wait for the copy either. So a caller who fills the same
buffer with the next batch would change the current one.

Every function of the package that takes host arrays passes them through `snapshot` or `as_array`
before JAX sees them, unless it has made new arrays from them.

Input: values that the caller may change later. Output: values that nobody else can change.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import Array


def snapshot(value: Any) -> Any:
    """Return a copy of a host array; return any other value as it is.

    Args:
      value: a NumPy array or another object with `__array__`, such as a torch tensor, which is
        copied. JAX arrays cannot change, and numbers and lists are copied when they become an
        array.

    Example:
      >>> buffer = np.zeros(3)
      >>> kept = snapshot(buffer)
      >>> buffer[:] = 1
      >>> kept.tolist()
      [0.0, 0.0, 0.0]
    """
    if isinstance(value, jax.Array) or hasattr(value, "__jax_array__"):
        return value
    return np.array(value, subok=True) if hasattr(value, "__array__") else value


def as_array(value: Any) -> Array:
    """Return `jnp.asarray(value)`, which later changes of `value` do not affect.

    Args:
      value: anything that `jnp.asarray` takes.

    Raises:
      TypeError, ValueError: `jnp.asarray` does not take it.
    """
    if isinstance(value, jax.Array):
        return value
    own = snapshot(value)
    # `device_put` may use the copy's memory, so that a host array is copied once, not twice.
    return jnp.asarray(value) if own is value else jax.device_put(own)

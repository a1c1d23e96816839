"""What JAX is given of the caller's memory: a copy, since JAX reads it later than the call.

A jitted function returns before it has run. Until then it reads a NumPy argument where it lies: JAX
copies large ones in the background, and on CPU uses memory that begins at a multiple of 64 bytes as
its own, for good. `jnp.array` and `device_put(…, may_alias=False)` wait no longer. A caller who
fills the same buffer for the next batch would change this one.

Every function of the package that takes arrays of the host passes them through `snapshot` or
`as_array` before JAX sees them, unless it has made arrays of its own out of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import Array


def snapshot(value: Any) -> Any:
    """Return `value` as JAX may keep it: an array of the host copied, anything else as it is.

    Args:
      value: NumPy's array or another that has `__array__`, such as torch's; arrays of JAX, numbers,
        lists and None, whose values cannot change or are copied when they become an array.

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
    """Return `value` as an array of JAX that holds the numbers of now; as `jnp.asarray` else.

    Args:
      value: what becomes an array.

    Raises:
      TypeError, ValueError: as `jnp.asarray`: it does not become one.
    """
    if isinstance(value, jax.Array):
        return value
    own = snapshot(value)
    return jnp.asarray(value) if own is value else jax.device_put(own)  # one copy, not two

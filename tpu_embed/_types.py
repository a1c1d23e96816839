"""Array types, the padding id, and copies of the caller's arrays, which the whole package shares.

Where a bag has fewer ids than its array has places, the rest is filled with the padding id, -1.

JAX reads NumPy arrays after the call that got them: a jitted function returns before it has run,
and large arrays are copied in the background, or used where they lie for as long as the array
lives, even by `jnp.array`. A caller who fills the same buffer with the next batch would change the
current one. So every function that takes host arrays passes them through `snapshot` or `as_array`
before JAX sees them, unless it has made new arrays from them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

__all__ = [
    "PADDING_ID",
    "Array",
    "ArrayLike",
    "PyTree",
    "Tracer",
    "as_array",
    "snapshot",
]

PADDING_ID = -1
"""The id of an empty position in a dense bag; in compiled code, also the row id of no row."""

Array = jax.Array
PyTree = Any


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

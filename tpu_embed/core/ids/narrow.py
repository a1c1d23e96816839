"""Ids in a signed dtype: users have them in any integer dtype, row numbers need -1 for padding.

An id that is too large for the dtype must not wrap around into the number of another row. It
becomes the largest number of the dtype, which is never a row.

Input: integers of any dtype, on the host or traced. Output: the same numbers in a signed dtype.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from tpu_embed._types import Array


def narrow_ids(ids: Any, dtype: Any) -> Array:
    """Return integers in a signed dtype; numbers outside of it become its largest or smallest.

    Args:
      ids: a NumPy array, which is narrowed before JAX could wrap it, or an array of JAX.
      dtype: int32 or int64.

    Example:
      >>> narrow_ids(np.array([7, 2**31 + 7], np.uint32), np.int32).tolist()
      [7, 2147483647]
    """
    numbers: Any = np if isinstance(ids, np.ndarray) else jnp
    own, limits = np.iinfo(ids.dtype), np.iinfo(dtype)
    # Only a bound that the own dtype can exceed is a number of the own dtype.
    if own.max > limits.max:
        ids = numbers.minimum(ids, numbers.asarray(limits.max, ids.dtype))
    if own.min < limits.min:
        ids = numbers.maximum(ids, numbers.asarray(limits.min, ids.dtype))
    return jnp.asarray(ids, dtype)

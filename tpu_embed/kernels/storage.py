"""How an element is stored: every dtype as itself, but bfloat16 as its bits in uint16.

XLA's CPU backend widens a whole bfloat16 table to float32 for a scatter, once a step; a uint16
table is updated in place. The bits are the same, so a stored row costs two bytes on every platform.
How rows lie in their array: `forms.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import Array


def stored_dtype(dtype: str | np.dtype) -> np.dtype:
    """Return the dtype of stored rows whose logical dtype is `dtype`."""
    return np.dtype(np.uint16) if jnp.dtype(dtype) == jnp.bfloat16 else jnp.dtype(dtype)


def encode(rows: Array, dtype: str | np.dtype) -> Array:
    """Round `rows` to `dtype`, to nearest even, and return them as they are stored (same shape)."""
    rounded = rows.astype(jnp.dtype(dtype))
    if rounded.dtype == jnp.bfloat16:
        return jax.lax.bitcast_convert_type(rounded, jnp.uint16)
    return rounded


def decode(stored: Array, dtype: str | np.dtype) -> Array:
    """Return stored rows in their logical dtype (same shape)."""
    if jnp.dtype(dtype) == jnp.bfloat16:
        return jax.lax.bitcast_convert_type(stored, jnp.bfloat16)
    return stored


def widened(stored: Array) -> Array:
    """Return stored rows as numbers to calculate with: bfloat16 (in uint16) becomes float32."""
    if stored.dtype == jnp.uint16:
        return decode(stored, "bfloat16").astype(jnp.float32)
    return stored

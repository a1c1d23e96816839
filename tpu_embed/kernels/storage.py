"""How one number is stored: in its own dtype, except that bfloat16 is stored as bits in uint16.

For a scatter into a bfloat16 table, XLA's CPU backend converts the whole table to float32 in every
step; a uint16 table is updated in place. The bits are the same, so a number takes two bytes on
every platform. How whole rows are stored is the subject of `formats.py`.

Input: rows of a logical dtype. Output: stored rows of the same shape, and back.
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
    """Return `rows` rounded to `dtype` (to nearest even) and as they are stored, in their shape."""
    rounded = rows.astype(jnp.dtype(dtype))
    if rounded.dtype == jnp.bfloat16:
        return jax.lax.bitcast_convert_type(rounded, jnp.uint16)
    return rounded


def decode(stored: Array, dtype: str | np.dtype) -> Array:
    """Return stored rows in their logical dtype, in their shape."""
    if jnp.dtype(dtype) == jnp.bfloat16:
        return jax.lax.bitcast_convert_type(stored, jnp.bfloat16)
    return stored


def narrowed(rows: Array) -> Array:
    """Return float32 numbers rounded to bfloat16 as they are stored: the inverse of `widened`."""
    return (bits_of_bfloat16(rows) >> 16).astype(jnp.uint16)


def bits_of_bfloat16(rows: Array) -> Array:
    """Return float32 numbers rounded to bfloat16, as bits: those are the upper half of a uint32.

    NaN stays NaN, and numbers of more than 3.39e38 become infinite.
    """
    # XLA may leave out a conversion to bfloat16 and back ("excess precision"), but never this.
    rounded = jax.lax.reduce_precision(rows, exponent_bits=8, mantissa_bits=7)
    bits = jax.lax.bitcast_convert_type(rounded, jnp.uint32)
    # What tells NaN from infinity may be in the lower half only.
    quiet = jnp.where(rows != rows, bits | jnp.uint32(0x00400000), bits)
    return quiet & jnp.uint32(0xFFFF0000)


def widened(stored: Array) -> Array:
    """Return stored rows as numbers to compute with: bfloat16 (in uint16) becomes float32."""
    if stored.dtype == jnp.uint16:
        return decode(stored, "bfloat16").astype(jnp.float32)
    return stored

"""Products that are rounded before they are added: the same bits in every program and kernel.

XLA's CPU backend lets the compiler make one multiply-add of a product and a sum, which rounds once
instead of twice, or not, depending on what stands around; and it drops optimization barriers before
it does so. It also turns a division by a root into a product with a reciprocal root. A whole number
that is always 0, but only at run time, keeps the two apart.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_embed._types import Array, ArrayLike

_INTEGERS = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}


def round_now(x: Array, step: ArrayLike) -> Array:
    """Return x, rounded: what is computed from it is not fused with how it was computed.

    Args:
      x: floats of any shape.
      step: int32 scalar, never negative, not known when the program is compiled.
    """
    return _add_zero(x, jnp.minimum(jnp.asarray(step), 0))


@jax.custom_jvp
def _add_zero(x: Array, zero: Array) -> Array:
    integers = _INTEGERS[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, integers) + zero.astype(integers)
    return jax.lax.bitcast_convert_type(bits, x.dtype)


@_add_zero.defjvp
def _derivative_of_identity(primals: tuple, tangents: tuple) -> tuple:
    return _add_zero(*primals), tangents[0]

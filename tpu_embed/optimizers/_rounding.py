"""Forces a product to be rounded before it is added, for the same bits in every program and kernel.

On CPU, XLA may fuse a product and a sum into one multiply-add, which rounds once instead of twice.
Whether it does depends on the surrounding program, and optimization barriers are gone by then. It
may also turn a division by a root into a product with a reciprocal root. Adding an integer to the
bits of the product prevents both: it is always 0, but the compiler cannot know that.

Input: the product, and the step, a number that is known only at run time.
Output: the same product, which cannot be fused with what follows.
"""

from __future__ import annotations

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
    # min(step, 0) is 0 for every step >= 0.
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

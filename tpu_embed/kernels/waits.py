"""Make one operation of a program wait for others, where nothing else says so.

XLA derives the order of operations from data dependencies alone. A table is written in its own
memory only if everything that reads the old rows comes first; if XLA does not know, it copies the
whole table to be safe. Optimization barriers do not help: the CPU compiler drops them before it
decides about copies. So what writes adds a zero to its row ids that is computed from what was read.

Input: arrays that were computed from a table. Output: a zero that XLA cannot know before them.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from tpu_embed._types import Array


def zero_after(arrays: Sequence[Array]) -> Array:
    """Return an int32 zero, `[]`, that XLA cannot compute before all of the arrays.

    Args:
      arrays: numbers of any shape, with at least one each.
    """
    zero = jnp.int32(0)
    # Take one float's bits as an integer and clear the sign bit: the result is at least 0, so its
    # minimum with 0 is 0, for NaN and infinity too. XLA does not see that and keeps the dependency.
    for array in arrays:
        first = jax.lax.stop_gradient(array).reshape(-1)[0].astype(jnp.float32)
        bits = jax.lax.bitcast_convert_type(first, jnp.int32)
        zero += jnp.minimum(bits & 0x7FFFFFFF, 0)
    return zero

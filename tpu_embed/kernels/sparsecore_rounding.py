"""Round float32 to bfloat16 in a TPU's vector subcores, two numbers to a word of 32 bits.

It is done on the bits, in integers, so a subcore rounds as XLA does on every platform: to nearest
even, infinity stays, numbers of more than 3.39e38 become infinite, and NaN stays NaN with its sign
and the upper bits of its payload, but quiet.

Input: vectors of float32. Output: vectors of words, as `RowFormat.pack` makes them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_UPPER, _QUIET = np.uint32(0xFFFF0000), np.uint32(0x00400000)
_MAGNITUDE, _INFINITY = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)


def packed(lower: Any, upper: Any | None) -> Any:
    """Return words, uint32: in the lower half a number rounded to bfloat16, in the upper another.

    Args:
      lower, upper: float32 vectors; `upper` None: zeros.

    Example:
      >>> [hex(word) for word in packed(jnp.float32([1, -2]), jnp.float32([1 + 2**-8, 0])).tolist()]
      ['0x3f803f80', '0xc000']
    """
    below = _rounded(lower) >> 16
    return below if upper is None else below | (_rounded(upper) & _UPPER)


def _rounded(x: Any) -> Any:
    """Return numbers whose upper 16 bits are those of the nearest bfloat16, as uint32."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # Just below half of the last place that stays, and one more where that place is odd: a tie
    # goes up from an odd number and down to an even one.
    nearest = bits + (((bits >> 16) & np.uint32(1)) + np.uint32(0x7FFF))
    # NaN is found by its bits, because the compiler of subcores takes it that no float is NaN.
    return jnp.where((bits & _MAGNITUDE) > _INFINITY, bits | _QUIET, nearest)

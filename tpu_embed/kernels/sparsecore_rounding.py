"""Round float32 to bfloat16 in a TPU's vector subcores, two numbers to a word of 32 bits.

It is done on the bits, in integers, so a subcore rounds as XLA does on every platform: to nearest
even, infinity stays, numbers of more than 3.39e38 become infinite, and NaN stays NaN with its sign
and the upper bits of its payload, but quiet.

Input: vectors of float32. Output: vectors of words, as `RowFormat.pack` makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_UPPER, _QUIET = np.uint32(0xFFFF0000), np.uint32(0x00400000)
_MAGNITUDE, _INFINITY = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)


def packed(lower: Any, upper: Any | None, draws: Sequence[Any] = (None, None)) -> Any:
    """Return words, uint32: in the lower half a number rounded to bfloat16, in the upper another.

    Args:
      lower, upper: float32 vectors; `upper` None: zeros.
      draws: the random bits of each number of both, uint32 vectors, to round it at random as
        `stochastic.round_rows` does; None: to nearest even.

    Example:
      >>> [hex(word) for word in packed(jnp.float32([1, -2]), jnp.float32([1 + 2**-8, 0])).tolist()]
      ['0x3f803f80', '0xc000']
    """
    below = _rounded(lower, draws[0]) >> 16
    return below if upper is None else below | (_rounded(upper, draws[1]) & _UPPER)


def unpacked(words: Any) -> tuple[Any, Any]:
    """Return the numbers of bfloat16 in the lower and in the upper halves of words, as float32."""
    # The bits of a number of bfloat16 are the upper 16 bits of the same number in float32.
    halves = words << 16, words & _UPPER
    lower, upper = (jax.lax.bitcast_convert_type(half, jnp.float32) for half in halves)
    return lower, upper


def _rounded(x: Any, drawn: Any | None) -> Any:
    """Return numbers whose upper 16 bits are those of a bfloat16 beside them, as uint32."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    if drawn is None:
        # Just below half of the last place that stays, and one more where that place is odd: a tie
        # goes up from an odd number and down to an even one.
        added = ((bits >> 16) & np.uint32(1)) + np.uint32(0x7FFF)
    else:
        added = drawn & np.uint32(0xFFFF)
    nearest = bits + added
    # NaN is found by its bits, because the compiler of subcores assumes that no float is NaN.
    return jnp.where((bits & _MAGNITUDE) > _INFINITY, bits | _QUIET, nearest)

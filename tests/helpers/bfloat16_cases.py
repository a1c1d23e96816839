"""Rounding to bfloat16, from the definition: the nearest of two neighbours, compared in float64."""

import numpy as np


def rounded(x):
    """Return float32 numbers rounded to bfloat16 to nearest even, as bits in uint16.

    Infinity stays. What is at least as near to 2¹²⁸ as to the greatest bfloat16 becomes infinite.
    NaN keeps its sign and the upper bits of its payload, and is quiet.
    """
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    down = bits >> 16
    up = down + 1  # the next magnitude
    magnitude = np.abs(np.where(np.isfinite(x), x, np.float32(0)).astype(np.float64))
    away, near = np.abs(_magnitude(up) - magnitude), np.abs(magnitude - _magnitude(down))
    goes_up = (away < near) | ((away == near) & (down % 2 == 1))
    nearest = np.where(goes_up & ~np.isinf(x), up, down)
    return np.where(np.isnan(x), down | 0x40, nearest).astype(np.uint16)


def packed(x, words):
    """Return rows `[n, D]` rounded, word i of columns i and i + words, uint32 `[n, words]`."""
    columns = np.zeros((len(x), 2 * words), np.uint32)
    columns[:, : x.shape[1]] = rounded(x)
    return columns[:, :words] | columns[:, words:] << 16


def _magnitude(bits):
    """Return |x| of bfloat16 numbers given as bits; 2¹²⁸ for what would be infinity."""
    exponent, mantissa = (bits >> 7) & 0xFF, (bits & 0x7F).astype(np.float64)
    normal = np.ldexp(1 + mantissa / 128, exponent.astype(np.int64) - 127)
    return np.where(exponent == 0, np.ldexp(mantissa / 128, -126), normal)

"""How many bytes an array takes on a device. A TPU stores arrays in tiles, which adds padding.

Input: a shape and a dtype. Output: bytes, or bytes as text.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

Size = Callable[[tuple[int, ...], np.dtype], int]
"""A function of shape and dtype that returns the bytes of an array on a device."""

_LANES, _SUBLANES = 128, 8
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def untiled_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Return the bytes of an array without padding, as on CPU and GPU.

    Args:
      shape: the shape of the array.
      dtype: the dtype of its elements.
    """
    return math.prod(shape) * np.dtype(dtype).itemsize


def tiled_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Return the bytes of an array on a TPU.

    The last two axes are padded to tiles of 8 × 128 elements, in the order of the two axes that
    needs less padding; a single axis is padded to a multiple of 1,024 elements.

    Args:
      shape: the shape of the array.
      dtype: the dtype of its elements.

    Example:
      >>> tiled_bytes((1000, 16), np.dtype(np.float32)) // 4, 1024 * 16
      (16384, 16384)
    """
    itemsize = np.dtype(dtype).itemsize
    if len(shape) < 2:
        return _up(math.prod(shape), _LANES * _SUBLANES) * itemsize
    *lead, rows, columns = shape
    # [1000, 16]: row-major [1000, 128] are 128,000 elements, column-major [16, 1024] are 16,384
    elements = min(
        _up(rows, _SUBLANES) * _up(columns, _LANES), _up(columns, _SUBLANES) * _up(rows, _LANES)
    )
    return math.prod(lead) * elements * itemsize


def readable(size: float) -> str:
    """Return a number of bytes with its unit.

    Example:
      >>> readable(1536), readable(95 * 2**30)
      ('1.5 KiB', '95.0 GiB')
    """
    unit = 0
    while round(size, 1) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple

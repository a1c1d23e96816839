"""Quantize tables for serving to about a quarter of their bytes: int8 rows with scale and offset.

Every row has its own scale and offset. This is different from `QuantizationConfig`, which rounds
looked-up rows to one grid per table and leaves the stored table unchanged.

Input: a table `[V, D]`. Output: a `QuantizedTable`, which `serving_lookup` and `export_model`
accept in place of a table.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import refuse
from tpu_embed._types import Array, as_array

_LEVELS = 255
_LOWEST = -128
_SCALE_BITS = 16
_MOST_RANGE = 2.0**127  # 255 scales are then finite
_BLOCK = 2**22  # numbers quantized at a time: bounds the temporaries


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedTable:
    """A table stored as integers: w' = (values + 128) scale + offset.

    A pytree of three arrays, NumPy or JAX; `jax.device_put` moves it.

    Args:
      values: int8 `[V, D]`.
      scale: float32 `[V]`, at least 0.
      offset: float32 `[V]`, the smallest number in each row, rounded to float32.
    """

    values: Any
    scale: Any
    offset: Any

    def dequantized(self) -> Array:
        """Return the rows, float32 `[V, D]`."""
        steps = as_array(self.values).astype(jnp.float32) - _LOWEST
        return steps * as_array(self.scale)[:, None] + as_array(self.offset)[:, None]


def quantize_rows(table: Any) -> QuantizedTable:
    """Quantize each row of a table to 256 evenly spaced values between its extremes.

    With scale = (max w - min w) / 255 and offset = min w, values = round((w - offset) / scale) -
    128. The error |w - w'| is at most scale / 2 + 2⁻²² max |w|; it is 0 for a constant row of a
    float32 or bfloat16 table.

    The scale is rounded up to 16 significant bits. Its product with an 8-bit integer is then exact
    in float32, so w' has the same bits in every program, whether or not the compiler fuses product
    and sum. The scale of a row that is not constant is at least the smallest normal float32.

    Args:
      table: floats `[V, D]`, NumPy or JAX; read block by block.

    Returns:
      A table of NumPy arrays, D + 8 bytes per row.

    Raises:
      TypeError: the table is not an array of floats.
      ValueError: the table does not have rank 2; a row has NaN, infinity, or a range above 2¹²⁷.

    Example:
      >>> small = quantize_rows(np.array([[0.0, 0.5, 255.0], [7.0, 7.0, 7.0]], np.float32))
      >>> small.values.tolist(), small.scale.tolist()
      ([[-128, -128, 127], [-128, -128, -128]], [1.0, 0.0])
      >>> small.dequantized().tolist()
      [[0.0, 0.0, 255.0], [7.0, 7.0, 7.0]]
    """
    _check_table(table)
    rows, dim = table.shape
    made = QuantizedTable(
        np.empty((rows, dim), np.int8),
        np.empty(rows, np.float32),
        np.empty(rows, np.float32),
    )
    step = max(1, _BLOCK // dim)
    for start in range(0, rows, step):
        here = slice(start, start + step)
        block = np.asarray(table[here]).astype(np.float64)
        low, high = block.min(axis=1), block.max(axis=1)
        _check_rows(low, high, start)
        scale, offset = _scale(low, high), low.astype(np.float32)
        made.scale[here], made.offset[here] = scale, offset
        divisor = np.where(scale == 0, 1, scale).astype(np.float64)
        steps = np.rint((block - offset[:, None].astype(np.float64)) / divisor[:, None])
        made.values[here] = np.clip(steps, 0, _LEVELS) + _LOWEST
    return made


def _scale(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return the scale of each row, float32; 0 for a constant row."""
    least = np.finfo(np.float32).smallest_normal
    mantissa, exponent = np.frexp(np.maximum((high - low) / _LEVELS, least))
    # w = mantissa 2^exponent with 1/2 <= mantissa < 1: round the mantissa up to 16 bits
    scale = np.ldexp(np.ceil(np.ldexp(mantissa, _SCALE_BITS)), exponent - _SCALE_BITS)
    return np.where(high == low, 0, scale).astype(np.float32)


def _check_table(table: Any) -> None:
    array = isinstance(table, (np.ndarray, jax.Array))
    if not array or not jnp.issubdtype(table.dtype, jnp.floating):
        refuse(
            "quantize_rows",
            expected="an array of floats",
            got=getattr(table, "dtype", type(table).__name__),
            error=TypeError,
        )
    if table.ndim != 2 or not table.shape[1]:
        refuse("quantize_rows", expected="a table [V, D]", got=f"shape {table.shape}")


def _check_rows(low: np.ndarray, high: np.ndarray, start: int) -> None:
    """Check that every row has finite numbers and a range that is not too large.

    `start` is the number of the first row, for the message.
    """
    most = float(np.finfo(np.float32).max)
    with np.errstate(invalid="ignore"):
        fits = (
            (high - low <= _MOST_RANGE) & (np.abs(low) <= most) & (np.abs(high) <= most)
        )
    if fits.all():
        return
    row = int(np.argmin(fits))
    refuse(
        f"quantize_rows: row {start + row}",
        expected="finite numbers with a range of at most 2**127",
        got=f"numbers from {low[row]} to {high[row]}",
        remedy="find what made them, or serve this table unquantized",
    )

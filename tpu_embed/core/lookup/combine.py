"""Combine the rows of each bag into one activation, and pass gradients back the same way.

A bag is a list of ids that one example has for one feature. With gains a (`core/ids/gains.py`) and
rows w, its activation is Σ a w. If the activation has gradient g, the row of each id has gradient
a g.

Input: the ids of one stack on one device, with the bag and the gain of each. Output: one activation
per bag, or sums of the gradients of rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.layout import Stack
from tpu_embed.kernels import dispatch, rounded, storage
from tpu_embed.kernels.operands import RowsToSum, SumLayout


def quantize(rows: Array, stack: Stack) -> Array:
    """Round rows `[N, D]` to the buckets of the stack's `QuantizationConfig`, if it has one."""
    config = stack.quantization
    if config is None:
        return rows
    # With 5 buckets in [-1, 1], step is 0.5 and rows become -1, -0.5, 0, 0.5 or 1.
    step = (config.upper - config.lower) / (config.num_buckets - 1)
    clipped = jnp.clip(rows, config.lower, config.upper)
    return jnp.floor((clipped - config.lower) / step + 0.5) * step + config.lower


def combine(rows: RowsToSum, layout: SumLayout, stack: Stack) -> tuple[Array, ...]:
    """Return the activations of a stack's features, `[bags, D]` each.

    Args:
      rows: the fetched rows of the ids, and the bag and the gain of each.
      layout: the bags (`StackView.sum_layout`).
      stack: the stack.
    """
    # Rows are quantized before they are weighted and summed. There is one row per id then, so
    # the source becomes the N quantized rows with the index 0 … N - 1 (absent ids get -1).
    if stack.quantization is not None:
        source, index = rows.source, rows.index
        found = storage.widened(dispatch.gather_rows(source, index))
        positions = jax.lax.iota(index.dtype, index.shape[0])
        absent = (index < 0) | (index >= source.shape[0])
        index = jnp.where(absent, jnp.asarray(PADDING_ID, positions.dtype), positions)
        rows = rows._replace(source=quantize(found, stack), index=index, packed=None)
    return dispatch.gather_sum(rows, layout)


def sum_gradients(rows: RowsToSum, num_sums: int, stack: Stack, *, filled: bool = True) -> Array:
    """Return sums of the gradients of rows, `[num_sums, D]`.

    If the exchange rounds sums, these are rounded, and in the format of `Stack.sent_sums_format`.

    Args:
      rows: the gradients of bags, and which of them is added to which sum, in order.
      num_sums: the number of sums.
      stack: the stack.
      filled: whether sums of no gradients must be zeros; see `SumLayout`.
    """
    layout = SumLayout((num_sums,), filled=filled)
    if stack.exchange_dtype is not None:
        return rounded.gather_sum(rows, layout, stack.sent_sums_format)
    (sums,) = dispatch.gather_sum(rows, layout)
    return sums

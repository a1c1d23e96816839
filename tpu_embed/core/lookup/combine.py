"""Combine the rows of each bag into one activation, and pass gradients back the same way.

A bag is a list of ids that one example has for one feature. With gains a (`core/ids/gains.py`) and
rows w, its activation is Σ a w. If the activation has gradient g, the row of each id has gradient
a g.

Input: the ids of one stack on one device, with the bag and the gain of each. Output: one activation
per bag, or sums of the gradients of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.batch import LocalIds
from tpu_embed.core.exchange import FetchedRows, SumRoute
from tpu_embed.core.layout import Stack
from tpu_embed.kernels import dispatch, rounded, storage
from tpu_embed.kernels.formats import RowFormat
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


def combine(
    found: FetchedRows, ids: LocalIds, layout: SumLayout, stack: Stack
) -> tuple[Array, ...]:
    """Return the activations of a stack's features, `[bags, D]` each.

    Args:
      found: the fetched rows of the ids.
      ids: the ids.
      layout: the bags (`Bags.sums`).
      stack: the stack.
    """
    # Rows are quantized before they are weighted and summed. There is one row per id then, so
    # `found` becomes the N quantized rows with the index 0 … N - 1 (absent ids get -1).
    if stack.quantization is not None:
        rows = storage.widened(dispatch.gather_rows(found.source, found.index))
        positions = jax.lax.iota(found.index.dtype, found.index.shape[0])
        absent = (found.index < 0) | (found.index >= found.source.shape[0])
        index = jnp.where(absent, jnp.asarray(PADDING_ID, positions.dtype), positions)
        found = FetchedRows(quantize(rows, stack), index)
    source, index, packed = found
    return dispatch.gather_sum(RowsToSum(source, index, ids.bags, ids.gains, packed), layout)


def sum_gradients(
    gradients: Sequence[Array],
    route: SumRoute,
    num_sums: int,
    *,
    filled: bool = True,
    sent: RowFormat | None = None,
) -> Array:
    """Return sums of the gradients of rows, `[num_sums, D]`.

    Args:
      gradients: the activations' gradients, `[bags, D]` per feature.
      route: which gradients are added to which sum, in order.
      num_sums: the number of sums.
      filled: whether sums of no gradients must be zeros; see `SumLayout`.
      sent: a format of bfloat16: each sum is rounded, and the result is in it. None: they are not.
    """
    rows = RowsToSum(jnp.concatenate(gradients), route.index, route.segments, route.gains)
    layout = SumLayout((num_sums,), filled=filled)
    if sent is not None:
        return rounded.gather_sum(rows, layout, sent)
    (sums,) = dispatch.gather_sum(rows, layout)
    return sums

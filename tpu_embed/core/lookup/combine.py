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
from tpu_embed.core.batch import BagLayout, LocalIds, RoutedIds, StackView
from tpu_embed.core.exchange import FetchedRows, SumRoute
from tpu_embed.core.layout import Stack
from tpu_embed.kernels import dispatch, reference, rounded, storage
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


def activations_of(
    found: FetchedRows, ids: LocalIds | RoutedIds, view: StackView
) -> tuple[Array, ...]:
    """Return the activations of a stack's features: bags `[periods * bags, D]`, or jagged `[C, D]`.

    Args:
      found: the fetched rows, of ids in bags first, then of the places of each jagged feature.
      ids: the ids.
      view: the stack.
    """
    bag_layout, stack, n = view.bags.bag_layout, view.stack, view.num_bag_ids
    combined = iter(())
    if n or not view.bags.jagged:
        of_bags = found._replace(index=found.index[:n]) if view.bags.jagged else found
        combined = iter(combine(of_bags, ids.in_bags(view), bag_layout, stack))
    return tuple(
        _rows_of_places(found, ids.gains, view, number)
        if number in view.bags.jagged_starts
        else next(combined)
        for number in range(len(view.features))
    )


def _rows_of_places(found: FetchedRows, gains: Array | None, view: StackView, number: int) -> Array:
    """Return the activation `[C, D]` of a jagged feature, by its number in the stack."""
    begin, stack = view.num_bag_ids + view.bags.jagged_starts[number], view.stack
    places = slice(begin, begin + (view.bags.shapes[number].capacity or 0))
    index = found.index[places]
    rows = storage.widened(dispatch.gather_rows(found.source, index))
    if stack.quantization is not None:
        # Empty places stay zero.
        absent = (index < 0) | (index >= found.source.shape[0])
        rows = jnp.where(absent[:, None], jnp.zeros_like(rows), quantize(rows, stack))
    rows = rows.astype(stack.compute_dtype)
    return rows if gains is None else rows * gains[places].astype(rows.dtype)[:, None]


def combine(
    found: FetchedRows, ids: LocalIds | RoutedIds, bag_layout: BagLayout, stack: Stack
) -> tuple[Array, ...]:
    """Return the activations of every feature's bags, `[periods * bags, D]` per feature.

    Args:
      found: the fetched rows of ids in bags.
      ids: these ids.
      bag_layout: the bags.
      stack: the stack.
    """
    assert ids.bags is not None, "there are bags to combine"
    # Rows are quantized before they are weighted and summed. There is one row per id then, so
    # `found` becomes the N quantized rows with the index 0 … N - 1 (absent ids get -1).
    if stack.quantization is not None:
        rows = storage.widened(dispatch.gather_rows(found.source, found.index))
        positions = jax.lax.iota(found.index.dtype, found.index.shape[0])
        absent = (found.index < 0) | (found.index >= found.source.shape[0])
        index = jnp.where(absent, jnp.asarray(PADDING_ID, positions.dtype), positions)
        found = FetchedRows(quantize(rows, stack), index)
    source, index, packed = found
    rows = RowsToSum(source, index, ids.bags, ids.gains, packed)
    return dispatch.gather_sum(rows, bag_layout.sums)


def join_gradients(gradients: Sequence[Array], view: StackView) -> Array:
    """Return the gradients of all targets of a stack with jagged features, `[T, D]`.

    Args:
      gradients: per feature, those of its bags `[periods * bags, D]` or its places `[C, D]`.
      view: the stack.
    """
    bag_layout, pairs = view.bags.bag_layout, list(enumerate(gradients))
    of_bags = [gradient for number, gradient in pairs if number not in view.bags.jagged_starts]
    of_places = [gradient for number, gradient in pairs if number in view.bags.jagged_starts]
    if not of_bags:
        return jnp.concatenate(of_places)
    joined = reference.join_features(of_bags, bag_layout.periods, bag_layout.order)
    return jnp.concatenate([joined, *of_places])


def sum_gradients(
    gradients: Sequence[Array],
    bag_layout: BagLayout,
    route: SumRoute,
    num_sums: int,
    *,
    filled: bool = True,
    sent: RowFormat | None = None,
) -> Array:
    """Return sums of the gradients of rows, `[num_sums, D]`.

    Args:
      gradients: the activations' gradients, `[periods * bags, D]` per feature.
      bag_layout: the bags of these gradients.
      route: which gradients are added to which sum, in order.
      num_sums: the number of sums.
      filled: whether sums of no gradients must be zeros; see `SumLayout`.
      sent: a format of bfloat16: each sum is rounded, and the result is in it. None: they are not.
    """
    joined = reference.join_features(gradients, bag_layout.periods, bag_layout.order)
    rows = RowsToSum(joined, route.index, route.segments, route.gains)
    layout = SumLayout((1,), num_sums, filled=filled)
    if sent is not None:
        return rounded.gather_sum(rows, layout, sent)
    (sums,) = dispatch.gather_sum(rows, layout)
    return sums

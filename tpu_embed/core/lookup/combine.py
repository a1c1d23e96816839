"""Combine the rows of each bag into one activation, and pass gradients back the same way.

A bag is a list of ids that one example has for one feature. With weights c (1 if none are given)
and rows w, its activation is (Σ c w) (1 / d), where d depends on the combiner: 1 for sum, Σ c for
mean, √Σ c² for sqrtn. Where d is zero, the activation is zero. If the activation has gradient g,
the row of each id has gradient c (g (1 / d)).

The host has already scaled very large or very small weights of mean and sqrtn to about 1, so that
d, d² and 1 / d fit in float32 (`core/ids/rescale.py`).

Input: the ids of one stack on one device, with the bag and the weight of each. Output: one
activation per bag, or sums of the gradients of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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


class BagEntries(NamedTuple):
    """How the rows of a device's ids combine to bags.

    Attributes:
      bags: int32 `[n]`, the bag of each id, non-decreasing; None without bags.
      weights: `[n]`, what its row is multiplied with; None: all ones.
      factors: `[bags]`, what the sum of each bag is multiplied with; None: all ones.
    """

    bags: Array | None
    weights: Array | None
    factors: Array | None


def bag_entries(ids: LocalIds | RoutedIds, bag_layout: BagLayout, dtype: np.dtype) -> BagEntries:
    """Return how the rows of a device's ids combine; of routed ids the host has computed it.

    Args:
      ids: the ids.
      bag_layout: the bags.
      dtype: the dtype of weights and factors.
    """
    if isinstance(ids, RoutedIds):
        return BagEntries(ids.bags, ids.weights, ids.factors)
    return BagEntries(ids.bags, optional_weights(ids, dtype), factors(ids, bag_layout, dtype))


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
        entries = bag_entries(ids.in_bags(view), bag_layout, stack.compute_dtype)
        of_bags = found._replace(index=found.index[:n]) if view.bags.jagged else found
        combined = iter(combine(of_bags, entries, bag_layout, stack))
    return tuple(
        _rows_of_places(found, ids.weights, view, number)
        if number in view.bags.jagged_starts
        else next(combined)
        for number in range(len(view.features))
    )


def _rows_of_places(
    found: FetchedRows, weights: Array | None, view: StackView, number: int
) -> Array:
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
    return rows if weights is None else reference.scale(rows, weights[places].astype(rows.dtype))


def combine(
    found: FetchedRows, entries: BagEntries, bag_layout: BagLayout, stack: Stack
) -> tuple[Array, ...]:
    """Return the activations of every feature's bags, `[periods * bags, D]` per feature.

    Args:
      found: the fetched rows of ids in bags.
      entries: the bag and the weight of each id.
      bag_layout: the bags.
      stack: the stack.
    """
    assert entries.bags is not None, "there are bags to combine"
    # Rows are quantized before they are weighted and summed. There is one row per id then, so
    # `found` becomes the N quantized rows with the index 0 … N - 1 (absent ids get -1).
    if stack.quantization is not None:
        rows = storage.widened(dispatch.gather_rows(found.source, found.index))
        positions = jax.lax.iota(found.index.dtype, found.index.shape[0])
        absent = (found.index < 0) | (found.index >= found.source.shape[0])
        index = jnp.where(absent, jnp.asarray(PADDING_ID, positions.dtype), positions)
        found = FetchedRows(quantize(rows, stack), index)
    source, index, packed = found
    rows = RowsToSum(source, index, entries.bags, entries.weights, entries.factors, packed)
    return dispatch.gather_sum(rows, bag_layout.sums)


def join_gradients(gradients: Sequence[Array], factors: Array | None, view: StackView) -> Array:
    """Return the gradients of all targets of a stack with jagged features, scaled, `[T, D]`.

    Args:
      gradients: per feature, those of its bags `[periods * bags, D]` or its places `[C, D]`.
      factors: what the gradient of each bag is multiplied with, `[bags]`; None: all ones.
      view: the stack.
    """
    bag_layout, pairs = view.bags.bag_layout, list(enumerate(gradients))
    of_bags = [gradient for number, gradient in pairs if number not in view.bags.jagged_starts]
    of_places = [gradient for number, gradient in pairs if number in view.bags.jagged_starts]
    if not of_bags:
        return jnp.concatenate(of_places)
    joined = reference.join_features(of_bags, bag_layout.periods, bag_layout.order)
    joined = joined if factors is None else reference.scale(joined, factors)
    return jnp.concatenate([joined, *of_places])


def sum_gradients(
    gradients: Sequence[Array],
    factors: Array | None,
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
      factors: what the gradient of each bag is multiplied with, `[bags]`; None: all ones.
      bag_layout: the bags of these gradients.
      route: which gradients are added to which sum, in order.
      num_sums: the number of sums.
      filled: whether sums of no gradients must be zeros; see `SumLayout`.
      sent: a format of bfloat16: each sum is rounded, and the result is in it. None: they are not.
    """
    joined = reference.join_features(gradients, bag_layout.periods, bag_layout.order)
    # Scaled by bag, not by id: a bag has one factor 1 / d for all of its ids.
    scaled = joined if factors is None else reference.scale(joined, factors)
    rows = RowsToSum(scaled, route.index, route.segments, route.weights)
    layout = SumLayout((1,), num_sums, filled=filled)
    if sent is not None:
        return rounded.gather_sum(rows, layout, sent)
    (sums,) = dispatch.gather_sum(rows, layout)
    return sums


def optional_weights(ids: LocalIds, dtype: np.dtype) -> Array | None:
    """Return the weight of every id `[N]`, zero for absent ones; None where all are 1."""
    return None if ids.weights is None else _weights(ids, dtype)


def _weights(ids: LocalIds, dtype: np.dtype) -> Array:
    """Return the weight of every id `[N]`: 1 where none are given, zero for absent ids."""
    weights = (
        jnp.ones(ids.row_ids.shape, dtype) if ids.weights is None else ids.weights.astype(dtype)
    )
    return jnp.where(ids.row_ids < 0, jnp.zeros_like(weights), weights)


def factors(ids: LocalIds, bag_layout: BagLayout, dtype: np.dtype) -> Array | None:
    """Return 1 / d of every bag, `[bags]`, zero where d is zero; None where all are 1."""
    if all(combiner == "sum" for combiner in bag_layout.combiners):
        return None
    d = _denominators(ids, bag_layout, dtype)
    # The inner `where` keeps 1 / 0 out of the program: its derivative would be NaN even where the
    # outer `where` does not choose it.
    zero = d == 0
    return jnp.where(zero, jnp.zeros_like(d), 1.0 / jnp.where(zero, jnp.ones_like(d), d))


def _denominators(ids: LocalIds, bag_layout: BagLayout, dtype: np.dtype) -> Array:
    """Return d of every bag, `[bags]`."""
    weights = _weights(ids, dtype)
    if "sqrtn" not in bag_layout.combiners:
        sums = dispatch.segment_sum(weights, ids.bags, bag_layout.bags)
        return _where_combiner("sum", bag_layout, jnp.ones_like(sums), sums)
    squares = dispatch.segment_sum(weights * weights, ids.bags, bag_layout.bags)
    # Guarded twice for the same reason: the derivative of the square root at 0 is infinite.
    positive = squares > 0
    roots = jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1)), 0)
    if set(bag_layout.combiners) == {"sqrtn"}:
        return roots
    sums = dispatch.segment_sum(weights, ids.bags, bag_layout.bags)
    rest = _where_combiner("sum", bag_layout, jnp.ones_like(sums), sums)
    return _where_combiner("sqrtn", bag_layout, roots, rest)


def _where_combiner(combiner: str, bag_layout: BagLayout, chosen: Array, other: Array) -> Array:
    """Return `chosen` at the bags of a combiner, `other` elsewhere, `[bags]`."""
    # combiners ("sum", "mean") and 3 periods: the mask [2] broadcasts over [3, 2], then [6].
    mask = np.array([c == combiner for c in bag_layout.combiners])
    shape = (bag_layout.periods, len(bag_layout.combiners))
    return jnp.where(mask, chosen.reshape(shape), other.reshape(shape)).reshape(-1)

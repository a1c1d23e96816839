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

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.batch import BagLayout, LocalIds
from tpu_embed.core.exchange import FetchedRows
from tpu_embed.core.layout import Stack
from tpu_embed.kernels import dispatch, reference, storage


def quantize(rows: Array, stack: Stack) -> Array:
    """Round rows `[N, D]` to the buckets of the stack's `QuantizationConfig`, if it has one."""
    config = stack.quantization
    if config is None:
        return rows
    # With 5 buckets in [-1, 1], step is 0.5 and rows become -1, -0.5, 0, 0.5 or 1.
    step = (config.upper - config.lower) / (config.num_buckets - 1)
    clipped = jnp.clip(rows, config.lower, config.upper)
    return jnp.floor((clipped - config.lower) / step + 0.5) * step + config.lower


def combine(found: FetchedRows, ids: LocalIds, form: BagLayout, stack: Stack) -> tuple[Array, ...]:
    """Return the activations of every feature's bags, `[examples * bags, D]` per feature.

    Args:
      found: the fetched rows.
      ids: the bag and the weight of each id.
      form: how the ids combine.
      stack: the stack.
    """
    # Rows are quantized before they are weighted and summed. There is one row per id then, so
    # `found` becomes the N quantized rows with the index 0 … N - 1 (absent ids keep -1).
    if stack.quantization is not None:
        rows = storage.widened(dispatch.gather_rows(found.source, found.index))
        positions = jax.lax.iota(found.index.dtype, found.index.shape[0])
        absent = jnp.asarray(PADDING_ID, positions.dtype)
        found = FetchedRows(quantize(rows, stack), jnp.where(ids.row_ids < 0, absent, positions))
    return dispatch.gather_sum(
        found.source,
        found.index,
        ids.bags,
        weights=optional_weights(ids, stack.compute_dtype),
        factors=factors(ids, form, stack.compute_dtype),
        bags=form.columns,
        examples=form.examples,
    )


def sum_gradients(
    gradients: Sequence[Array],
    ids: LocalIds,
    form: BagLayout,
    order: Array,
    segments: Array,
    num_segments: int,
) -> Array:
    """Return sums of the gradients of rows, `[num_segments, D]`.

    Args:
      gradients: the activations' gradients, `[examples * bags, D]` per feature.
      ids: the ids.
      form: how they were combined.
      order: int32 `[N]`, the ids' positions, sorted by the sum that they go to.
      segments: int32 `[N]`, the sum that the id at `order[i]` goes to, non-decreasing;
        `num_segments` for an id that goes to none.
      num_segments: the number of sums.
    """
    dim = gradients[0].shape[-1]
    # Bags are numbered by example, then by feature. With 2 examples, and features of 1 and 2 bags,
    # gradients [2, D] and [4, D] become [2, 1, D] and [2, 2, D], joined [2, 3, D], then [6, D].
    by_example = [gradient.reshape(form.examples, -1, dim) for gradient in gradients]
    joined = jnp.concatenate(by_example, axis=1).reshape(-1, dim)
    by_bag, weights = factors(ids, form, joined.dtype), optional_weights(ids, joined.dtype)
    return dispatch.gather_sum(
        # Scaled by bag, not by id: a bag has one factor 1 / d for all of its ids.
        joined if by_bag is None else reference.scale(joined, by_bag),
        dispatch.gather_rows(ids.bags, order),
        segments,
        weights=None if weights is None else dispatch.gather_rows(weights, order),
        bags=(1,),
        examples=num_segments,
    )[0]


def optional_weights(ids: LocalIds, dtype: np.dtype) -> Array | None:
    """Return the weight of every id `[N]`, zero for absent ones; None where all are 1."""
    return None if ids.weights is None else _weights(ids, dtype)


def _weights(ids: LocalIds, dtype: np.dtype) -> Array:
    """Return the weight of every id `[N]`: 1 where none are given, zero for absent ids."""
    weights = (
        jnp.ones(ids.row_ids.shape, dtype) if ids.weights is None else ids.weights.astype(dtype)
    )
    return jnp.where(ids.row_ids < 0, jnp.zeros_like(weights), weights)


def factors(ids: LocalIds, form: BagLayout, dtype: np.dtype) -> Array | None:
    """Return 1 / d of every bag, `[bags]`, zero where d is zero; None where all are 1."""
    if all(combiner == "sum" for combiner in form.combiners):
        return None
    d = _denominators(ids, form, dtype)
    # The inner `where` keeps 1 / 0 out of the program: its derivative would be NaN even where the
    # outer `where` does not choose it.
    zero = d == 0
    return jnp.where(zero, jnp.zeros_like(d), 1.0 / jnp.where(zero, jnp.ones_like(d), d))


def _denominators(ids: LocalIds, form: BagLayout, dtype: np.dtype) -> Array:
    """Return d of every bag, `[bags]`."""
    weights = _weights(ids, dtype)
    if "sqrtn" not in form.combiners:
        sums = dispatch.segment_sum(weights, ids.bags, form.bags)
        return _where_combiner("sum", form, jnp.ones_like(sums), sums)
    squares = dispatch.segment_sum(weights * weights, ids.bags, form.bags)
    # Guarded twice for the same reason: the derivative of the square root at 0 is infinite.
    positive = squares > 0
    roots = jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1)), 0)
    if set(form.combiners) == {"sqrtn"}:
        return roots
    sums = dispatch.segment_sum(weights, ids.bags, form.bags)
    rest = _where_combiner("sum", form, jnp.ones_like(sums), sums)
    return _where_combiner("sqrtn", form, roots, rest)


def _where_combiner(combiner: str, form: BagLayout, chosen: Array, other: Array) -> Array:
    """Return `chosen` at the bags of a combiner, `other` elsewhere, `[bags]`."""
    # combiners ("sum", "mean") and 3 examples: the mask [2] broadcasts over [3, 2], then [6].
    mask = np.array([c == combiner for c in form.combiners])
    shape = (form.examples, len(form.combiners))
    return jnp.where(mask, chosen.reshape(shape), other.reshape(shape)).reshape(-1)

"""Rows of a bag become one activation, and the activation's gradient becomes one gradient an id.

Enters: the ids of one stack on one device, with the bag and the weight of each. Leaves: activations
of bags, or sums of the gradients of rows. Called by `lookup.py` and `sums.py`.

With weights c (1 without) and rows w, a bag's activation is (Σ c w) (1 / d), where d is 1 (sum),
Σ c (mean) or √Σ c² (sqrtn), and zero where d is zero. The gradient of an id's row is c (g (1 / d)).
The weights of a mean or sqrtn have been brought near 1 before, where they were far from it, so that
float32 holds d, d² and 1 / d (`rescale.py`).
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
    step = (config.upper - config.lower) / (config.num_buckets - 1)
    clipped = jnp.clip(rows, config.lower, config.upper)
    return jnp.floor((clipped - config.lower) / step + 0.5) * step + config.lower


def combine(found: FetchedRows, ids: LocalIds, form: BagLayout, stack: Stack) -> tuple[Array, ...]:
    """Return the activations of every feature's bags, `[examples * bags, D]` each.

    Args:
      found: the rows.
      ids: their bags and weights.
      form: how they combine.
      stack: the stack.
    """
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
      gradients: of every feature's activations, `[examples * bags, D]` each.
      ids: the ids.
      form: how they were combined.
      order: int32 `[N]`, the positions of the ids in the order of the sums.
      segments: int32 `[N]`, the sum that each of them goes to, non-decreasing; num_segments: none.
      num_segments: n.
    """
    dim = gradients[0].shape[-1]
    by_example = [gradient.reshape(form.examples, -1, dim) for gradient in gradients]
    joined = jnp.concatenate(by_example, axis=1).reshape(-1, dim)
    by_bag, weights = factors(ids, form, joined.dtype), optional_weights(ids, joined.dtype)
    return dispatch.gather_sum(
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
    weights = (
        jnp.ones(ids.row_ids.shape, dtype) if ids.weights is None else ids.weights.astype(dtype)
    )
    return jnp.where(ids.row_ids < 0, jnp.zeros_like(weights), weights)


def factors(ids: LocalIds, form: BagLayout, dtype: np.dtype) -> Array | None:
    """Return 1 / d of every bag, `[bags]`, zero where d is zero; None where all are 1."""
    if all(combiner == "sum" for combiner in form.combiners):
        return None
    d = _denominators(ids, form, dtype)
    zero = d == 0
    return jnp.where(zero, jnp.zeros_like(d), 1.0 / jnp.where(zero, jnp.ones_like(d), d))


def _denominators(ids: LocalIds, form: BagLayout, dtype: np.dtype) -> Array:
    """Return d of every bag, `[bags]`."""
    weights = _weights(ids, dtype)
    if "sqrtn" not in form.combiners:
        sums = dispatch.segment_sum(weights, ids.bags, form.bags)
        return _where_combiner("sum", form, jnp.ones_like(sums), sums)
    squares = dispatch.segment_sum(weights * weights, ids.bags, form.bags)
    positive = squares > 0
    roots = jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1)), 0)
    if set(form.combiners) == {"sqrtn"}:
        return roots
    sums = dispatch.segment_sum(weights, ids.bags, form.bags)
    rest = _where_combiner("sum", form, jnp.ones_like(sums), sums)
    return _where_combiner("sqrtn", form, roots, rest)


def _where_combiner(combiner: str, form: BagLayout, chosen: Array, other: Array) -> Array:
    """Return `chosen` at the bags of a combiner, `other` elsewhere, `[bags]`."""
    mask = np.array([c == combiner for c in form.combiners])
    shape = (form.examples, len(form.combiners))
    return jnp.where(mask, chosen.reshape(shape), other.reshape(shape)).reshape(-1)

"""Rows of a bag become one activation, and the activation's gradient becomes one gradient an id.

Enters: the ids of one stack on one device, with the bag and the weight of each. Leaves: activations
of bags, or gradients of rows. Called by `lookup.py` and `sums.py`.

With weights c (1 without) and rows w, a bag's activation is Σ c w / d, where d is 1 (sum), Σ c
(mean) or √Σ c² (sqrtn), and zero where d is zero. The gradient of an id's row is then c (g / d).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import Array
from tpu_embed.core.layout import Group
from tpu_embed.core.located import BagForm, LocalIds
from tpu_embed.kernels import dispatch


def quantize(rows: Array, group: Group) -> Array:
    """Round rows `[N, D]` to the buckets of the group's `QuantizationConfig`, if it has one."""
    config = group.quantization
    if config is None:
        return rows
    step = (config.upper - config.lower) / (config.num_buckets - 1)
    clipped = jnp.clip(rows, config.lower, config.upper)
    return jnp.floor((clipped - config.lower) / step + 0.5) * step + config.lower


def combine(rows: Array, ids: LocalIds, form: BagForm) -> Array:
    """Return the activation of every bag, `[bags, D]`.

    Args:
      rows: looked-up rows `[N, D]`; those of absent ids are ignored.
      ids: their bags and weights.
      form: how they combine.
    """
    rows = jnp.where((ids.rows < 0)[:, None], jnp.zeros_like(rows), rows)
    if ids.weights is not None:
        rows = jax.lax.optimization_barrier(rows * _weights(ids, rows.dtype)[:, None])
    totals = dispatch.segment_sum(rows, ids.bags, form.bags)
    return _divide(totals, ids, form)


def gradients_in_order(bag_gradients: Array, ids: LocalIds, form: BagForm, order: Array) -> Array:
    """Return the gradient of the row of the id at every position of `order`, `[N, D]`.

    Args:
      bag_gradients: gradients of the activations, `[bags, D]`.
      ids: the ids.
      form: how they were combined.
      order: int32 `[N]`, positions of ids.
    """
    gradients = dispatch.gather_rows(_divide(bag_gradients, ids, form), ids.bags[order])
    if ids.weights is None:
        return gradients
    weights = _weights(ids, gradients.dtype)[order]
    return jax.lax.optimization_barrier(gradients * weights[:, None])


def _weights(ids: LocalIds, dtype: np.dtype) -> Array:
    weights = jnp.ones(ids.rows.shape, dtype) if ids.weights is None else ids.weights.astype(dtype)
    return jnp.where(ids.rows < 0, jnp.zeros_like(weights), weights)


def _divide(values: Array, ids: LocalIds, form: BagForm) -> Array:
    """Return `values / d`, `[bags, D]`; zeros where d is zero."""
    if all(combiner == "sum" for combiner in form.combiners):
        return values
    denominators = _denominators(ids, form, values.dtype)
    zero = denominators == 0
    quotient = values / jnp.where(zero, jnp.ones_like(denominators), denominators)[:, None]
    return jnp.where(zero[:, None], jnp.zeros_like(quotient), quotient)


def _denominators(ids: LocalIds, form: BagForm, dtype: np.dtype) -> Array:
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


def _where_combiner(combiner: str, form: BagForm, chosen: Array, other: Array) -> Array:
    """Return `chosen` at the bags of a combiner, `other` elsewhere, `[bags]`."""
    mask = np.array([c == combiner for c in form.combiners])
    shape = (form.examples, len(form.combiners))
    return jnp.where(mask, chosen.reshape(shape), other.reshape(shape)).reshape(-1)

"""Softmax losses of queries against items, for a part of the queries at a time.

The products of all queries and all items may be more numbers than all rows together. So they are
computed for some queries, whose losses are what is kept, and once more for the gradient.

Input: what there is of queries and of items. Output: one loss per query.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import Array

PRODUCT_NUMBERS = 2**22
"""How many products of queries and items there are at a time, about; 16 MiB of float32."""

LEAST_QUERIES = 64
"""Products are computed of so many queries at a time, or of more, however many the items."""

EXACT = jax.lax.Precision.HIGHEST


class Queries(NamedTuple):
    """What there is of each query; an array that is not given is None.

    Attributes:
      vectors: floats `[…, D]`.
      positives: floats `[…, D]`, the right items; or integers `[…, 1]`, which of the items.
      ids: integers `[…]`, those of the right items.
      log_q: floats `[…]`, those of the right items.
      chosen: integers `[…, N]`, which of the items are negatives of each query.
    """

    vectors: Array
    positives: Array
    ids: Array | None
    log_q: Array | None
    chosen: Array | None


class Items(NamedTuple):
    """What there is of the items that are negatives, `[K]` of each or `[…, N]`.

    Attributes:
      vectors: floats `[K, D]` or `[…, N, D]`.
      ids: integers; None without those of the queries.
      log_q: floats; likewise.
    """

    vectors: Array
    ids: Array | None
    log_q: Array | None


def losses_of(items: Items, scale: Array, queries: Queries) -> Array:
    """Return the losses `[…]` of queries, all products at once."""
    kind = "nd" if items.vectors.ndim == 2 else "...nd"
    wrong = jnp.einsum(f"...d,{kind}->...n", queries.vectors, items.vectors, precision=EXACT)
    if jnp.issubdtype(queries.positives.dtype, jnp.integer):
        right = _take(wrong, queries.positives)[..., 0]
    else:
        right = jnp.einsum("...d,...d->...", queries.vectors, queries.positives, precision=EXACT)
    right, wrong = right / scale, wrong / scale
    if queries.log_q is not None and items.log_q is not None:
        right, wrong = right - queries.log_q, wrong - items.log_q
    differences = wrong - right[..., None]
    if queries.ids is not None and items.ids is not None:
        left_out = (items.ids == queries.ids[..., None]) | (items.ids < 0)
        differences = jnp.where(left_out, -jnp.inf, differences)
    if queries.chosen is not None:
        chosen = queries.chosen
        differences = jnp.where(chosen < 0, -jnp.inf, _take(differences, chosen))
    losses = _log_sum(differences)
    return losses if queries.ids is None else jnp.where(queries.ids < 0, 0, losses)


def losses_in_parts(items: Items, scale: Array, queries: Queries) -> Array:
    """Return the losses `[…, C]` of queries, all of which have the same K items to choose from."""
    *lead, size = queries.vectors.shape[:-1]
    at, count = len(lead), math.prod(lead) * size
    wanted = count * len(items.vectors) // PRODUCT_NUMBERS
    most = min(size, count // LEAST_QUERIES)
    # 2ᵖ parts, which divide most C: more than are wanted, but no more than may be. ⌈C / 2ᵖ⌉ queries
    # each are fewer parts where C is small: 50 queries in 32 parts are 2 each, in 25 parts.
    each = -(-size >> max(min(wanted.bit_length(), most.bit_length() - 1), 0))
    parts = -(-size // max(each, 1))
    of_part = functools.partial(losses_of, items, scale)
    # Inside a jit with explicit axes, the queries of a part must not lie on some devices only.
    if parts <= 1 or jax.typeof(queries.vectors).sharding.spec[at] is not None:
        return of_part(queries)

    # Query c is in part c mod n: [C] -> [C / n, n] -> [n, C / n]. If C is split over devices, each
    # of them has a share of every part.
    def split(array: Array) -> Array:
        padded = jnp.pad(array, [(0, -size % parts if a == at else 0) for a in range(array.ndim)])
        by_part = padded.reshape(*lead, -1, parts, *array.shape[at + 1 :])
        return jnp.moveaxis(by_part, at + 1, 0)

    found = jax.lax.map(jax.checkpoint(of_part, prevent_cse=False), jax.tree.map(split, queries))
    return jnp.moveaxis(found, 0, at + 1).reshape(*lead, -1)[..., :size]


def _take(array: Array, indices: Array) -> Array:
    """Return the elements along the last axis; NaN for an index that is outside of it."""
    inside = (indices >= 0) & (indices <= min(array.shape[-1] - 1, np.iinfo(indices.dtype).max))
    at = jnp.where(inside, indices, 0).astype(jnp.int32)
    found = jnp.take_along_axis(array, at, axis=-1, mode="promise_in_bounds")
    return jnp.where(inside, found, jnp.nan)


def _log_sum(differences: Array) -> Array:
    """Return log(1 + Σ exp(differences)) over the last axis; the 1 is that of the right item."""
    # The right one's difference to itself is 0. A loss near 0 keeps its digits, which
    # log Σ exp(logits) - logit would lose where logits are large.
    own = jnp.zeros_like(differences.sum(axis=-1, keepdims=True))  # also without differences
    return jax.nn.logsumexp(jnp.concatenate([own, differences], axis=-1), axis=-1)

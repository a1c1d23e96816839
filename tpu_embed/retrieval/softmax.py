"""Softmax losses of retrieval: the right item against others, sampled instead of all of them.

A batch's other items serve as negatives (`in_batch_softmax`), or negatives are drawn and looked up
in the same table as an ordinary feature (`sampled_softmax`). Both take vectors, so it does not
matter whether they are activations of an engine, of a layer, or what towers make of them. Under a
jit with arrays that are split over devices, the negatives are those of the global batch.

If each query has negatives of its own, their rows are still looked up once: `chosen` says which of
them each query has. Then, as with the same negatives for all, the products of all queries and all
negatives are what costs. They are computed for a part of the queries at a time, and again for the
gradient, so that they are never there as a whole.

Three things are corrected. Items that are sampled more often get a lower logit, by the log of the
probability with which they are drawn (`log_q`, see `scores.py`). An item that is drawn as a
negative where it is the right one, an accidental hit, is left out. And padding is no item.

Input: vectors. Output: one loss per example.

Reference:
  Yi et al., "Sampling-bias-corrected neural modeling for large corpus item recommendations", 2019;
  Bengio and Senécal, "Adaptive importance sampling to accelerate training of a neural probabilistic
  language model", 2008.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import check_ids, check_same_ids, refuse
from tpu_embed._types import Array, ArrayLike
from tpu_embed.core.layout import gather_explicit
from tpu_embed.retrieval.scores import (
    Score,
    as_given,
    check_below,
    check_score,
    check_temperature,
    scored,
)


def in_batch_softmax(
    queries: ArrayLike,
    candidates: ArrayLike,
    *,
    log_q: ArrayLike | None = None,
    candidate_ids: ArrayLike | None = None,
    score: Score = "dot",
    temperature: float | ArrayLike = 1.0,
) -> Array:
    """Return -log softmax of each example's own item among the items of the batch.

    logit[i, j] = score(queries[i], candidates[j]) / temperature - log_q[j], and
    loss[i] = log Σⱼ exp(logit[i, j] - logit[i, i]).

    Args:
      queries: floats `[B, D]`.
      candidates: floats `[B, D]`; the one of example i is its right item.
      log_q: floats `[B]`, the log probability with which each candidate is drawn; None: all alike.
      candidate_ids: integers `[B]`. Given them, other places with the id of an example's own item
        are no negatives, and a place with -1 is padding: no negative, and its loss is 0.
      score: `"dot"`, the inner product; or `"cosine"`, that of vectors of length one.
      temperature: by what scores are divided, one number above 0.

    Returns:
      `[B]`, float32 (float64 if the vectors are).

    Raises:
      ValueError: shapes that do not fit; another score; a temperature that is not above 0.
      TypeError: vectors that are not floats, or ids that are not integers.

    Example:
      >>> queries, items = jnp.array([[2.0, 0], [0, 2], [1, 1]]), jnp.eye(2)[jnp.array([0, 1, 0])]
      >>> losses = in_batch_softmax(queries, items, candidate_ids=jnp.array([7, 8, 7]))
      >>> print(np.asarray(losses).round(3))
      [0.127 0.24  0.693]
    """
    what = "in_batch_softmax"
    queries, candidates = _vectors(what, queries=queries, candidates=candidates)
    if queries.ndim != 2:
        refuse(
            f"{what}: queries", expected="shape [B, D]", got=f"{list(queries.shape)}"
        )
    _check_like_queries(what, "candidates", candidates, queries)
    size, dtype = len(queries), queries.dtype
    scale = check_temperature(what, temperature, dtype)
    ids = (
        None
        if candidate_ids is None
        else _ids(what, "candidate_ids", candidate_ids, (size,))
    )
    if ids is not None:
        queries, candidates = (
            _without_padding(ids, queries),
            _without_padding(ids, candidates),
        )
    score = check_score(what, score)
    queries, candidates = scored(queries, score), scored(candidates, score)
    right = jnp.einsum("bd,bd->b", queries, candidates, precision=EXACT) / scale
    logits = jnp.matmul(queries, gather_explicit(candidates).T, precision=EXACT) / scale
    if log_q is not None:
        drawn = _numbers(what, "log_q", log_q, (size,), dtype)
        right, logits = right - drawn, logits - gather_explicit(drawn)[None, :]
    own = jnp.eye(size, dtype=bool)
    # The own item's difference is 0 whatever the two products above are rounded to.
    differences = jnp.where(own, 0, logits - right[:, None])
    if ids is None:
        return jax.nn.logsumexp(differences, axis=-1)
    others = gather_explicit(ids)[None, :]
    left_out = ~own & ((ids[:, None] == others) | (others < 0))
    losses = jax.nn.logsumexp(jnp.where(left_out, -jnp.inf, differences), axis=-1)
    return jnp.where(ids < 0, 0, losses)


def sampled_softmax(
    queries: ArrayLike,
    positives: ArrayLike,
    negatives: ArrayLike,
    *,
    chosen: ArrayLike | None = None,
    positive_ids: ArrayLike | None = None,
    negative_ids: ArrayLike | None = None,
    positive_log_q: ArrayLike | None = None,
    negative_log_q: ArrayLike | None = None,
    score: Score = "dot",
    temperature: float | ArrayLike = 1.0,
) -> Array:
    """Return -log softmax of the right item of each query among itself and sampled ones.

    logit = score(query, item) / temperature - log_q of the item, and
    loss = log(1 + Σₙ exp(logit[negative n] - logit[positive])).

    With negatives `[K, D]`, about 2²² products of queries and negatives are there at a time, and
    never fewer than those of 64 queries; time is in proportion to K for each query. Where a query
    has few of many, N · D below K, `negatives[chosen]` as negatives `[…, N, D]` may be faster.

    Args:
      queries: floats `[…, D]`: `[B, D]`; `[B, L, D]` for the places of sequences; `[S, C, D]` for
        those of a `Jagged`, or under a `jax.vmap` over its replicas `[C, D]`.
      positives: floats `[…, D]`, the right item of each query; or integers `[…]`, which of the
        negatives `[K, D]` it is.
      negatives: floats `[K, D]`, for all queries; or `[…, N, D]`, some for each.
      chosen: integers `[…, N]`, which of the negatives `[K, D]` each query has, -1 for none; None:
        all of them. What is chosen twice counts twice.
      positive_ids: integers `[…]`; -1 is padding, whose loss is 0.
      negative_ids: integers `[K]` or `[…, N]`, as the negatives; a negative with the id of the
        positive is left out, and so is -1, padding. Ids are given of both or of neither.
      positive_log_q: floats `[…]`, the log probability with which the sampler draws each positive.
      negative_log_q: floats `[K]` or `[…, N]`, that of each negative. Both or neither.
      score: `"dot"`, the inner product; or `"cosine"`, that of vectors of length one.
      temperature: by what scores are divided, one number above 0.

    Returns:
      `[…]`, float32 (float64 if the vectors are). An index that a jit is given, which cannot be
      checked, makes the loss of its query NaN if it is K or more, or the positive's below 0.

    Raises:
      ValueError: shapes that do not fit; an index of K or more; ids, or log probabilities, of one
        side only; another score; a temperature that is not above 0.
      TypeError: vectors that are not floats, ids or indices that are not integers.

    Example:
      >>> query, positive = jnp.array([[1.0, 0.0]]), jnp.array([[1.0, 1.0]])
      >>> negatives = jnp.array([[0.0, 1.0], [1.0, 1.0]])  # the second one is the positive
      >>> ids = {"positive_ids": jnp.array([5]), "negative_ids": jnp.array([9, 5])}
      >>> print(np.asarray(sampled_softmax(query, positive, negatives, **ids)).round(3))
      [0.313]
      >>> drawn = jnp.array([[0, 0, 1]])  # the first one twice
      >>> print(np.asarray(sampled_softmax(query, [1], negatives, chosen=drawn, **ids)).round(3))
      [0.551]
    """
    what = "sampled_softmax"
    right = as_given(positives)
    by_index = jnp.issubdtype(right.dtype, jnp.integer)
    besides = {} if by_index else {"positives": right}
    of_query, drawn, *of_right = _vectors(
        what, queries=queries, negatives=negatives, **besides
    )
    if of_query.ndim < 2:
        refuse(
            f"{what}: queries",
            expected="shape [B, D] or more",
            got=f"{list(of_query.shape)}",
        )
    for array in of_right:
        _check_like_queries(what, "positives", array, of_query)
    *before, dim = of_query.shape
    # All queries choose from the same negatives, [K, D].
    shared = by_index or chosen is not None
    fits = drawn.ndim == 2 or (drawn.shape[:-2] == tuple(before) and not shared)
    if drawn.ndim < 2 or drawn.shape[-1] != dim or not fits:
        each = "" if shared else f" or {[*before, 'N', dim]}".replace("'", "")
        refuse(
            f"{what}: negatives",
            expected=f"shape [K, {dim}]{each}",
            got=f"{list(drawn.shape)}",
        )
    lead, inner = of_query.shape[:-1], drawn.shape[:-1]  # […], and [K] or […, N]
    own, others = _pair("ids", positive_ids, negative_ids, (lead, inner), _ids)
    numbers = functools.partial(_numbers, dtype=drawn.dtype)
    own_log_q, log_q = _pair(
        "log_q", positive_log_q, negative_log_q, (lead, inner), numbers
    )
    score, scale = (
        check_score(what, score),
        check_temperature(what, temperature, drawn.dtype),
    )
    if by_index:
        of_right = [_indices("positives", right, lead, len(drawn))[..., None]]
    which = None
    if chosen is not None:
        which = _indices("chosen", chosen, (*lead, *np.shape(chosen)[-1:]), len(drawn))
    if own is not None and others is not None:
        own, others = check_same_ids(
            f"{what}: positive_ids and negative_ids", own, others
        )
        without = functools.partial(_without_padding, own)
        of_query, of_right, which = jax.tree.map(without, (of_query, of_right, which))
        drawn = _without_padding(others, drawn)
    rows = of_right[0] if by_index else scored(of_right[0], score)
    of_queries = Queries(scored(of_query, score), rows, own, own_log_q, which)
    items = Items(scored(drawn, score), others, log_q)
    if drawn.ndim > 2:
        return losses_of(items, scale, of_queries)
    return losses_in_parts(jax.tree.map(gather_explicit, items), scale, of_queries)


def _vectors(what: str, **given: Any) -> list[Array]:
    """Return arrays in the widest of their dtypes, float32 at least.

    Raises:
      TypeError: one does not have floats.
    """
    arrays = {name: as_given(x) for name, x in given.items()}
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            refuse(
                f"{what}: {name}",
                expected="floats",
                got=f"{array.dtype}",
                remedy="the values of a Jagged are its attribute of that name",
                error=TypeError,
            )
    wide = any(array.dtype == np.float64 for array in arrays.values())
    dtype = jnp.float64 if wide and jax.config.read("jax_enable_x64") else jnp.float32
    return [jnp.asarray(array, dtype) for array in arrays.values()]


def _check_like_queries(what: str, name: str, array: Array, queries: Array) -> None:
    if array.shape != queries.shape:
        refuse(
            f"{what}: {name}",
            expected=f"the shape of queries, {list(queries.shape)}",
            got=f"{list(array.shape)}",
        )


def _pair(
    kind: str,
    positive: Any,
    negative: Any,
    shapes: tuple[Any, Any],
    convert: Callable[..., Array],
) -> tuple[Array | None, Array | None]:
    """Return ids, or log probabilities, of both sides as arrays; None if neither is given.

    Raises:
      ValueError: one side is given; besides, what `convert` raises.
    """
    what = "sampled_softmax"
    if (positive is None) != (negative is None):
        refuse(
            what,
            expected=f"positive_{kind} and negative_{kind}, or neither",
            got=f"only {'negative' if positive is None else 'positive'}_{kind}",
        )
    if positive is None:
        return None, None
    sides = zip(("positive", "negative"), (positive, negative), shapes, strict=True)
    own, others = (
        convert(what, f"{side}_{kind}", given, shape) for side, given, shape in sides
    )
    return own, others


def _without_padding(ids: Array, array: Array) -> Array:
    """Return vectors or indices `[…, n]` with zeros where the ids `[…]` are padding.

    A tower may make NaN of padding. Times a gradient of 0, that would be NaN for every example.
    """
    return jnp.where(ids[..., None] < 0, 0, array)


def _numbers(
    what: str, name: str, given: Any, shape: tuple[int, ...], dtype: Any
) -> Array:
    return _of_shape(f"{what}: {name}", jnp.asarray(given, dtype), shape)


def _ids(what: str, name: str, given: Any, shape: tuple[int, ...]) -> Array:
    """Return ids of a shape.

    Raises:
      TypeError: they are not integers.
      ValueError: another shape, or numbers that JAX would cut to 32 bits.
    """
    return _of_shape(f"{what}: {name}", check_ids(f"{what}: {name}", given), shape)


def _of_shape(what: str, array: Array, shape: tuple[int, ...]) -> Array:
    if array.shape != shape:
        refuse(what, expected=f"shape {list(shape)}", got=f"{list(array.shape)}")
    return array


def _indices(name: str, given: Any, shape: tuple[int, ...], items: int) -> Array:
    """Return indices of K items.

    Raises:
      TypeError, ValueError: as for ids; one that is known is K or more.
    """
    array = _ids("sampled_softmax", name, given, shape)
    expected = "indices below the number of negatives, K"
    check_below(f"sampled_softmax: {name}", given, items, expected=expected)
    return array


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
    wrong = jnp.einsum(
        f"...d,{kind}->...n", queries.vectors, items.vectors, precision=EXACT
    )
    if jnp.issubdtype(queries.positives.dtype, jnp.integer):
        right = _take(wrong, queries.positives)[..., 0]
    else:
        right = jnp.einsum(
            "...d,...d->...", queries.vectors, queries.positives, precision=EXACT
        )
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
    def split(array):
        padded = jnp.pad(
            array, [(0, -size % parts if a == at else 0) for a in range(array.ndim)]
        )
        by_part = padded.reshape(*lead, -1, parts, *array.shape[at + 1 :])
        return jnp.moveaxis(by_part, at + 1, 0)

    found = jax.lax.map(
        jax.checkpoint(of_part, prevent_cse=False), jax.tree.map(split, queries)
    )
    return jnp.moveaxis(found, 0, at + 1).reshape(*lead, -1)[..., :size]


def _take(array: Array, indices: Array) -> Array:
    """Return the elements along the last axis; NaN for an index that is outside of it."""
    inside = (indices >= 0) & (
        indices <= min(array.shape[-1] - 1, np.iinfo(indices.dtype).max)
    )
    at = jnp.where(inside, indices, 0).astype(jnp.int32)
    found = jnp.take_along_axis(array, at, axis=-1, mode="promise_in_bounds")
    return jnp.where(inside, found, jnp.nan)


def _log_sum(differences: Array) -> Array:
    """Return log(1 + Σ exp(differences)) over the last axis; the 1 is that of the right item."""
    # The right one's difference to itself is 0. A loss near 0 keeps its digits, which
    # log Σ exp(logits) - logit would lose where logits are large.
    # Also without differences.
    own = jnp.zeros_like(differences.sum(axis=-1, keepdims=True))
    return jax.nn.logsumexp(jnp.concatenate([own, differences], axis=-1), axis=-1)

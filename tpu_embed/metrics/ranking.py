"""How well scores rank: AUC and normalized entropy of clicks, recall and NDCG of retrieved items.

All of them are functions for a jit or outside of it, and give NaN where the figure is not defined:
inside a jit nothing can be raised.

Input: scores and labels, or ids that were retrieved and ids that were right. Output: one number.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import check_ids, check_int, check_same_ids, refuse
from tpu_embed._types import Array, ArrayLike
from tpu_embed.core.layout import gather_explicit


def auc(
    scores: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None
) -> Array:
    """Return the area under the ROC curve: how often a positive has a higher score than a negative.

    auc = Σ w⁺ w⁻ ([s⁺ > s⁻] + ½ [s⁺ = s⁻]) / (Σ w⁺ Σ w⁻), over all pairs of a positive and a
    negative example; it takes one sort. Without weights, pairs are counted in integers.

    Args:
      scores: floats `[N]`, logits or probabilities.
      labels: `[N]`, 1 or True for positives, 0 or False for negatives.
      weights: `[N]`, at least 0, or bool to leave examples out (`labels >= 0`, where -1 is
        padding); None: all are 1.

    Returns:
      A float32 number (float64 if scores are). NaN if there is one class only, or if a score or
      label that counts is NaN.

    Raises:
      ValueError: arrays of different shapes, or of more than one axis.
      TypeError: something else than numbers.

    Example:
      >>> float(auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([0, 0, 1, 1])))
      0.875
    """
    scores, positive, weights = _checked("auc", "scores", scores, labels, weights)
    if not scores.size:
        return jnp.full((), jnp.nan, scores.dtype)
    missing = jnp.any(jnp.isnan(scores) & (weights > 0))
    # Examples that do not count take part with weight 0, wherever they are sorted to.
    scores, positive, weights = jax.lax.sort((scores, positive, weights), num_keys=1)
    none = jnp.zeros((), weights.dtype)
    upper, lower = (
        jnp.where(positive, weights, none),
        jnp.where(positive, none, weights),
    )
    # Of each example, the negatives with lower scores, and those with scores up to its own. With
    # the scores 1 2 2 3, all negative, these are 0 1 1 3 and 1 3 3 4. They never fall along the
    # sorted examples, so a running maximum spreads what is known where a run of ties begins.
    total = jax.lax.associative_scan(jnp.add, lower)
    ties = jnp.concatenate([jnp.zeros(1, bool), scores[1:] == scores[:-1]])
    below = jax.lax.associative_scan(jnp.maximum, jnp.where(ties, none, total - lower))
    last = jnp.concatenate([~ties[1:], jnp.ones(1, bool)])
    most = jnp.where(last, total, total[-1])
    up_to = jax.lax.associative_scan(jnp.minimum, most, reverse=True)
    before = below.astype(scores.dtype) + up_to.astype(scores.dtype)
    before /= 2 * total[-1].astype(scores.dtype)
    area = _sum(upper.astype(scores.dtype) * before) / _sum(upper).astype(scores.dtype)
    return jnp.where(missing, jnp.nan, area)


def normalized_entropy(
    logits: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None
) -> Array:
    """Return the mean log loss divided by the entropy of the mean label.

    ne = -Σ w (y log p + (1 - y) log(1 - p)) / Σ w, divided by -(m log m + (1 - m) log(1 - m)) with
    p = sigmoid(logit) and m = Σ w y / Σ w. A model that only knows m has 1; less is better.

    Args:
      logits: floats `[N]`. Of probabilities p, give log(p) - log1p(-p).
      labels: `[N]`, 1 or True for positives, 0 or False for negatives.
      weights: as for `auc`.

    Returns:
      A float32 number (float64 if logits are). NaN if there is one class only, or if a logit or
      label that counts is NaN.

    Raises:
      ValueError: arrays of different shapes, or of more than one axis.
      TypeError: something else than numbers.

    Reference:
      He et al., "Practical lessons from predicting clicks on ads at Facebook", 2014.

    Example:
      >>> float(normalized_entropy(np.zeros(4), np.array([1, 0, 0, 1])))
      1.0
    """
    logits, positive, weights = _checked(
        "normalized_entropy", "logits", logits, labels, weights
    )
    # -log p of a positive is softplus(-logit), -log(1 - p) of a negative softplus(logit).
    each = jax.nn.softplus(jnp.where(positive, -logits, logits))
    wide = weights.astype(logits.dtype)
    none = jnp.zeros((), weights.dtype)
    sides = [_sum(jnp.where(kind, weights, none)) for kind in (positive, ~positive)]
    of_class = jnp.stack(sides).astype(logits.dtype)
    shares = of_class / of_class.sum()
    entropy = -(shares * jnp.log(shares)).sum()  # 0 log 0 is NaN: one class only
    # Selected, not multiplied: what does not count may be NaN.
    loss = _sum(jnp.where(wide > 0, wide * each, jnp.zeros_like(each))) / of_class.sum()
    return loss / entropy


def recall_at_k(
    ids: ArrayLike,
    relevant: ArrayLike,
    k: int | None = None,
    *,
    weights: ArrayLike | None = None,
) -> Array:
    """Return which share of a query's relevant items is among its first k, as a mean over queries.

    Args:
      ids: integers `[B, K]`, all different in a line, best first, as `retrieval.top_k` returns
        them; -1 for none.
      relevant: integers `[B, R]`, all different in a line; -1 is padding.
      k: how many of the ids count; None: all.
      weights: `[B]`, at least 0, or bool; None: all are 1. Queries without relevant items never
        count.

    Returns:
      A float32 number; NaN if no query counts.

    Raises:
      ValueError: shapes that do not fit; k that is not in [1, K]; ids that JAX would cut.
      TypeError: ids that are not integers.

    Example:
      >>> print(f"{recall_at_k(np.array([[3, 1, 4]]), np.array([[4, 1, 5, -1]]), 2):.4f}")
      0.3333
    """
    hits, count, weights = _hits("recall_at_k", ids, relevant, k, weights)
    found = hits.sum(axis=1, dtype=jnp.int32).astype(jnp.float32)
    return _mean(found / jnp.maximum(count, 1).astype(jnp.float32), weights)


def ndcg_at_k(
    ids: ArrayLike,
    relevant: ArrayLike,
    k: int | None = None,
    *,
    weights: ArrayLike | None = None,
) -> Array:
    """Return the normalized discounted cumulative gain of the first k ids, as a mean over queries.

    A relevant item at place i, counted from 0, gains 1 / log2(i + 2). A query's sum is divided by
    the most that could be had, which is that of min(k, relevant items) at the first places.

    Args:
      ids: as for `recall_at_k`.
      relevant: as for `recall_at_k`.
      k: how many of the ids count; None: all.
      weights: as for `recall_at_k`.

    Returns:
      A float32 number; NaN if no query counts.

    Raises:
      ValueError: shapes that do not fit; k that is not in [1, K]; ids that JAX would cut.
      TypeError: ids that are not integers.

    Example:
      >>> print(f"{ndcg_at_k(np.array([[3, 1, 4]]), np.array([[1]])):.4f}")
      0.6309
    """
    hits, count, weights = _hits("ndcg_at_k", ids, relevant, k, weights)
    gains = 1 / np.log2(np.arange(hits.shape[1]) + 2)
    most = jnp.asarray(np.cumsum(gains), jnp.float32)
    if not len(gains):
        return _mean(jnp.zeros_like(weights), weights)
    best = most[jnp.clip(count - 1, 0, len(gains) - 1)]
    gained = jnp.where(hits, jnp.asarray(gains, jnp.float32), jnp.float32(0)).sum(
        axis=1
    )
    return _mean(gained / best, weights)


def _checked(
    what: str, first: str, scores: Any, labels: Any, weights: Any
) -> tuple[Array, Array, Array]:
    """Return floats, whether they are of positives, and weights: int32 of bools, else floats."""
    scores = _array(f"{what}: {first}", scores)
    wide = scores.dtype == jnp.float64
    scores = scores.astype(jnp.float64 if wide else jnp.float32)
    labels = _array(f"{what}: labels", labels)
    given = jnp.ones(scores.shape, bool)
    if weights is not None:
        given = _array(f"{what}: weights", weights)
    for name, array in {"labels": labels, "weights": given}.items():
        if scores.ndim != 1 or array.shape != scores.shape:
            refuse(
                what,
                expected="arrays [N] of one length",
                got=f"{first} {list(scores.shape)}, {name} {list(array.shape)}",
            )
    labels = labels.astype(scores.dtype)
    # Only bools are counted in integers: weights that are integers may have a sum beyond 2³¹.
    return (
        jnp.where(jnp.isnan(labels), jnp.nan, scores),
        labels > 0,
        given.astype(jnp.int32 if given.dtype == bool else scores.dtype),
    )


def _hits(
    what: str, ids: Any, relevant: Any, k: int | None, weights: Any
) -> tuple[Array, Array, Array]:
    """Return which of the first k ids are relevant, and counts and weights of the queries.

    Returns:
      bool `[B, k]`; how many relevant items each query has, int32 `[B]`; float32 `[B]`, 0 for a
      query without any.
    """
    ids = gather_explicit(check_ids(f"{what}: ids", ids))
    relevant = gather_explicit(check_ids(f"{what}: relevant", relevant))
    if ids.ndim != 2 or relevant.ndim != 2 or len(ids) != len(relevant):
        refuse(
            what,
            expected="ids [B, K] and relevant [B, R]",
            got=f"{list(ids.shape)} and {list(relevant.shape)}",
        )
    k = ids.shape[1] if k is None else check_int(f"{what}: k", k, minimum=1)
    if k > ids.shape[1]:
        refuse(
            what,
            expected=f"k of at most {ids.shape[1]}, as there are so many ids",
            got=f"{k}",
        )
    ids, relevant = check_same_ids(f"{what}: ids and relevant", ids, relevant)
    first = ids[:, :k]
    hits = (first[:, :, None] == relevant[:, None, :]).any(axis=-1) & (first >= 0)
    count = (relevant >= 0).sum(axis=1, dtype=jnp.int32)
    given = jnp.ones(len(ids), jnp.float32)
    if weights is not None:
        given = _array(f"{what}: weights", weights)
    if given.shape != count.shape:
        refuse(
            f"{what}: weights",
            expected=f"shape [{len(ids)}]",
            got=f"{list(given.shape)}",
        )
    return hits, count, jnp.where(count > 0, given.astype(jnp.float32), jnp.float32(0))


def _array(what: str, given: Any) -> Array:
    """Return numbers, gathered from all devices, because all of them are sorted or summed.

    Raises:
      TypeError: they are something else.
    """
    array = given if isinstance(given, jax.Array) else np.asarray(given)
    kind = array.dtype
    if not any(
        jnp.issubdtype(kind, one) for one in (jnp.bool_, jnp.integer, jnp.floating)
    ):
        refuse(
            what,
            expected="numbers",
            got=f"{kind}",
            remedy="give an array of floats, integers or bools",
            error=TypeError,
        )
    if isinstance(array, np.ndarray) and kind.kind in "iu" and kind.itemsize > 4:
        array = array.astype(np.float64)  # JAX would cut integers to 32 bits
    return gather_explicit(jnp.asarray(array))


def _mean(values: Array, weights: Array) -> Array:
    return _sum(values * weights) / _sum(weights)


def _sum(values: Array) -> Array:
    """Sum `[N]` by adding neighbours until one is left, which keeps the rounding error small."""
    # [a, b, c] is padded to [a, b, c, 0], becomes [a + b, c], then [a + b + c].
    while values.shape[0] > 1:
        values = jnp.pad(values, (0, values.shape[0] % 2))
        values = values[0::2] + values[1::2]
    return values.sum()

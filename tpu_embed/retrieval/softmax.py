"""Softmax losses of retrieval: the right item against others, sampled instead of all of them.

A batch's other items serve as negatives (`in_batch_softmax`), or negatives are drawn and looked up
in the same table as an ordinary feature (`sampled_softmax`). Both take vectors, so it does not
matter whether they are activations of an engine, of a layer, or what towers make of them. Under a
jit with arrays that are split over devices, the negatives are those of the global batch.

Three things are corrected. Items that are sampled more often get a lower logit, by the log of the
probability with which they are drawn (`log_q`, see `sampling.py`). An item that is drawn as a
negative where it is the right one, an accidental hit, is left out. And padding is no item.

Input: vectors. Output: one loss per example.

Reference:
  Yi et al., "Sampling-bias-corrected neural modeling for large corpus item recommendations", 2019;
  Bengio and Senécal, "Adaptive importance sampling to accelerate training of a neural probabilistic
  language model", 2008.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import check_ids, check_same_ids, is_number, message
from tpu_embed._types import Array, ArrayLike
from tpu_embed.core.layout import gather_explicit

_EXACT = jax.lax.Precision.HIGHEST


def in_batch_softmax(
    queries: ArrayLike,
    candidates: ArrayLike,
    *,
    log_q: ArrayLike | None = None,
    candidate_ids: ArrayLike | None = None,
    temperature: float | ArrayLike = 1.0,
) -> Array:
    """Return -log softmax of each example's own item among the items of the batch.

    logit[i, j] = ⟨queries[i], candidates[j]⟩ / temperature - log_q[j], and
    loss[i] = log Σⱼ exp(logit[i, j] - logit[i, i]).

    Args:
      queries: floats `[B, D]`.
      candidates: floats `[B, D]`; the one of example i is its right item.
      log_q: floats `[B]`, the log probability with which each candidate is drawn; None: all alike.
      candidate_ids: integers `[B]`. Given them, other places with the id of an example's own item
        are no negatives, and a place with -1 is padding: no negative, and its loss is 0.
      temperature: by what the products are divided, one number above 0.

    Returns:
      `[B]`, float32 (float64 if the vectors are).

    Raises:
      ValueError: shapes that do not fit; a temperature that is not above 0.
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
        got = f"{list(queries.shape)}"
        raise ValueError(message(f"{what}: queries", expected="shape [B, D]", got=got))
    _check_like_queries(what, "candidates", candidates, queries)
    size, dtype = len(queries), queries.dtype
    scale = _scale(what, temperature, dtype)
    ids = None if candidate_ids is None else _ids(what, "candidate_ids", candidate_ids, (size,))
    if ids is not None:
        queries, candidates = _without_padding(ids, queries), _without_padding(ids, candidates)
    right = jnp.einsum("bd,bd->b", queries, candidates, precision=_EXACT) / scale
    logits = jnp.matmul(queries, gather_explicit(candidates).T, precision=_EXACT) / scale
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
    positive_ids: ArrayLike | None = None,
    negative_ids: ArrayLike | None = None,
    positive_log_q: ArrayLike | None = None,
    negative_log_q: ArrayLike | None = None,
    temperature: float | ArrayLike = 1.0,
) -> Array:
    """Return -log softmax of the right item of each example among itself and sampled ones.

    logit = ⟨query, item⟩ / temperature - log_q of the item, and
    loss = log(1 + Σₙ exp(logit[negative n] - logit[positive])).

    Args:
      queries: floats `[…, D]`: `[B, D]`, or `[B, L, D]` for the places of sequences.
      positives: floats `[…, D]`, the right item of each query.
      negatives: floats `[N, D]`, the same for all queries; or `[…, N, D]`, some for each.
      positive_ids: integers `[…]`; -1 is padding, whose loss is 0.
      negative_ids: integers `[N]` or `[…, N]`, as the negatives; a negative with the id of the
        positive is left out, and so is -1, padding. Ids are given of both or of neither.
      positive_log_q: floats `[…]`, the log probability with which the sampler draws each positive.
      negative_log_q: floats `[N]` or `[…, N]`, that of each negative. Both or neither.
      temperature: by what the products are divided, one number above 0.

    Returns:
      `[…]`, float32 (float64 if the vectors are).

    Raises:
      ValueError: shapes that do not fit; ids, or log probabilities, of one side only;
        a temperature that is not above 0.
      TypeError: vectors that are not floats, or ids that are not integers.

    Example:
      >>> query, positive = jnp.array([[1.0, 0.0]]), jnp.array([[1.0, 1.0]])
      >>> negatives = jnp.array([[0.0, 1.0], [1.0, 1.0]])  # the second one is the positive
      >>> ids = {"positive_ids": jnp.array([5]), "negative_ids": jnp.array([9, 5])}
      >>> print(np.asarray(sampled_softmax(query, positive, negatives, **ids)).round(3))
      [0.313]
    """
    what = "sampled_softmax"
    queries, positives, negatives = _vectors(
        what, queries=queries, positives=positives, negatives=negatives
    )
    shape, dtype = queries.shape[:-1], queries.dtype
    _check_sampled(queries, positives, negatives)
    _check_pair(what, "ids", positive_ids, negative_ids)
    _check_pair(what, "log_q", positive_log_q, negative_log_q)
    drawn = negatives.shape[:-1]  # [N] or […, N]
    shared = negatives.ndim == 2
    own = others = None
    if positive_ids is not None:
        own = _ids(what, "positive_ids", positive_ids, shape)
        others = _ids(what, "negative_ids", negative_ids, drawn)
        queries, positives = _without_padding(own, queries), _without_padding(own, positives)
        negatives = _without_padding(others, negatives)
        own, others = check_same_ids(f"{what}: positive_ids and negative_ids", own, others)
    kind, negatives = ("nd", gather_explicit(negatives)) if shared else ("...nd", negatives)
    right = jnp.einsum("...d,...d->...", queries, positives, precision=_EXACT)
    wrong = jnp.einsum(f"...d,{kind}->...n", queries, negatives, precision=_EXACT)
    scale = _scale(what, temperature, dtype)
    right, wrong = right / scale, wrong / scale
    if positive_log_q is not None:
        right -= _numbers(what, "positive_log_q", positive_log_q, shape, dtype)
        of_drawn = _numbers(what, "negative_log_q", negative_log_q, drawn, dtype)
        wrong -= gather_explicit(of_drawn) if shared else of_drawn
    others = gather_explicit(others) if shared and others is not None else others
    return _sampled_losses(wrong - right[..., None], own, others)


def _sampled_losses(differences: Array, own: Array | None, others: Array | None) -> Array:
    """Return the losses `[…]`.

    Args:
      differences: the logits of the negatives less those of the positives, `[…, N]`.
      own: the ids of the positives, `[…]`; None: no negative is left out.
      others: the ids of the negatives, `[N]` or `[…, N]`; None without `own`.
    """
    if own is None or others is None:
        return _log_sum(differences)
    left_out = (others == own[..., None]) | (others < 0)
    return jnp.where(own < 0, 0, _log_sum(jnp.where(left_out, -jnp.inf, differences)))


def _log_sum(differences: Array) -> Array:
    """Return log(1 + Σ exp(differences)) over the last axis; the 1 is that of the right item."""
    # The right one's difference to itself is 0. A loss near 0 keeps its digits, which
    # log Σ exp(logits) - logit would lose where logits are large.
    own = jnp.zeros_like(differences.sum(axis=-1, keepdims=True))  # also without differences
    return jax.nn.logsumexp(jnp.concatenate([own, differences], axis=-1), axis=-1)


def _vectors(what: str, **given: Any) -> list[Array]:
    """Return arrays in the widest of their dtypes, float32 at least.

    Raises:
      TypeError: one does not have floats.
    """
    arrays = {name: x if isinstance(x, jax.Array) else np.asarray(x) for name, x in given.items()}
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            remedy = "the values of a Jagged are its attribute of that name"
            text = message(
                f"{what}: {name}", expected="floats", got=f"{array.dtype}", remedy=remedy
            )
            raise TypeError(text)
    wide = any(array.dtype == np.float64 for array in arrays.values())
    dtype = jnp.float64 if wide and jax.config.read("jax_enable_x64") else jnp.float32
    return [jnp.asarray(array, dtype) for array in arrays.values()]


def _check_like_queries(what: str, name: str, array: Array, queries: Array) -> None:
    if array.shape != queries.shape:
        wanted, got = f"the shape of queries, {list(queries.shape)}", f"{list(array.shape)}"
        raise ValueError(message(f"{what}: {name}", expected=wanted, got=got))


def _check_sampled(queries: Array, positives: Array, negatives: Array) -> None:
    what = "sampled_softmax"
    if queries.ndim < 2:
        got = f"{list(queries.shape)}"
        raise ValueError(message(f"{what}: queries", expected="shape [B, D] or more", got=got))
    _check_like_queries(what, "positives", positives, queries)
    *lead, dim = queries.shape
    fits = negatives.ndim == 2 or negatives.shape[:-2] == tuple(lead)
    if negatives.ndim < 2 or negatives.shape[-1] != dim or not fits:
        expected = f"shape [N, {dim}] or {[*lead, 'N', dim]}".replace("'", "")
        got = f"{list(negatives.shape)}"
        raise ValueError(message(f"{what}: negatives", expected=expected, got=got))


def _check_pair(what: str, kind: str, positive: Any, negative: Any) -> None:
    if (positive is None) != (negative is None):
        got = f"only {'negative' if positive is None else 'positive'}_{kind}"
        expected = f"positive_{kind} and negative_{kind}, or neither"
        raise ValueError(message(what, expected=expected, got=got))


def _without_padding(ids: Array, vectors: Array) -> Array:
    """Return vectors `[…, D]` with zeros where the ids `[…]` are padding.

    A tower may make NaN of padding. Times a gradient of 0, that would be NaN for every example.
    """
    return jnp.where(ids[..., None] < 0, 0, vectors)


def _scale(what: str, temperature: Any, dtype: Any) -> Array:
    """Return the temperature as a number.

    Raises:
      ValueError: it is no number, or known and not above 0.
    """
    known = is_number(temperature)
    if (known and not temperature > 0) or (not known and jnp.shape(temperature) != ()):
        got = f"{temperature}" if known else f"shape {list(jnp.shape(temperature))}"
        remedy = "of one temperature per query, divide the queries by it instead"
        expected = "one number above 0"
        raise ValueError(message(f"{what}: temperature", expected=expected, got=got, remedy=remedy))
    return jnp.asarray(temperature, dtype)


def _numbers(what: str, name: str, given: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    array = jnp.asarray(given, dtype)
    if array.shape != shape:
        expected, got = f"shape {list(shape)}", f"{list(array.shape)}"
        raise ValueError(message(f"{what}: {name}", expected=expected, got=got))
    return array


def _ids(what: str, name: str, given: Any, shape: tuple[int, ...]) -> Array:
    """Return ids of a shape.

    Raises:
      TypeError: they are not integers.
      ValueError: another shape, or numbers that JAX would cut to 32 bits.
    """
    array = check_ids(f"{what}: {name}", given)
    if array.shape != shape:
        expected, got = f"shape {list(shape)}", f"{list(array.shape)}"
        raise ValueError(message(f"{what}: {name}", expected=expected, got=got))
    return array

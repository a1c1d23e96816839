"""What a score is, the inner product of two vectors or the cosine of their angle, and its bias.

The losses and the search have the same scores, so that what was trained is what is found.

An item that is drawn often as a negative would be pushed down for being drawn, not for being wrong.
Subtracting the log of the probability of a draw undoes that. Uniform draws need nothing: they would
subtract the same number from all logits, which changes no softmax.

Input: vectors; counts, or ids that a sampler drew.
Output: vectors whose inner products are the scores; log probabilities of draws.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import check_choice, check_ids, check_int, is_number, refuse
from tpu_embed._types import Array, ArrayLike, Tracer

Score = Literal["dot", "cosine"]
"""`"dot"`: ⟨q, x⟩. `"cosine"`: ⟨q, x⟩ / (|q| |x|), and 0 where one of them is zeros."""


def as_given(given: Any) -> Any:
    """Return an array of JAX as it is, and anything else as one of NumPy."""
    return given if isinstance(given, jax.Array) else np.asarray(given)


def check_score(what: str, score: Any) -> Score:
    """Return the kind of score.

    Raises:
      ValueError: there is no such kind.
    """
    return check_choice(f"{what}: score", score, get_args(Score))


def check_temperature(what: str, temperature: Any, dtype: Any) -> Array:
    """Return the temperature as a number.

    Raises:
      ValueError: it is no number, or known and not above 0.
    """
    known = is_number(temperature)
    if (known and not temperature > 0) or (not known and jnp.shape(temperature) != ()):
        refuse(
            f"{what}: temperature",
            expected="one number above 0",
            got=f"{temperature}" if known else f"shape {list(jnp.shape(temperature))}",
            remedy="of one temperature per query, divide the queries by it instead",
        )
    return jnp.asarray(temperature, dtype)


def scored(vectors: Array, score: Score) -> Array:
    """Return vectors `[…, D]` whose inner products are the scores: for cosines, of length one."""
    if score == "dot":
        return vectors
    # Divided by the largest number first, squares neither overflow nor vanish. The quotient does
    # not depend on what it is divided by, so neither does the gradient. Zeros stay zeros, and have
    # the gradient of an inner product.
    largest = jax.lax.stop_gradient(jnp.abs(vectors).max(axis=-1, keepdims=True))
    some = largest > 0
    near_one = vectors / jnp.where(some, largest, 1)
    squares = (near_one * near_one).sum(axis=-1, keepdims=True)
    return near_one / jnp.sqrt(jnp.where(some, squares, 1))


def counted_log_q(counts: ArrayLike) -> np.ndarray:
    """Return the log share of each item among examples, for negatives from the same batch.

    In a batch of examples an item is drawn as often as it occurs: q_i = count_i / Σ count. An item
    that was not counted is taken as counted once.

    Args:
      counts: numbers `[V]`, how many examples have each item, such as `np.bincount` returns.

    Returns:
      float32 `[V]`, on the host. The batch's part, `log_q[items]`, is an input of the step.

    Raises:
      ValueError: another shape, a number that is no count, or nothing was counted.

    Example:
      >>> np.exp(counted_log_q([2, 6, 0])).tolist()
      [0.25, 0.75, 0.125]
    """
    counted = np.asarray(counts, np.float64)
    known = counted.ndim == 1 and np.isfinite(counted).all() and not (counted < 0).any()
    if not known or not counted.sum() > 0:
        refuse(
            "counted_log_q: counts",
            expected="counts [V], at least 0, one of them positive",
            got=f"{list(counted.shape)} {np.array2string(counted, threshold=6, edgeitems=2)}",
            remedy="np.bincount(ids, minlength=V) counts",
        )
    return np.log(np.maximum(counted, 1) / counted.sum()).astype(np.float32)


def log_uniform_log_q(ids: Any, vocabulary_size: int) -> Array:
    """Return the log probabilities of ids under the log-uniform (Zipfian) distribution.

    q_i = log((i + 2) / (i + 1)) / log(V + 1) for ids in [0, V) that are sorted by falling
    frequency. `floor((V + 1) ** u) - 1` draws them, for u uniform in [0, 1).

    Args:
      ids: integers of any shape, -1 is padding.
      vocabulary_size: V.

    Returns:
      float32 in the shape of the ids, 0 for padding. Where ids cannot be checked, because a jit
      is given them or other processes have them, an id of V or above counts as padding, too.

    Raises:
      ValueError: V < 1; an id of V or above, where ids can be checked.
      TypeError: ids that are not integers.

    Example:
      >>> print(np.exp(np.asarray(log_uniform_log_q([0, 1, 2], 3))).round(3))
      [0.5   0.292 0.208]
    """
    size = check_int("log_uniform_log_q: vocabulary_size", vocabulary_size, minimum=1)
    array = check_ids("log_uniform_log_q: ids", ids)
    remedy = "V is the number of rows from which the sampler draws"
    check_below(
        "log_uniform_log_q: ids", ids, size, expected="ids below V", remedy=remedy
    )
    # The largest id that its dtype can hold.
    last = min(size - 1, np.iinfo(array.dtype).max)
    above = jnp.maximum(array, 0).astype(jnp.float32) + jnp.float32(1)
    log_q = jnp.log(jnp.log1p(1 / above) / jnp.float32(np.log(size + 1)))
    return jnp.where((array < 0) | (array > last), jnp.float32(0), log_q)


def check_below(
    what: str, ids: Any, size: int, *, expected: str, remedy: str = ""
) -> None:
    """Check that ids, or indices, are below a number, if this process knows them.

    Args:
      what: what they are, for messages.
      ids: integers of any shape.
      size: the number.
      expected: what is expected, for messages.
      remedy: likewise.

    Raises:
      ValueError: one is not.
    """
    if isinstance(ids, Tracer) or not getattr(ids, "is_fully_addressable", True):
        return
    known = np.ma.compressed(np.asanyarray(ids))
    if known.size and known.max() >= size:
        refuse(
            what, expected=f"{expected} = {size}", got=f"{known.max()}", remedy=remedy
        )

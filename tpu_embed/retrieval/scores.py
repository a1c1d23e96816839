"""What a score is: the inner product of two vectors, or the cosine of their angle.

The losses and the search have the same scores, so that what was trained is what is found.

Input: vectors. Output: vectors whose inner products are the scores.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from tpu_embed._checks import check_choice, is_number, message
from tpu_embed._types import Array

Score = Literal["dot", "cosine"]
"""`"dot"`: ⟨q, x⟩. `"cosine"`: ⟨q, x⟩ / (|q| |x|), and 0 where one of them is zeros."""


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
        got = f"{temperature}" if known else f"shape {list(jnp.shape(temperature))}"
        remedy = "of one temperature per query, divide the queries by it instead"
        expected = "one number above 0"
        raise ValueError(message(f"{what}: temperature", expected=expected, got=got, remedy=remedy))
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

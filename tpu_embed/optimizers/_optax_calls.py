"""Calls of a user's optax transform, under the dtype promotion that optax is written for.

optax raises a float to the power of an int32 count, which JAX's strict promotion refuses. A program
that is strict about its own arithmetic can use such a transform nevertheless.

Input: a transform, and what its `init` or `update` takes.
Output: what they return.
"""

from __future__ import annotations

from typing import Any

import jax
import optax

from tpu_embed._types import PyTree


def init_state(transform: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Return the transform's first state."""
    with jax.numpy_dtype_promotion("standard"):
        return transform.init(params)


def apply_transform(
    transform: optax.GradientTransformation, gradients: PyTree, state: PyTree, params: PyTree
) -> tuple[Any, PyTree]:
    """Return the transform's updates and next state."""
    update = optax.with_extra_args_support(transform).update
    with jax.numpy_dtype_promotion("standard"):
        return update(gradients, state, params)


def transform_name(transform: Any) -> str:
    """Return the name of the function that made a transform."""
    # The update of optax.adam(0.1) is a local function, `chain.<locals>.update_fn`: "chain".
    update = getattr(transform, "update", None)
    return getattr(update, "__qualname__", type(transform).__name__).split(".")[0]

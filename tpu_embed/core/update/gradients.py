"""Check activation gradients against the activations, and collect them by stack.

A user gives one gradient per feature, in the shape of its activations. An update works stack by
stack, on one gradient vector per bag.

Input: one gradient per feature. Output: checked arrays; then, for one stack on one device, one
`[bags, D]` array per feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from tpu_embed._checks import check_live, message, warn_user
from tpu_embed._snapshot import as_array
from tpu_embed._types import Array
from tpu_embed.core.batch import BatchSpec, StackView
from tpu_embed.core.layout import Layout
from tpu_embed.core.lookup import Jagged, segments


def check_trainable(what: str, layout: Layout) -> None:
    """Check that every trainable table has an optimizer; see `EmbeddingEngine.check_trainable`."""
    # Only tables that a feature uses can receive gradients; dict.fromkeys drops repeated names.
    bare = dict.fromkeys(
        user.table.name
        for user in layout.features
        if user.config.table.trainable and layout.stacks[user.stack].optimizer is None
    )
    if bare:
        remedy = "give the engine or the tables an optimizer, or set trainable=False"
        expected, got = "an optimizer for every trainable table", f"none for {list(bare)}"
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))


def checked_gradients(
    gradients: Sequence[Any], spec: BatchSpec, layout: Layout
) -> list[Array | None]:
    """Return the gradients as arrays.

    Args:
      gradients: one leaf per feature; None stands for a zero gradient and causes a warning that
        names the feature.
      spec: the batch's static shape.
      layout: the engine's layout.

    Raises:
      ValueError: a leaf is not an array of floats, or has another shape than the activation; the
        batch was placed for a lookup only.
    """
    if spec.routed == "lookup":
        expected, remedy = "a batch placed for an update", "leave training=False out of place"
        raise ValueError(message("batch", expected=expected, got="a lookup's", remedy=remedy))
    checked: list[Array | None] = []
    for feature, shape, gradient in zip(
        layout.features, spec.feature_shapes, gradients, strict=True
    ):
        what = f"activation gradient of feature {feature.path!r}"
        dim = layout.stacks[feature.stack].dim
        expected, remedy = (shape.batch, *shape.inner, dim), ""
        if shape.capacity is not None:
            expected = (spec.replicas, shape.capacity, dim)
            remedy = "give the gradient of the values that the lookup of this batch returned"
            gradient = gradient.values if isinstance(gradient, Jagged) else gradient
        if gradient is None:
            text = f"{what}: None is taken as zeros of shape {expected}; its rows may still change"
            # Rows move with a zero gradient if the rule has momentum or weight decay.
            warn_user(text)
            checked.append(None)
            continue
        got = getattr(gradient, "shape", f"no array: {type(gradient).__name__}")
        if got != expected or not hasattr(gradient, "dtype"):
            text = f"shape {expected}"
            raise ValueError(message(what, expected=text, got=f"{got}", remedy=remedy))
        if not jnp.issubdtype(gradient.dtype, jnp.floating):
            raise ValueError(message(what, expected="floats", got=f"dtype {gradient.dtype}"))
        check_live(what, [gradient])
        checked.append(as_array(gradient))
    return checked


def stack_gradients(
    gradients: Sequence[Array | None], row_splits: Mapping[int, Array], view: StackView
) -> tuple[Array, ...]:
    """Return one device's gradients of one stack, `[bags, D]` per feature.

    Args:
      gradients: one leaf per feature, of this device's examples; None is zero.
      row_splits: `[1, B/S + 1]` of every jagged feature.
      view: the stack.
    """
    stack, arrays = view.stack, []
    # [examples, …, D] -> [examples * bags, D]: a sequence of 5 positions has 5 bags per example.
    for f, size, own in zip(view.features, view.sizes, view.shapes, strict=True):
        shape, given = (own.bags_of(size), stack.dim), gradients[f]
        if given is None:
            arrays.append(jnp.zeros(shape, stack.compute_dtype))
            continue
        given = given.astype(stack.compute_dtype)
        if own.capacity is not None and not own.has_places:
            given, _ = segments.pad(row_splits[f][0], given[0], own.bags)
        arrays.append(given.reshape(shape))
    return tuple(arrays)

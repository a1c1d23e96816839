"""The float arrays of activations: that by which users differentiate, and clip, scale and sum.

Input: activations, some of which may be `Jagged`. Output: the same nesting of float arrays, and the
way back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from tpu_embed._types import PyTree
from tpu_embed.core.lookup.jagged import Jagged


def split_activations(activations: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Return the float arrays of activations, and a function that restores the activations.

    `jax.grad` refuses integers, such as the row splits of a `Jagged`. So differentiate by the
    values alone, and put the activations together again inside the differentiated function, before
    any `jax.vmap`.

    Args:
      activations: what a lookup returns: arrays, and a `Jagged` per jagged feature, in any nesting.

    Returns:
      values: the same nesting, with the values `[S, C, D]` in the place of each `Jagged`. Gradients
        by it are what `update` takes.
      rebuild: a function of such values, which returns the activations with these values. It raises
        `ValueError` where values have other first axes than those of the `Jagged`.

    Example:
      >>> import jax.numpy as jnp
      >>> splits = jnp.array([[0, 2, 2, 3]])
      >>> activations = {"user": jnp.ones((3, 2)), "seen": Jagged(jnp.ones((1, 4, 2)), splits)}
      >>> values, rebuild = split_activations(activations)
      >>> def loss(values):
      ...     activations = rebuild(values)
      ...     return (activations["user"] * activations["seen"].sums()).sum()
      >>> jax.grad(loss)(values)["seen"][0, :, 0].tolist()
      [1.0, 1.0, 1.0, 0.0]
    """
    leaves, structure = jax.tree.flatten(activations, is_leaf=_is_jagged)
    values = [leaf.values if _is_jagged(leaf) else leaf for leaf in leaves]
    # `rebuild` may outlive the activations: of their values it keeps the shapes alone.
    frames = [
        leaf.with_values(jax.typeof(leaf.values)) if _is_jagged(leaf) else None for leaf in leaves
    ]

    def rebuild(values: PyTree) -> PyTree:
        pairs = zip(frames, structure.flatten_up_to(values), strict=True)
        return structure.unflatten(
            [value if frame is None else frame.with_values(value) for frame, value in pairs]
        )

    return structure.unflatten(values), rebuild


def _is_jagged(value: Any) -> bool:
    return isinstance(value, Jagged)

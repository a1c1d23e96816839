"""Checks that gradients and constraints fit the parameters, before anything is computed.

Input: pairs of a gradient and a path, and constraints by path, as a user gives them.
Output: both by the number of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import message
from tpu_embed._snapshot import as_array
from tpu_embed._types import Array
from tpu_embed.sparse import is_indexed_slices
from tpu_embed.training.paths import Leaves, listed


def check_gradients(
    what: str,
    grads_and_vars: Iterable[Any],
    leaves: Leaves,
    constraints: Mapping[Any, Callable[[Array], Any]],
) -> tuple[dict[int, Any], dict[int, Callable[[Array], Any]]]:
    """Return the gradients that are not None, and the constraints, by number of the parameter.

    Args:
      what: the optimizer's name, for messages.
      grads_and_vars: pairs of a gradient or None, and a path.
      leaves: the parameters.
      constraints: functions by path.

    Raises:
      TypeError: an entry is not a pair, or a gradient cannot become an array.
      ValueError: a path is unknown or repeated, a gradient does not have its parameter's shape or
        belongs to an integer parameter, or there is no gradient at all.
      RuntimeError: a constraint is given for a parameter whose gradient is `IndexedSlices`.
    """
    # Leaves a, b, c and pairs [(g, "c"), (None, "a")]: numbers [2, 0], gradients {2: g}.
    pairs = [_pair(what, entry) for entry in grads_and_vars]
    numbers = leaves.find_all([path for _, path in pairs], what=f"{what}: grads_and_vars")
    gradients = {
        i: _gradient(f"{what}: gradient of {listed([leaves.labels[i]])}", g, leaves.values[i])
        for i, (g, _) in zip(numbers, pairs, strict=True)
        if g is not None
    }
    if not gradients:
        names = listed(leaves.labels[i] for i in numbers or range(len(leaves.labels)))
        raise ValueError(
            message(
                f"{what}: grads_and_vars",
                expected="a gradient for at least one variable",
                got=f"none for {names}",
                remedy="use one of them in the loss, or skip this update",
            )
        )
    # A constraint maps a whole parameter, a sparse gradient must not touch rows it does not name.
    places = leaves.find_all(constraints, what=f"{what}: constraints")
    for i in places:
        if is_indexed_slices(gradients.get(i)):
            raise RuntimeError(
                message(
                    f"{what}: constraint on {listed([leaves.labels[i]])}",
                    expected="a dense gradient",
                    got="IndexedSlices, which update single rows",
                    remedy="clip_weight_min and clip_weight_max of a rule bound touched rows",
                )
            )
    return gradients, dict(zip(places, constraints.values(), strict=True))


def _pair(what: str, entry: Any) -> tuple[Any, Any]:
    if not isinstance(entry, (tuple, list)) or len(entry) != 2:
        raise TypeError(
            message(
                f"{what}: grads_and_vars",
                expected="pairs of a gradient and a path",
                got=repr(entry),
                remedy="compute_gradients makes them",
            )
        )
    return entry[0], entry[1]


def _gradient(what: str, gradient: Any, parameter: Any) -> Any:
    """Return a checked gradient, as an array or `IndexedSlices`."""
    kind = jnp.result_type(parameter)
    if not jnp.issubdtype(kind, jnp.inexact):
        raise ValueError(
            message(
                what,
                expected="None, for a parameter of integers",
                got=type(gradient).__name__,
                remedy="leave it out: integers are not trained",
            )
        )
    shape = np.shape(parameter)
    if is_indexed_slices(gradient):
        # Parameter [V, …, D]: indices [N], values [N, …, D].
        values, indices = np.shape(gradient.values), np.shape(gradient.indices)
        fits = len(indices) == 1 and values == (*indices, *gradient.dense_shape[1:])
        if gradient.dense_shape != shape or not fits:
            raise ValueError(
                message(
                    what,
                    expected=f"IndexedSlices of dense_shape {shape}, values [N, *{shape[1:]}], "
                    "indices [N]",
                    got=f"dense_shape {gradient.dense_shape}, values {values}, indices {indices}",
                    remedy="dense_shape is the shape of the parameter",
                )
            )
    else:
        try:
            gradient = as_array(gradient)
        except (TypeError, ValueError) as error:
            raise TypeError(
                message(
                    what,
                    expected="an array, IndexedSlices or None",
                    got=repr(gradient),
                    remedy="give one pair for each leaf of the parameters",
                )
            ) from error
        if gradient.shape != shape:
            raise ValueError(
                message(
                    what,
                    expected=f"the parameter's shape {shape}",
                    got=f"shape {gradient.shape}",
                    remedy="pair each gradient with the path of its own parameter",
                )
            )
        # A float gradient keeps its own precision; integers become the parameter's floats.
        if not jnp.issubdtype(gradient.dtype, jnp.inexact):
            gradient = gradient.astype(kind)
    # A complex gradient of a real parameter would lose its imaginary part. True > False: the
    # gradient is complex and the parameter is not.
    kinds = [jnp.issubdtype(dtype, jnp.complexfloating) for dtype in (gradient.dtype, kind)]
    if kinds[0] > kinds[1]:
        raise ValueError(
            message(
                what,
                expected=f"floats, as {kind}",
                got=str(gradient.dtype),
                remedy="take its real part, if that is what is meant",
            )
        )
    return gradient

"""Gradients of a loss by some leaves of a parameter tree; the other leaves count as constants.

Input: a loss, which is a function of the parameters, and the numbers of the leaves to differentiate
by.
Output: this replica's gradients. They are sparse for tables that are only looked up, and None where
the loss does not depend on a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from tpu_embed._checks import is_number, message
from tpu_embed._snapshot import as_array
from tpu_embed._types import Array, ArrayLike, PyTree
from tpu_embed.training.autodiff.gradients import value_and_gradients
from tpu_embed.training.paths import Leaves
from tpu_embed.training.replicas import Replicas


class Collected(NamedTuple):
    """A loss as its function returned it, and for each variable its gradient or None."""

    loss: Array
    gradients: list[Any]


def collect_gradients(
    loss: Callable[[PyTree], ArrayLike],
    leaves: Leaves,
    variables: Sequence[int],
    replicas: Replicas,
    *,
    grad_loss: ArrayLike | None,
    **words: Any,
) -> Collected:
    """Differentiate a loss, divided by the number of replicas if the global loss is their mean.

    Args:
      loss: a function of the whole parameter tree that returns floats.
      leaves: the parameters.
      variables: the numbers of the leaves to differentiate by.
      replicas: the replicas.
      grad_loss: the cotangent of the loss, in its shape; None means ones.
      words: `aggregation_method` and `gate_gradients`, as `gradients` takes them.

    Returns:
      the unscaled loss, and one gradient per variable: an array, an `IndexedSlices` or None.

    Raises:
      TypeError: `loss` is not a function.
      ValueError: a loss that is not float, or a cotangent of another shape or not float.
    """
    if not callable(loss):
        expected, remedy = "a function of the parameters", "write lambda params: ..."
        raise TypeError(message("loss", expected=expected, got=repr(loss), remedy=remedy))
    # Leaves w, ids, b and variables [0, 1]: only w is differentiated by. Integers have no gradient
    # (None in the result), and b is a constant like all leaves outside of `variables`.
    floats = [i for i in variables if _is_inexact(leaves.values[i])]

    def objective(*chosen: Array) -> tuple[Array, Array]:
        values = dict(enumerate(leaves.values)) | dict(zip(floats, chosen, strict=True))
        found = checked_loss(loss(leaves.only(values)))
        # The gradient of Σ c·l is the pull-back of c: one scalar to differentiate, whatever shape
        # the loss has.
        return jnp.sum(replicas.scaled(found) * _cotangent(found, grad_loss)), found

    arrays = replicas.local([as_array(leaves.values[i]) for i in floats])
    (_, found), gradients = value_and_gradients(objective, arrays, **words)
    if not floats:  # value_and_gradients does not run a function without arguments
        found = objective()[1]
    by_number = dict(zip(floats, gradients, strict=True))
    return Collected(found, [by_number.get(i) for i in variables])


def _is_inexact(parameter: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(parameter), jnp.inexact)


def checked_loss(loss: Any) -> Array:
    """Return what a loss function returned, as an array.

    Raises:
      ValueError: it is not an array of floats.
    """
    # A pair (loss, aux) would become an array of two numbers where both are scalars: refuse it.
    if not hasattr(loss, "dtype") and not is_number(loss):
        expected, got = "a float array", type(loss).__name__
        remedy = "return the loss alone: there is no aux"
        raise ValueError(message("loss", expected=expected, got=got, remedy=remedy))
    array = as_array(loss)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        got, remedy = f"{array.dtype} of shape {array.shape}", "return real floats"
        raise ValueError(message("loss", expected="a float array", got=got, remedy=remedy))
    return array


def _cotangent(loss: Array, given: ArrayLike | None) -> Array:
    if given is None:
        return jnp.ones((), loss.dtype)
    array = as_array(given)
    if array.shape != loss.shape or not jnp.issubdtype(array.dtype, jnp.floating):
        expected = f"floats of the loss' shape {loss.shape}"
        got = f"{array.dtype} of shape {array.shape}"
        remedy = "leave it out for ones"
        raise ValueError(message("grad_loss", expected=expected, got=got, remedy=remedy))
    return array.astype(loss.dtype)

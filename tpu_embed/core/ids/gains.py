"""The gain of each id: what its row is multiplied with in the activation of its bag.

With weights c (1 if none are given), rows w and gains a, the activation of a bag is Σ a w, and a
row's gradient is a times the activation's. The combiner decides the gain: a = c (sum), c / Σ c
(mean), c / √Σ c² (sqrtn). Where the denominator is zero, so are the gains.

Means don't change when all weights of a bag are multiplied by one number. Weights of 1e-20 need
that, because float32 cannot hold their squares; weights of 2e19 need it, too. So each bag whose
weights are far from 1 is multiplied by a power of two first, which is exact. On the host float64
holds whatever float32 weights give.

Users give weights either inside the container of the ids or as a `weights=` leaf beside it, but
not in both places: one weight per id, a finite real number.

Input: ids, and weights inside or beside them; or the weights of bags inside a program.
Output: weights aligned with the ids, in the table's arithmetic dtype (float32, or float64 for a
float64 table), None for all ones; the gains of ids.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import message
from tpu_embed._types import Array
from tpu_embed.columns import read_lists
from tpu_embed.core.ids.containers import RaggedIds, refuse_masked, values_of
from tpu_embed.core.ids.feature_ids import HostIds


def is_real(dtype: Any) -> bool:
    """Tell whether weights may have this dtype: floats and integers may be weights, bools not."""
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def read_weights(path: str, dtype: str, ids: Any, weights: Any) -> np.ndarray | None:
    """Return the weights of ids, in the shape of the array or of the container's values.

    Args:
      path: the feature's path, for messages.
      dtype: the table's dtype.
      ids: an array `[B, …, H]`, or a container, perhaps with weights inside.
      weights: None or an array in that shape; beside a container also one like it that holds
        floats, and beside `RaggedIds` a column of lists of floats.

    Raises:
      ValueError: weights for ids [B], or in both places; weights of another kind or shape, or with
        other indices or splits; weights that are not finite real numbers.
      TypeError: a masked array.
    """
    what, kind = f"weights of {path}", type(ids).__name__
    values = values_of(ids)
    in_bags = values is not ids

    def error(expected, got, remedy=""):
        return ValueError(message(what, expected=expected, got=got, remedy=remedy))

    bags = read_lists(what, weights) if isinstance(ids, RaggedIds) else None
    if bags is not None:
        weights = RaggedIds(np.asarray(bags.items), bags.row_splits)
    if in_bags and type(weights) is type(ids):
        for name in sorted(vars(ids).keys() - {"values", "weights"}):
            if not np.array_equal(vars(weights)[name], vars(ids)[name]):
                raise error(f"the {name} of the ids", "others")
        # A container in `weights=` holds floats as its values, so it must not have weights too.
        if weights.weights is not None:
            raise error(f"floats as {kind}.values", "weights inside too")
        weights = weights.values
    elif weights is not None and values.ndim == 1 and not in_bags:
        raise error("no weights for ids [B]", "some", "use ids [B, 1]")
    elif weights is not None and not hasattr(weights, "__array__"):
        expected = (
            f"an array or {kind}, as the ids" if in_bags else "an array, as the ids"
        )
        raise error(expected, type(weights).__name__)
    refuse_masked(what, weights)
    # Now `weights` are those given beside the ids; the container may have others inside.
    if in_bags and ids.weights is not None:
        if weights is not None:
            raise error(f"weights in one place, inside {kind} or in weights=", "both")
        weights = ids.weights
    if weights is None:
        return None
    weights, shape = np.asarray(weights), values.shape
    if weights.shape != shape:
        raise error(f"shape {shape}, as the ids", f"shape {weights.shape}")
    if not is_real(weights.dtype):
        raise error("real numbers", weights.dtype)
    # A float64 weight beyond float32 becomes infinite here and is reported below, without
    # NumPy's warning.
    with np.errstate(over="ignore"):
        numbers = weights.astype(
            np.float64 if dtype == "float64" else np.float32, copy=False
        )
    finite = np.isfinite(numbers)
    if not finite.all():
        at = np.argwhere(~finite)[0].tolist()
        raise error(f"numbers finite in {numbers.dtype}", f"{weights[*at]} at {at}")
    return numbers


def host_gains(host: HostIds, combiner: str, dtype: np.dtype) -> np.ndarray | None:
    """Return the gain of every id, in the shape of the ids; None where all are 1.

    They are computed in float64 and rounded once. What stands at dense padding is finite.

    Args:
      host: the ids of a feature; keys have rows already, and those without one are left out.
      combiner: "sum", "mean" or "sqrtn".
      dtype: float32 or float64.

    Example:
      >>> from tpu_embed.core.ids import FeatureShape
      >>> shape = FeatureShape(2, (), combines=True, width=None, weighted=True)
      >>> ids, bags = np.array([7, 3, 5]), np.array([0, 0, 1], np.int32)
      >>> host = HostIds(shape, ids, bags, np.array([1, 3, 0], np.float32), padded=False)
      >>> host_gains(host, "mean", np.dtype("float32")).tolist()
      [0.25, 0.75, 0.0]
    """
    if combiner == "sum" or not host.shape.combines:
        return host.weights
    if host.weights is None:
        return _gains_of_ones(host, combiner, dtype)
    c = host.weights.astype(np.float64)
    if dtype == np.float64:
        # frexp(x) gives e with 0.5 <= x / 2**e < 1; ldexp(c, -e) is c / 2**e, exactly.
        c = np.ldexp(c, -np.frexp(_largest(np.abs(c), host.bags))[1])
    d = (
        _total(c, host.bags)
        if combiner == "mean"
        else np.sqrt(_total(c * c, host.bags))
    )
    least: Any = 0
    if combiner == "mean" and c.min(initial=0) < 0:
        # Positive and negative weights may cancel. What is left of them must be more than float32
        # can tell from zero, so that gains are finite.
        least = np.finfo(np.float32).tiny * _largest(np.abs(c), host.bags)
    return np.divide(c, d, out=np.zeros_like(c), where=np.abs(d) > least).astype(dtype)


def _gains_of_ones(host: HostIds, combiner: str, dtype: np.dtype) -> np.ndarray:
    """Return 1 / d of every id, where d follows from the number of ids in its bag."""
    counts: Any = host.ids.shape[-1]
    if host.bags is not None:
        counts = _runs(host.bags)[1]
    elif host.padded:
        counts = np.count_nonzero(host.ids >= 0, axis=-1, keepdims=True)
    d = np.maximum(counts, 1) if combiner == "mean" else np.sqrt(np.maximum(counts, 1))
    inverse = (1 / d).astype(dtype)
    if host.bags is None:
        return np.broadcast_to(inverse, host.ids.shape)
    return np.repeat(inverse, counts)


def _runs(bags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each bag that has ids begins among them, and how many it has.

    Args:
      bags: integers `[N]`, the bag of each id, non-decreasing; 0 0 2 begin at 0 and 2.
    """
    starts = np.flatnonzero(np.diff(bags, prepend=-1))
    return starts, np.diff(starts, append=bags.size)


def _total(numbers: np.ndarray, bags: np.ndarray | None) -> np.ndarray:
    """Return the sum of each bag: `[…, 1]` of dense `[…, H]`, or for each flat id that of its bag.

    Numbers are added one by one, so padding is nothing.
    """
    if bags is not None:
        return np.bincount(bags, numbers)[bags]
    sums = np.zeros(numbers.shape[:-1])
    for column in range(numbers.shape[-1]):
        sums += numbers[..., column]
    return sums[..., None]


def _largest(numbers: np.ndarray, bags: np.ndarray | None) -> np.ndarray:
    """Return the largest number of each bag, in the shape of `_total`."""
    if bags is None:
        return numbers.max(axis=-1, keepdims=True, initial=0)
    starts, lengths = _runs(bags)
    return (
        np.repeat(np.maximum.reduceat(numbers, starts), lengths)
        if bags.size
        else numbers
    )


def gains_in_program(weights: Array, combiner: str) -> Array:
    """Return the gains of dense ids, like `host_gains`, inside a program.

    They are within 1e-6 of those, relative, where weights don't cancel.

    The result is differentiable with respect to the weights. The powers of two count as constants,
    which is correct because the gains do not depend on them.

    Args:
      weights: floats `[…, H]`; the last axis is the bag, with 0 where there is no id. A bag that
        contains NaN or infinity has no gains, so its result is arbitrary.
      combiner: "sum", "mean" or "sqrtn".
    """
    if combiner == "sum":
        return weights
    c = _near_one(weights)
    if combiner == "mean":
        d = jnp.sum(c, axis=-1, keepdims=True)
    else:
        # The inner `where` keeps a root of 0 out of the program: its derivative is infinite there,
        # and would be NaN even where the outer `where` does not choose it.
        squares = jnp.sum(c * c, axis=-1, keepdims=True)
        d = jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)
    zero = d == 0
    return jnp.where(zero, 0, c / jnp.where(zero, 1, d))


def _near_one(weights: Array) -> Array:
    """Return weights, those of each bag times the power of two that brings them near 1."""
    largest = jnp.max(jnp.abs(weights), axis=-1, keepdims=True, initial=0)
    limits = jnp.finfo(weights.dtype)
    least = float(limits.smallest_normal)
    # Without mantissa bits, `largest` is rounded to a power of two. The clip keeps both the power
    # and its inverse normal numbers.
    power = jax.lax.reduce_precision(largest, limits.nexp, mantissa_bits=0)
    factor = 1.0 / jnp.clip(power, least, 1.0 / least)
    # Between these, float32 holds the squares of the weights and their sums.
    far = (largest > 0) & ((largest < 2.0**-30) | (largest > 2.0**30))
    return weights * jax.lax.stop_gradient(
        jnp.where(far, factor, jnp.ones_like(factor))
    )

"""Validate the weights of one feature's ids: one weight per id, a finite real number.

Users give weights either inside the container of the ids or as a `weights=` leaf beside it, but
not in both places.

Input: the ids, and the weights beside them or None. Output: weights aligned with the ids, in the
table's arithmetic dtype (float32, or float64 for a float64 table); None for all ones.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from tpu_embed import _checks
from tpu_embed.columns import read_lists
from tpu_embed.core.ids.containers import RaggedIds, refuse_masked, values_of


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

    def error(expected: str, got: Any, remedy: str = "") -> ValueError:
        return ValueError(_checks.message(what, expected=expected, got=got, remedy=remedy))

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
        expected = f"an array or {kind}, as the ids" if in_bags else "an array, as the ids"
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
        numbers = weights.astype(np.float64 if dtype == "float64" else np.float32, copy=False)
    finite = np.isfinite(numbers)
    if not finite.all():
        at = np.argwhere(~finite)[0].tolist()
        raise error(f"numbers finite in {numbers.dtype}", f"{weights[*at]} at {at}")
    return numbers

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
from tpu_embed.core.ids.containers import RaggedIds, SparseIds, refuse_masked


def is_real(dtype: Any) -> bool:
    """Tell whether weights may have this dtype: floats and integers may be weights, bools not."""
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def beside_dense(path: str, dtype: str, ids: np.ndarray, weights: Any) -> np.ndarray | None:
    """Return the weights of dense ids, in the shape [B, …, H] of the ids.

    Args:
      path: the feature's path, for messages.
      dtype: the table's dtype.
      ids: the ids.
      weights: None or an array of the ids' shape.

    Raises:
      ValueError: the ids are [B], which has no weights, or the weights are not an array of real
        numbers, have another shape, or are not finite.
      TypeError: a masked array.
    """
    if weights is None:
        return None
    if ids.ndim == 1:
        raise _error(path, expected="no weights for ids [B]", got="some", remedy="use ids [B, 1]")
    if isinstance(weights, (SparseIds, RaggedIds)) or not hasattr(weights, "__array__"):
        raise _error(path, expected="an array, as the ids", got=type(weights).__name__)
    refuse_masked(f"weights of {path}", weights)
    return _numbers(path, dtype, np.asarray(weights), ids.shape)


def beside_sparse(path: str, dtype: str, ids: SparseIds, weights: Any) -> np.ndarray | None:
    """Return the weights [N] of `SparseIds`.

    Args:
      path: the feature's path, for messages.
      dtype: the table's dtype.
      ids: the ids, perhaps with weights inside.
      weights: None, an array [N], or `SparseIds` with the same indices that hold floats.

    Raises:
      ValueError: weights in both places; weights with other indices or another shape; weights that
        are not finite real numbers.
      TypeError: a masked array.
    """
    if isinstance(weights, SparseIds):
        if weights.dense_shape != ids.dense_shape:
            got = f"{weights.dense_shape} for {ids.dense_shape}"
            raise _error(path, expected="the dense_shape of the ids", got=got)
        if not np.array_equal(weights.indices, ids.indices):
            raise _error(path, expected="the indices of the ids", got="others")
    return _beside_flat(path, dtype, ids, weights)


def beside_ragged(path: str, dtype: str, ids: RaggedIds, weights: Any) -> np.ndarray | None:
    """Return the weights [N] of `RaggedIds`.

    Args:
      path: the feature's path, for messages.
      dtype: the table's dtype.
      ids: the ids, perhaps with weights inside.
      weights: None, an array [N], `RaggedIds` with the same splits that hold floats, or a column
        of lists of floats.

    Raises:
      ValueError: weights in both places; weights with other splits or another shape; weights that
        are not finite real numbers.
      TypeError: a masked array.
    """
    bags = read_lists(f"weights of {path}", weights)
    if bags is not None:
        weights = RaggedIds(np.asarray(bags.items), bags.row_splits)
    if isinstance(weights, RaggedIds) and not np.array_equal(weights.row_splits, ids.row_splits):
        raise _error(path, expected="the row_splits of the ids", got="others")
    return _beside_flat(path, dtype, ids, weights)


def _beside_flat(
    path: str, dtype: str, ids: SparseIds | RaggedIds, weights: Any
) -> np.ndarray | None:
    """Return the weights [N] of a container, after checking that they are given in one place."""
    kind = type(ids)
    if isinstance(weights, kind):
        # A container in `weights=` holds floats as its values, so it must not have weights too.
        if weights.weights is not None:
            raise _error(
                path, expected=f"floats as {kind.__name__}.values", got="weights inside too"
            )
        weights = weights.values
    elif isinstance(weights, (SparseIds, RaggedIds)):
        raise _error(path, expected=f"{kind.__name__}, as the ids", got=type(weights).__name__)
    elif weights is not None and not hasattr(weights, "__array__"):
        expected = f"None, an array or {kind.__name__}"
        raise _error(path, expected=expected, got=type(weights).__name__)
    refuse_masked(f"weights of {path}", weights)
    # Now `weights` are those given beside the ids; the container may have others inside.
    if ids.weights is not None:
        if weights is not None:
            expected = f"weights in one place, inside {kind.__name__} or in weights="
            raise _error(path, expected=expected, got="both")
        weights = ids.weights
    return None if weights is None else _numbers(path, dtype, np.asarray(weights), ids.values.shape)


def _numbers(path: str, dtype: str, weights: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return weights in the table's arithmetic dtype; check shape, dtype and finiteness."""
    if weights.shape != shape:
        raise _error(path, expected=f"shape {shape}, as the ids", got=f"shape {weights.shape}")
    if not is_real(weights.dtype):
        raise _error(path, expected="real numbers", got=str(weights.dtype))
    # A float64 weight beyond float32 becomes infinite here and is reported below, without
    # NumPy's warning.
    with np.errstate(over="ignore"):
        numbers = weights.astype(np.float64 if dtype == "float64" else np.float32, copy=False)
    finite = np.isfinite(numbers)
    if not finite.all():
        # argmin of bools is the flat index of the first False.
        at = tuple(int(i) for i in np.unravel_index(np.argmin(finite), shape))
        expected = f"numbers finite in {numbers.dtype}"
        raise _error(path, expected=expected, got=f"{weights[at]} at {list(at)}")
    return numbers


def _error(path: str, *, expected: str, got: str, remedy: str = "") -> ValueError:
    return ValueError(
        _checks.message(f"weights of {path}", expected=expected, got=got, remedy=remedy)
    )

"""Pad a batch with empty bags, so that it divides evenly over the replicas.

The last batch of an epoch is often smaller than the others. Examples with empty bags make up the
difference: their activations are zero.

Input: features in any nesting, without their configuration. Output: the same nesting, padded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tpu_embed import _checks
from tpu_embed._types import PADDING_ID
from tpu_embed.core.ids import frames, structure
from tpu_embed.core.ids.containers import RaggedIds, SparseIds

__all__ = ["pad_batch"]


def pad_batch(features: Any, multiple: int) -> Any:
    """Add empty bags to every feature until the batch size is a multiple of `multiple`.

    Arrays of ids get rows of -1, `SparseIds` a larger first dim, `RaggedIds` empty rows; arrays of
    floats (weights, labels) get zeros. The activations of the added examples are zero rows.
    `RaggedIds` that hold m rows per example (see `FeatureConfig.output_shape`) get m empty rows
    for each added example.

    Args:
      features: any nesting of arrays [B, …], `SparseIds`, `RaggedIds` and None, all with the same
        batch size B. Pad the `weights=` of a batch in a second call.
      multiple: the batch size becomes a multiple of this.

    Returns:
      The same nesting; unsigned ids become signed. If B is a multiple already, `features` itself.

    Raises:
      ValueError: features have different batch sizes, a leaf is of another kind, or `multiple` is
        not an integer of at least 1.

    Example:
      >>> pad_batch({"user": np.array([[4, 7], [2, -1], [1, 1]])}, 2)["user"].tolist()
      [[4, 7], [2, -1], [1, 1], [-1, -1]]
    """
    multiple = _checks.check_int("pad_batch: multiple", multiple, minimum=1)
    leaves: list[tuple[str, Any]] = []
    _collect(features, "", leaves)
    batch = _batch_size(leaves)
    added = -batch % multiple  # batch 13, multiple 8: 3
    return _padded(features, batch, added) if added else features


def _collect(nest: Any, path: str, leaves: list[tuple[str, Any]]) -> None:
    """Append the (path, leaf) pairs below `nest` to `leaves`, without those that are None."""
    inner = structure.children(nest)
    if inner is None:
        if nest is not None:
            leaves.append((path or "feature", nest))
        return
    for key, child in inner:
        _collect(child, f"{path}/{key}" if path else str(key), leaves)


def _rows(path: str, leaf: Any) -> int:
    """Return the size of a leaf's first dimension: the rows of an array or container."""
    if isinstance(leaf, SparseIds):
        return leaf.dense_shape[0]
    if isinstance(leaf, RaggedIds):
        return len(leaf.row_splits) - 1
    expected = "an array [B, …], SparseIds, RaggedIds or None"
    if frames.is_frame(leaf):
        what, got, remedy = f"pad_batch: {path}", type(leaf).__name__, "give a dict of its columns"
        raise ValueError(_checks.message(what, expected=expected, got=got, remedy=remedy))
    if getattr(leaf, "shape", ()):
        return leaf.shape[0]
    raise ValueError(_checks.message(f"pad_batch: {path}", expected=expected, got=repr(leaf)))


def _batch_size(leaves: list[tuple[str, Any]]) -> int:
    """Return B: the rows of every array or `SparseIds`; without these, of the shortest ragged leaf.

    Raises:
      ValueError: the leaves do not agree on B.
    """
    # Ragged leaves may hold m·B rows, so they decide only if there is nothing else.
    rows = {path: _rows(path, leaf) for path, leaf in leaves}
    plain = [path for path, leaf in leaves if not isinstance(leaf, RaggedIds)]
    first = plain[0] if plain else min(rows, key=rows.__getitem__, default=None)
    if first is None:
        return 0
    batch = rows[first]
    for path, leaf in leaves:
        many = isinstance(leaf, RaggedIds) and batch and rows[path] % batch == 0
        if rows[path] != batch and not many:
            expected = f"the batch size of {first}, {batch}"
            raise ValueError(
                _checks.message(f"pad_batch: {path}", expected=expected, got=str(rows[path]))
            )
    return batch


def _padded(nest: Any, batch: int, added: int) -> Any:
    """Return `nest` with `added` empty examples appended to the `batch` examples of every leaf."""
    inner = structure.children(nest)
    if inner is not None:
        return structure.rebuild(nest, {key: _padded(child, batch, added) for key, child in inner})
    if nest is None:
        return None
    if isinstance(nest, SparseIds):
        shape = (batch + added, *nest.dense_shape[1:])
        return SparseIds(nest.indices, nest.values, shape, nest.weights)
    if isinstance(nest, RaggedIds):
        # m·B rows: m empty rows per added example. Splits 0 2 2 3 and 2 empty rows: 0 2 2 3 3 3.
        empty = np.full(added * (len(nest.row_splits) - 1) // batch, nest.row_splits[-1])
        splits = np.concatenate([nest.row_splits, empty]).astype(nest.row_splits.dtype)
        return RaggedIds(nest.values, splits, nest.weights)
    return _padded_array(np.asarray(nest), added)


def _padded_array(array: np.ndarray, added: int) -> np.ndarray:
    """Return `[B + added, …]`: integers are padded with -1, all other numbers with 0."""
    # Unsigned dtypes have no -1. Ids too large for int64 become its largest number, a bad id too.
    if array.dtype.kind == "u":
        array = np.minimum(array.astype(np.uint64), np.iinfo(np.int64).max).astype(np.int64)
    fill = PADDING_ID if array.dtype.kind == "i" else 0
    empty = np.full((added, *array.shape[1:]), fill, array.dtype)
    return np.concatenate([array, empty])

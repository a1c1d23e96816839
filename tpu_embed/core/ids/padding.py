"""Pad a batch with empty bags, so that it divides evenly over the replicas.

The last batch of an epoch is often smaller than the others. Examples with empty bags make up the
difference: their activations are zero. Each feature has a batch size of its own, so each is padded
by itself: a batch is taken apart into leaves, whatever containers it is nested in, and put together
again.

Input: features in any nesting, without their configuration. Output: the same nesting, padded; what
no number can mark as padding is masked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from tpu_embed._checks import check_int, refuse
from tpu_embed._types import PADDING_ID
from tpu_embed.columns import mask_missing
from tpu_embed.core.ids import structure
from tpu_embed.core.ids.containers import RaggedIds, SparseIds, read_ids

# -- leaves ----------------------------------------------------------------------------------------


_LEAF = "an array [B, …], SparseIds, RaggedIds or None"


def collect_leaves(what: str, nest: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return the leaves of a batch in flattening order, without those that are None.

    Args:
      what: the function that was called, for messages.
      nest: the batch, or the part of it that stands at `path`.

    Returns:
      (path, leaf) pairs; each path begins with `what`.

    Raises:
      ValueError: a leaf is a frame, or a mapping's keys cannot be sorted.
    """
    inner = _children(nest)
    if inner is not None:
        pairs = ((child, structure.join_path(path, key)) for key, child in inner)
        return [leaf for one in pairs for leaf in collect_leaves(what, *one)]
    path = f"{what}: {path or 'feature'}"
    if structure.as_frame(nest) is not None:
        refuse(
            path,
            expected=_LEAF,
            got=type(nest).__name__,
            remedy="give a dict of its columns",
        )
    return [] if nest is None else [(path, nest)]


def _children(nest: Any) -> list[tuple[Any, Any]] | None:
    """Return the (key, child) pairs of a container; None for a leaf, which a list may be, too.

    The features' configuration is not known here. So a list of numbers or strings, or of such
    lists, is taken for a column, and any other list for a container.
    """
    return None if _is_column(nest) else structure.children(nest)


def _is_column(nest: Any) -> bool:
    """Tell whether a list holds numbers or strings, or lists of them: its first item decides."""
    if not isinstance(nest, list):
        return False
    # None and empty lists do not tell.
    telling = (
        one
        for one in nest
        if one is not None and not (isinstance(one, list) and not one)
    )
    first = next(telling, None)
    return _is_column(first) or isinstance(first, (int, float, str, bytes, np.generic))


def rebuild_nest(nest: Any, leaves: Iterator[Any]) -> Any:
    """Return `nest` with its leaves replaced, in the order of `collect_leaves`; None stays None."""
    inner = _children(nest)
    if inner is None:
        return None if nest is None else next(leaves)
    return structure.rebuild(
        nest, {key: rebuild_nest(child, leaves) for key, child in inner}
    )


def count_rows(path: str, leaf: Any) -> int:
    """Return the size of a leaf's first dimension: the rows of an array or container.

    Args:
      path: where the leaf stands, for messages.
      leaf: what `read_ids` returns.

    Raises:
      ValueError: the leaf is a single value.
    """
    if isinstance(leaf, SparseIds):
        return leaf.dense_shape[0]
    if isinstance(leaf, RaggedIds):
        return len(leaf.row_splits) - 1
    if leaf.shape:
        return leaf.shape[0]
    refuse(path, expected=_LEAF, got=repr(leaf.tolist()))


# -- padding ---------------------------------------------------------------------------------------


def pad_batch(features: Any, multiple: int) -> Any:
    """Add empty bags to every feature until its batch size is a multiple of `multiple`.

    Arrays of ids get rows of -1, `SparseIds` a larger first dim, `RaggedIds` empty rows; arrays of
    floats (weights, labels) get zeros. The activations of the added examples are zero rows.

    Each leaf is padded by itself, from a batch size B of its own. `RaggedIds` may hold m rows per
    example (see `FeatureConfig.output_shape`), which they do not tell. So their B is that of
    another leaf: the largest number of rows of any array or `SparseIds` that divides theirs. Beside
    an array of 3 examples, 12 rows are 4 per example; each added example gets 4 empty rows. If no
    such number divides their rows, each row is an example. Without arrays and `SparseIds`, the
    fewest rows of all `RaggedIds` are tried in their place.

    No unsigned number means padding: each may be an id. So unsigned ids stay unsigned in a masked
    array, `numpy.ma`, whose added rows are masked; `place` takes what is masked for padding. JAX
    itself refuses masked arrays: unsigned numbers that are not ids have to be converted before.
    Strings become objects, with None in the added rows; `hash_ids` makes padding of None.

    Args:
      features: any nesting of arrays [B, …], columns of pandas, polars or Arrow, lists of ids or of
        lists of ids, `SparseIds`, `RaggedIds` and None, all with the same batch size B. Weights and
        labels may be part of the nesting: `(features, weights, labels)`.
      multiple: the batch size becomes a multiple of this.

    Returns:
      The same nesting of arrays and containers. If B is a multiple already, `features` itself, but
      for columns and lists.

    Raises:
      ValueError: features have different batch sizes, a leaf is of another kind, or `multiple` is
        not an integer of at least 1.
      TypeError: some entries of a column are lists and others are not.

    Example:
      >>> pad_batch({"user": np.array([[4, 7], [2, -1], [1, 1]])}, 2)["user"].tolist()
      [[4, 7], [2, -1], [1, 1], [-1, -1]]
    """
    multiple = check_int("pad_batch: multiple", multiple, minimum=1)
    given = collect_leaves("pad_batch", features)
    leaves = [read_ids(path, leaf) for path, leaf in given]
    rows = [
        count_rows(path, leaf) for (path, _), leaf in zip(given, leaves, strict=True)
    ]
    sizes = _batch_sizes(rows, [isinstance(leaf, RaggedIds) for leaf in leaves])
    # Size 13 and multiple 8: 3 are missing. Of m rows per example, m for each.
    pairs = zip(rows, sizes, strict=True)
    missing = [n * (-size % multiple) // (size or 1) for n, size in pairs]
    # Columns become arrays in any case, so that their type does not depend on the batch size.
    arrays = np.ndarray, jax.Array, SparseIds, RaggedIds
    if not any(missing) and all(isinstance(leaf, arrays) for _, leaf in given):
        return features
    return rebuild_nest(features, map(_padded, leaves, missing))


def _batch_sizes(rows: Sequence[int], ragged: Sequence[bool]) -> list[int]:
    """Return the batch size B of each leaf; see `pad_batch`.

    Args:
      rows: the rows of each leaf.
      ragged: whether it is `RaggedIds`, which may hold m rows for each of B examples.
    """
    pairs = list(zip(rows, ragged, strict=True))
    known = {n for n, many in pairs if n and not many} or {
        min(filter(None, rows), default=1)
    }
    # 12 rows beside arrays of 3 and 4 examples: the largest divisor, 4, so 3 rows per example.
    return [
        max((b for b in known if many and n % b == 0), default=n) for n, many in pairs
    ]


def _padded(leaf: Any, added: int) -> Any:
    """Return a leaf with `added` empty rows appended.

    In an array these are -1 if it holds integers, 0 if it holds floats, None if it holds strings,
    and masked if it holds unsigned integers.
    """
    if isinstance(leaf, SparseIds):
        rows, *inner = leaf.dense_shape
        return dataclasses.replace(leaf, dense_shape=(rows + added, *inner))
    if isinstance(leaf, RaggedIds):
        # Splits 0 2 2 3 and two empty rows: 0 2 2 3 3 3.
        splits = np.pad(leaf.row_splits, (0, added), mode="edge")
        return dataclasses.replace(leaf, row_splits=splits)
    if leaf.dtype.kind in "SU":
        leaf = leaf.astype(object)
    values, kind = np.ma.getdata(leaf), leaf.dtype.kind
    rows = (added, *values.shape[1:])
    padded = np.concatenate([values, np.zeros(rows, values.dtype)])
    missing = np.concatenate([np.ma.getmaskarray(leaf), np.full(rows, kind in "iuO")])
    if kind in "iO":
        padded[missing] = PADDING_ID if kind == "i" else None
        return padded
    return mask_missing(padded, missing)

"""Take a batch apart into leaves, and put it together again, without the features' configuration.

A user's batch nests ids, weights and labels in containers of any kind. What works on whole batches
(padding, reordering) works leaf by leaf: {"user": [7, 3], "tags": RaggedIds(…)} has the leaves
"tags" and "user".

Input: any nesting of arrays, columns and containers of ids. Output: its leaves with their paths;
the same nesting of other leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tpu_embed import _checks
from tpu_embed.core.ids import frames, structure
from tpu_embed.core.ids.containers import RaggedIds, SparseIds

_LEAF = "an array [B, …], SparseIds, RaggedIds or None"


def collect_leaves(what: str, nest: Any) -> list[tuple[str, Any]]:
    """Return the leaves of a batch in flattening order, without those that are None.

    Args:
      what: the function that was called, for messages.
      nest: the batch.

    Returns:
      (path, leaf) pairs; each path begins with `what`.

    Raises:
      ValueError: a leaf is a frame, or a mapping's keys cannot be sorted.
    """
    found: list[tuple[str, Any]] = []
    _collect(what, nest, (), found)
    return found


def _collect(what: str, nest: Any, keys: tuple[Any, ...], found: list[tuple[str, Any]]) -> None:
    """Append the (path, leaf) pairs below `nest`, which stands under `keys`, to `found`."""
    inner = _children(nest)
    for key, child in inner or ():
        _collect(what, child, (*keys, key), found)
    if inner is not None or nest is None:
        return
    path = f"{what}: {'/'.join(map(str, keys)) or 'feature'}"
    if frames.as_frame(nest) is not None:
        got, remedy = type(nest).__name__, "give a dict of its columns"
        raise ValueError(_checks.message(path, expected=_LEAF, got=got, remedy=remedy))
    found.append((path, nest))


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
    telling = (one for one in nest if one is not None and not (isinstance(one, list) and not one))
    first = next(telling, None)
    return _is_column(first) or isinstance(first, (int, float, str, bytes, np.generic))


def rebuild_nest(nest: Any, leaves: Iterator[Any]) -> Any:
    """Return `nest` with its leaves replaced, in the order of `collect_leaves`; None stays None."""
    inner = _children(nest)
    if inner is None:
        return None if nest is None else next(leaves)
    return structure.rebuild(nest, {key: rebuild_nest(child, leaves) for key, child in inner})


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
    got = repr(leaf.tolist())  # an array of rank 0
    raise ValueError(_checks.message(path, expected=_LEAF, got=got))

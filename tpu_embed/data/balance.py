"""Reorder a batch, so that each replica gets about as many events as any other.

Replica s of S gets the examples s · B / S … (s + 1) · B / S - 1 of a batch. Where histories have
very different lengths, chance gives one replica many more events than another, and all wait for the
fullest: a jagged feature has room for as many events on every device. The order of the examples in
a batch rarely matters, so it can be chosen: of the lengths 9, 8, 1 and 2, the order 0 2 1 3 gives
two replicas 10 events each, instead of 17 and 3.

Input: the lengths of a batch's histories; the batch. Output: an order of its examples; the batch in
this order.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from tpu_embed._checks import check_int, check_integers, refuse
from tpu_embed._types import ArrayLike
from tpu_embed.core.ids import (
    RaggedIds,
    SparseIds,
    check_coordinates,
    check_row_splits,
    collect_leaves,
    count_rows,
    read_ids,
    rebuild_nest,
)


def balance_replicas(lengths: ArrayLike | Sequence[int], replicas: int) -> np.ndarray:
    """Return an order of examples that gives all replicas about as many events.

    The longest history goes first, each to the replica that has the fewest events so far and still
    has room for an example; of several the first one. On one replica the examples keep their order.
    The result depends on the lengths alone. If several processes feed the batch, each of them
    orders its own part, for the replicas that it feeds.

    Args:
      lengths: integers [B], the number of events of each example; with several jagged features for
        example their sum.
      replicas: S, the devices that split the batch; it divides B.

    Returns:
      int64 [B], a permutation: place i gets example `order[i]`. Replica s has the places from
      s · B / S on.

    Raises:
      TypeError: the lengths are not integers.
      ValueError: the lengths have another rank than 1, or one is negative; `replicas` is not an
        integer of at least 1, or does not divide B.

    Example:
      >>> balance_replicas([9, 8, 1, 2], 2).tolist()
      [0, 2, 1, 3]
    """
    what = "balance_replicas: lengths"
    replicas = check_int("balance_replicas: replicas", replicas, minimum=1)
    given = np.asarray(lengths)
    if given.size:
        check_integers(what, given.dtype)
    if given.ndim != 1 or given.size % replicas:
        refuse(
            what,
            expected=f"[B], B a multiple of {replicas}",
            got=f"shape {given.shape}",
            remedy="tpu_embed.pad_batch adds empty examples",
        )
    if given.size and given.min() < 0:
        at = int(given.argmin())
        refuse(what, expected="at least 0", got=f"{given[at]} at {at}")
    events_of, room = given.tolist(), given.size // replicas
    chosen = [[] for _ in range(replicas)]
    # (events so far, replica): the first of the heap has the fewest events, of several the lowest
    # number. A full replica is not put back.
    open_replicas = [(0, replica) for replica in range(replicas)]
    # Python's sort is stable, so of equal lengths the first example comes first.
    for example in sorted(range(given.size), key=lambda e: -events_of[e]):
        events, replica = open_replicas[0]
        chosen[replica].append(example)
        if len(chosen[replica]) < room:
            heapq.heapreplace(open_replicas, (events + events_of[example], replica))
        else:
            heapq.heappop(open_replicas)
    return np.array([e for mine in chosen for e in sorted(mine)], np.int64)


def reorder_batch(batch: Any, order: ArrayLike | Sequence[int]) -> Any:
    """Return a batch whose examples are in another order: features, weights, labels.

    A leaf with k · B rows has k per example, such as 4 negatives an example: they move together.
    Numbers that count examples, such as the index of the request that a candidate belongs to, are
    not changed.

    Args:
      batch: any nesting of arrays [B, …], columns, lists, `SparseIds`, `RaggedIds` and None, as for
        `pad_batch`. Weights of `SparseIds` and `RaggedIds` are inside of them, or in containers
        like theirs: the rows of a flat array of weights are not those of examples.
      order: integers [B], each of 0 … B - 1 once, such as `balance_replicas` returns: place i gets
        example `order[i]`.

    Returns:
      The same nesting of NumPy arrays and containers.

    Raises:
      TypeError: `order` does not hold integers; some entries of a column are lists and others not.
      ValueError: `order` is not a permutation, or B does not divide the rows of a leaf.

    Example:
      >>> seen = RaggedIds.from_lists([[7, 3], [], [5]])
      >>> moved = reorder_batch({"seen": seen, "label": np.array([0, 1, 2])}, [2, 0, 1])
      >>> moved["seen"].values.tolist(), moved["seen"].row_splits.tolist()
      ([5, 7, 3], [0, 1, 3, 3])
      >>> moved["label"].tolist()
      [2, 0, 1]
    """
    given = np.asarray(order)
    if given.size:
        check_integers("order", given.dtype)
    if given.ndim != 1 or not np.array_equal(np.sort(given), np.arange(given.size)):
        refuse(
            "order",
            expected="[B], each of 0 … B - 1 once",
            got=f"shape {given.shape}"
            if given.ndim != 1
            else "another list of numbers",
        )
    moves = given.astype(np.int64)
    leaves = [
        (path, read_ids(path, leaf))
        for path, leaf in collect_leaves("reorder_batch", batch)
    ]
    return rebuild_nest(
        batch, iter([_reorder_leaf(path, leaf, moves) for path, leaf in leaves])
    )


def _reorder_leaf(path: str, leaf: Any, order: np.ndarray) -> Any:
    """Return a leaf with its examples in another order.

    Raises:
      ValueError: B does not divide its rows.
    """
    rows, size = count_rows(path, leaf), order.size
    if rows % size if size else rows:
        refuse(
            path,
            expected=f"a multiple of {size} rows, as many as `order` has",
            got=f"{rows}",
        )
    # 2 rows per example, order (1, 0): rows 2 3 0 1.
    each = np.arange(rows // size if size else 0)
    by_row = (order[:, None] * each.size + each).reshape(-1)
    if not isinstance(leaf, (SparseIds, RaggedIds)):
        return leaf[by_row]
    if leaf.weights is not None and leaf.weights.shape != leaf.values.shape:
        refuse(
            path,
            expected=f"weights of shape {leaf.values.shape}",
            got=f"{leaf.weights.shape}",
        )
    if isinstance(leaf, SparseIds):
        return _reorder_sparse(path, leaf, by_row)
    return _reorder_ragged(path, leaf, by_row)


def _reorder_sparse(path: str, ids: SparseIds, order: np.ndarray) -> SparseIds:
    """Return coordinates whose rows are in another order, sorted by row again."""
    check_coordinates(path, ids)
    given = ids.indices.astype(np.int64)  # NumPy makes floats of uint64 beside int64
    # The place that the row of each entry goes to.
    rows = np.argsort(order)[given[:, 0]]
    sort = np.argsort(rows, kind="stable")  # columns ascend in a row, and stay so
    indices = np.concatenate([rows[sort, None], given[sort, 1:]], axis=1)
    weights = None if ids.weights is None else ids.weights[sort]
    return dataclasses.replace(
        ids, indices=indices, values=ids.values[sort], weights=weights
    )


def _reorder_ragged(path: str, ids: RaggedIds, order: np.ndarray) -> RaggedIds:
    """Return ragged rows in another order."""
    lengths = check_row_splits(path, ids)[order]
    splits = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    # Rows of lengths 2 and 1 that begin at 5 and 3: the values 5 6 3, which are the places 0 1 2
    # moved by 5 - 0 and 3 - 2.
    first = ids.row_splits.astype(np.int64)[order]
    at = np.arange(splits[-1]) + np.repeat(first - splits[:-1], lengths)
    weights = None if ids.weights is None else ids.weights[at]
    return dataclasses.replace(
        ids, values=ids.values[at], row_splits=splits, weights=weights
    )

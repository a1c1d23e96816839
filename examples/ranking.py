"""Rank items for users, and measure how high the items of the test are."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from tpu_embed import metrics


def leave_one_out(data) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of all ratings but the last of each user, by time, and of the last.

    Both are sorted by user, then by time; ratings of the same second stay in the file's order.
    """
    order = np.lexsort((data.timestamp, data.user))
    user = data.user[order]
    last = np.append(user[1:] != user[:-1], True)
    return order[~last], order[last]


def by_user(user: np.ndarray, item: np.ndarray, users: int) -> np.ndarray:
    """Return the items of each user, int32 [users, most], padded with -1, of pairs int [N]."""
    order, count = np.argsort(user, kind="stable"), np.bincount(user, minlength=users)
    lists = np.full((users, count.max()), -1, np.int32)
    lists[np.arange(lists.shape[1]) < count[:, None]] = item[order]
    return lists


def most_popular(seen: np.ndarray, items: int, top: int) -> np.ndarray:
    """Return the items that most users have, but for those that a user has seen, [users, top].

    A user who has seen so many that fewer are left gets -1 for the rest.
    """
    order = np.argsort(-np.bincount(seen[seen >= 0], minlength=items), kind="stable")
    best = np.full((len(seen), top), -1)
    for user, own in enumerate(seen):
        left = order[~np.isin(order, own)][:top]
        best[user, : len(left)] = left
    return best


def describe(ids, relevant: np.ndarray) -> str:
    """Return recall and NDCG of recommended items [users, top], as means over users with tests."""
    top = ids.shape[1]
    recall, ndcg = metrics.recall_at_k(ids, relevant), metrics.ndcg_at_k(ids, relevant)
    return f"recall@{top} {recall:.4f}  NDCG@{top} {ndcg:.4f}"


def print_epochs(steps: int, recommend: Callable, relevant: np.ndarray) -> Callable:
    """Return a callback of `fit` that prints a line per epoch.

    Args:
      steps: of an epoch.
      recommend: returns ids [users, top], of a state and a model.
      relevant: the items that are right, int [users, most].
    """
    begin = time.perf_counter()

    def print_line(report) -> None:
        nonlocal begin
        found = describe(recommend(report.state, report.model), relevant)
        seconds, begin = time.perf_counter() - begin, time.perf_counter()
        epoch = report.step // steps
        print(f"epoch {epoch:2d}  loss {report.loss:.4f}  {found}  {seconds:.1f} s", flush=True)

    return print_line

"""Rank all items for every user, and measure how high the items of the test are."""

from __future__ import annotations

import numpy as np


def leave_one_out(data) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of all ratings but the last of each user, by time, and of the last.

    Both are sorted by user, then by time; ratings of the same second stay in the file's order.
    """
    order = np.lexsort((data.timestamp, data.user))
    user = data.user[order]
    last = np.append(user[1:] != user[:-1], True)
    return order[~last], order[last]


def recall_and_ndcg(scores, train_pairs, test_pairs, top: int) -> tuple[float, float]:
    """Return two measures of the best `top` items, as means over the users with test items.

    Recall is the share of a user's test items among them. NDCG gives the test item at place k,
    counted from 0, 1 / log2(k + 2), and divides by the most that could be had.

    Args:
      scores: float [users, items].
      train_pairs: users and items, int [N] each, which are left out of the ranking.
      test_pairs: users and items, int [M] each.
      top: how many items are taken.
    """
    scores = np.array(scores)
    scores[train_pairs] = -np.inf
    relevant = np.zeros(scores.shape, bool)
    relevant[test_pairs] = True
    scores, relevant = scores[relevant.any(axis=1)], relevant[relevant.any(axis=1)]
    best = np.argsort(-scores, axis=1, kind="stable")[:, :top]
    found = np.take_along_axis(relevant, best, axis=1)
    count, gains = relevant.sum(axis=1), 1 / np.log2(np.arange(found.shape[1]) + 2)
    most = np.cumsum(gains)[np.minimum(count, found.shape[1]) - 1]
    return float((found.sum(axis=1) / count).mean()), float((found @ gains / most).mean())

"""Small integer tables, and what a search of them must find."""

import numpy as np


def integers(seed, *shape):
    """Return small integers, so that many scores are equal, as float32."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def expected(rows, queries, k, exclude=None, allowed=None):
    """Return scores and ids `[B, k]` by sorting all products in float64, one query at a time."""
    scores, ids = np.full((len(queries), k), -np.inf), np.full((len(queries), k), -1)
    for b, query in enumerate(queries):
        hidden, found = set() if exclude is None else set(np.asarray(exclude)[b].tolist()), []
        for i, row in enumerate(rows):
            score = float(sum(q * x for q, x in zip(query, row, strict=True)))
            if i not in hidden and (allowed is None or allowed[i]) and np.isfinite(score):
                found.append((-score, i))
        for place, (falling, i) in enumerate(sorted(found)[:k]):
            scores[b, place], ids[b, place] = -falling, i
    return scores, ids


def assert_found(found, wanted):
    np.testing.assert_array_equal(found.ids, wanted[1])
    np.testing.assert_array_equal(found.scores, wanted[0].astype(np.float32))

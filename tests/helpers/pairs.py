"""All-pairs designs: few rows in which any two levels of any two factors occur together.

Most bugs in a product of factors are caused by two factors together. A design of all pairs finds
them in tens of rows where the whole product has thousands. Nothing is random: the same factors give
the same rows in the same order.
"""

import collections
import itertools

import pytest


def parametrize_pairs(**factors):
    """Return a decorator that runs a test on an all-pairs design of the factors.

    The rest of the whole product is marked, so `make test-all` runs it.

    Args:
      factors: argument of the test -> its levels; at least two arguments.
    """
    design = [tuple(row.values()) for row in all_pairs(**factors)]
    cases = [
        pytest.param(*case, marks=[] if case in design else [pytest.mark.whole])
        for case in itertools.product(*factors.values())
    ]
    return pytest.mark.parametrize(tuple(factors), cases, ids=str)


def all_pairs(**factors):
    """Return rows `{factor: level}` that contain every pair of levels of two factors.

    Factors are added one at a time, the largest first. Each row takes the level that adds the most
    new pairs (among equals, the level whose pairs are rarest so far); then rows are added for the
    pairs that remain.

    Args:
      factors: factor -> its levels; at least two factors.
    """
    sizes = {name: len(levels) for name, levels in factors.items()}
    names = sorted(sizes, key=lambda name: -sizes[name])
    first, second = names[:2]
    rows = [
        {first: i, second: j}
        for i, j in itertools.product(range(sizes[first]), range(sizes[second]))
    ]
    for n in range(2, len(names)):
        rows = _grown(rows, names[:n], names[n], sizes)
    return [{name: factors[name][row[name]] for name in factors} for row in rows]


def _grown(rows, old, new, sizes):
    """Return the rows with one more factor."""
    counts = collections.Counter()

    def seen(row, level):
        return [counts[name, row[name], level] for name in old]

    for row in rows:
        row[new] = min(
            range(sizes[new]), key=lambda level: (-seen(row, level).count(0), sum(seen(row, level)))
        )
        counts.update((name, row[name], row[new]) for name in old)
    added = []
    for name in old:
        for i, level in itertools.product(range(sizes[name]), range(sizes[new])):
            if not counts[name, i, level]:
                added.append(_new_row(counts, old, (name, i), level, sizes) | {new: level})
                counts.update((other, added[-1][other], level) for other in old)
    return rows + added


def _new_row(counts, old, fixed, level, sizes):
    """Return a row of the old factors: one is fixed, the others met the new level least often."""
    name, i = fixed
    row = {other: min(range(sizes[other]), key=lambda j: counts[other, j, level]) for other in old}
    return row | {name: i}

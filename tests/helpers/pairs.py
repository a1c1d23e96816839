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
    # By the numbers of the levels: 0.0 and -0.0 are equal, and two levels.
    numbers = {name: range(len(levels)) for name, levels in factors.items()}
    design = {tuple(row.values()) for row in all_pairs(**numbers)}
    every = (itertools.product(*of.values()) for of in (numbers, factors))
    cases = [
        pytest.param(*case, marks=[] if number in design else [pytest.mark.whole])
        for number, case in zip(*every, strict=True)
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
    levels = itertools.product(range(sizes[first]), range(sizes[second]))
    rows = [{first: i, second: j} for i, j in levels]
    for n in range(2, len(names)):
        rows = _grown(rows, names[:n], names[n], sizes)
    return [{name: factors[name][row[name]] for name in factors} for row in rows]


def _grown(rows, old, new, sizes):
    """Return the rows with one more factor."""
    counts, levels = collections.Counter(), range(sizes[new])

    def seen(row, level):
        return [counts[name, row[name], level] for name in old]

    for row in rows:
        ranks = [(-seen(row, level).count(0), sum(seen(row, level))) for level in levels]
        row[new] = ranks.index(min(ranks))
        counts.update((name, row[name], row[new]) for name in old)
    added = []
    for name in old:
        for i, level in itertools.product(range(sizes[name]), levels):
            if not counts[name, i, level]:
                # The other factors take the levels that have met the new one least often.
                met = {x: [counts[x, j, level] for j in range(sizes[x])] for x in old}
                row = {x: numbers.index(min(numbers)) for x, numbers in met.items()}
                added.append(row | {name: i, new: level})
                counts.update((other, added[-1][other], level) for other in old)
    return rows + added

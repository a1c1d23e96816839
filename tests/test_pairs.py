"""The all-pairs generator: every pair occurs, in few rows."""

import itertools

import pytest
from pairs import all_pairs, parametrize_pairs


def missing(rows, factors):
    """Return the pairs of levels that no row has."""
    return [
        ((a, x), (b, y))
        for a, b in itertools.combinations(factors, 2)
        for x, y in itertools.product(factors[a], factors[b])
        if not any(row[a] == x and row[b] == y for row in rows)
    ]


# The least are 9, an orthogonal array, and 53 times 4.
SIZES = [((2, 2), 4), ((3, 3, 3, 3), 15), ((53, 4, 3, 2, 2), 212), ((1, 1, 5), 5)]


@pytest.mark.parametrize(("sizes", "most"), SIZES)
def test_every_pair_is_covered_by_few_rows(sizes, most):
    factors = {f"factor {i}": range(10 * i, 10 * i + n) for i, n in enumerate(sizes)}
    rows = all_pairs(**factors)
    assert not missing(rows, factors)
    assert len(rows) <= most
    assert rows == all_pairs(**factors)


def test_the_whole_product_is_there_and_what_is_no_pair_is_marked():
    factors = {"a": [0.0, -0.0, 3], "b": ["x", "y"], "c": [None, (0, 1)]}
    names, cases = parametrize_pairs(**factors).args
    assert names == ("a", "b", "c")
    assert [case.values for case in cases] == list(itertools.product(*factors.values()))
    rows = [dict(zip(names, case.values, strict=True)) for case in cases if not case.marks]
    assert not missing(rows, factors)
    assert 6 <= len(rows) < 12
    assert {mark.name for case in cases for mark in case.marks} == {"whole"}

"""Runs of equal row ids: their order, their numbers, and their rows."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_embed.core.exchange import dedup

ABSENT = 9
N = 12
ROWS = st.lists(st.integers(0, ABSENT), min_size=N, max_size=N)


@jax.jit
def find(rows):
    return dedup.find_runs(rows, ABSENT)


@jax.jit
def find_parts(rows, parts):
    return dedup.find_runs(rows, ABSENT, parts)


def expected_runs(keys):
    """Return (order, run of each, first key of each run): a stable sort, and a count of changes."""
    order = sorted(range(len(keys)), key=lambda i: keys[i][0])
    run, firsts = [], []
    for place, i in enumerate(order):
        if place == 0 or keys[i] != keys[order[place - 1]]:
            firsts.append(keys[i])
        run.append(len(firsts) - 1)
    return order, run, firsts


def check(runs, keys):
    order, run, firsts = expected_runs(keys)
    assert np.asarray(runs.order).tolist() == order
    assert np.asarray(runs.row_ids).tolist() == [keys[i][0] for i in order]
    assert np.asarray(runs.run).tolist() == run
    rows = [row for row, _ in firsts]
    assert np.asarray(runs.run_row_ids).tolist() == rows + [ABSENT] * (len(keys) - len(rows))


@settings(max_examples=50)
@given(ROWS)
def test_runs_of_rows(rows):
    check(find(np.array(rows, np.int32)), [(row, 0) for row in rows])


@settings(max_examples=50)
@given(ROWS, st.lists(st.integers(0, 3), min_size=N, max_size=N).map(sorted))
def test_rows_of_different_parts_are_different_runs(rows, parts):
    arrays = np.array(rows, np.int32), np.array(parts, np.int32)
    check(find_parts(*arrays), list(zip(rows, parts, strict=True)))


@settings(max_examples=20)
@given(ROWS.map(sorted))
def test_sorted_rows_need_no_sort(rows):
    runs = dedup.runs_of_sorted(jax.numpy.array(rows, np.int32), ABSENT)
    check(runs, [(row, 0) for row in rows])


@pytest.mark.parametrize("rows", [[ABSENT], [0], [ABSENT] * 3])
def test_few(rows):
    check(dedup.find_runs(jax.numpy.array(rows, np.int32), ABSENT), [(row, 0) for row in rows])

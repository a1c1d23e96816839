"""Runs of equal row ids: their numbers, and their rows."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_embed.core.exchange import number_runs

ABSENT = 9
N = 12
ROWS = st.lists(st.integers(0, ABSENT), min_size=N, max_size=N).map(sorted)


@jax.jit
def number(rows):
    return number_runs(rows, ABSENT)


@jax.jit
def number_parts(rows, parts):
    return number_runs(rows, ABSENT, parts)


def check(runs, keys):
    """Check the runs of sorted keys (row, part) by counting where a key differs from the last."""
    run, firsts = [], []
    for place, key in enumerate(keys):
        if place == 0 or key != keys[place - 1]:
            firsts.append(key)
        run.append(len(firsts) - 1)
    numbers, run_rows = map(np.asarray, runs)
    assert numbers.tolist() == run
    rows = [row for row, _ in firsts]
    assert run_rows.tolist() == rows + [ABSENT] * (len(keys) - len(rows))


@settings(max_examples=50)
@given(ROWS)
def test_runs_of_rows(rows):
    check(number(np.array(rows, np.int32)), [(row, 0) for row in rows])


@settings(max_examples=50)
@given(ROWS, st.lists(st.integers(0, 3), min_size=N, max_size=N))
def test_rows_of_different_parts_are_different_runs(rows, parts):
    keys = sorted(zip(rows, parts, strict=True))
    arrays = [np.array(numbers, np.int32) for numbers in zip(*keys, strict=True)]
    check(number_parts(*arrays), keys)


@pytest.mark.parametrize("rows", [[ABSENT], [0], [ABSENT] * 3])
def test_few(rows):
    check(number_runs(jax.numpy.array(rows, np.int32), ABSENT), [(row, 0) for row in rows])

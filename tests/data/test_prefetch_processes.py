"""`Prefetcher` in several processes: one order of batches, and ends and errors that all hear of."""

import json

import jax
import numpy as np
import prefetch_cases
import process_cases
import pytest
from process_runs import run, start


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Return what two processes of 4 devices each find."""
    calls = [
        (prefetch_cases.train, 8),
        (prefetch_cases.left_half_way, 8, "closed"),
        (prefetch_cases.left_half_way, 8, "dropped"),
        (prefetch_cases.faults, 8),
    ]
    return run(2, tmp_path_factory.mktemp("two"), calls)


def same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.whole
def test_the_bits_are_those_of_one_process(two):
    """While the loop places batches of its own, among those that the thread places."""
    expected, _ = process_cases.train(8)
    same(prefetch_cases.train(8)[0], expected)
    labels = [[*range(step, step + process_cases.BATCH)] for step in range(process_cases.STEPS)]
    for (bits, _), *_ in two:
        same(bits, expected)
    assert [a + b for a, b in zip(two[0][0][1], two[1][0][1], strict=True)] == labels


@pytest.mark.whole
def test_a_prefetcher_that_is_left_leaves_the_processes_in_step(two):
    expected, _ = process_cases.train(8)
    for _, closed, dropped, _ in two:
        same(closed, expected)
        same(dropped, expected)


@pytest.mark.whole
def test_ends_and_errors_come_everywhere_at_the_same_batch(two):
    """Whatever was placed ahead; the next prefetcher then works as if nothing had happened."""
    for process, (*_, found) in enumerate(two):
        first = process * process_cases.BATCH // 2
        good, ended = [*range(first, first + 5)], [first, first + 1]
        assert found[-1] == (good, None)
        for seen, _ in found[:-1]:
            assert seen == ended
        for (_, uneven), (_, failed), (_, refused) in (found[:3], found[3:6]):
            assert (uneven[0], failed[0], refused[0]) == ("ValueError", "OSError", "ValueError")
            said = "expected a batch in every process, or in none, got no more batches in process 1"
            assert said in uneven[1]
            told = "place: process 1 refused its part of the batch: "
            assert failed[1] == ("" if process else told) + "disk gone"
            assert refused[1].startswith("feature 'user'" if process else told)


def test_a_position_holds_the_states_of_all_processes(tmp_path):
    two = run(2, tmp_path, [(prefetch_cases.positions, 8)])
    for process, ((position, at_once, again),) in enumerate(two):
        states = [{"json": {"next": 4}}, {"json": {"next": 14}}]
        assert json.loads(json.dumps(position)) == position
        shapes = position.pop("shapes")  # of the jagged feature; test_prefetcher_positions.py
        assert shapes
        assert position == {"batches": 4, "sources": states}
        assert at_once == again == [10 * process + number for number in (5, 6, 7)]


def test_one_raises_in_its_loop_and_all_end(tmp_path):
    ended, _ = start(2, tmp_path, [(prefetch_cases.raise_in_the_loop,)], timeout=150)
    assert [status for status, _ in ended] == [1, 1]
    assert "ValueError: mine alone" in ended[1][1]
    assert "mine alone" in ended[0][1]

"""`fit` in two processes: each has its part of the data, and an error in one ends both."""

import functools

import jax
import loop_processes
import numpy as np
import pytest
from process_runs import run


@pytest.mark.whole
def test_two_processes_go_on_from_the_checkpoint_that_they_saved_together(tmp_path):
    calls = [(loop_processes.train, 8, tmp_path / "run"), (loop_processes.undisturbed, 8)]
    one, two = run(2, tmp_path, calls)
    for (*trained, loss, error), expected in (one, two):
        jax.tree.map(np.testing.assert_array_equal, tuple(trained), expected)
        assert np.isfinite(loss)
        assert "disk gone" in error[0]
        assert "has step 3; the same call goes on" in error[1]
    jax.tree.map(np.testing.assert_array_equal, one[1], two[1])


@pytest.mark.whole
def test_parts_of_batches_values_of_events_and_the_best_are_those_of_one_process(tmp_path):
    expected = loop_processes.in_parts(8, tmp_path / "one")
    assert expected[1] == (4, {"score": 0}, [2, 4, 6, 8])
    one, two = run(2, tmp_path, [(loop_processes.in_parts, 8, tmp_path / "run")])
    jax.tree.map(np.testing.assert_array_equal, one, two)
    # The mean over all devices is summed in another order there.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4)
    jax.tree.map(close, one[0], expected)


def test_sigterm_to_one_of_two_processes_ends_both_at_one_step(tmp_path):
    steps, directory = 40, tmp_path / "run"
    calls = [(loop_processes.stop, steps, directory)]
    expected = loop_processes.small(None, loop_processes.keys_of(steps))
    for ((found, step, (code, note)),) in run(2, tmp_path, calls):
        assert code == 143
        assert 3 < step < steps
        assert f"has step {step}; the same call goes on" in note
        jax.tree.map(np.testing.assert_array_equal, found, expected)

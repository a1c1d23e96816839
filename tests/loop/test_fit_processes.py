"""`fit` in two processes: each has its part of the data, and an error in one ends both."""

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

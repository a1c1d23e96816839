"""A process that trains by `fit` is killed again and again; it ends with the undisturbed bits."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

SCRIPT, STEPS = Path(__file__).with_name("killed_fit.py"), 40


def started(directory):
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    python = [sys.executable, str(SCRIPT), str(directory), str(STEPS)]
    return subprocess.Popen(python, env=environment, stdout=subprocess.PIPE, text=True)


def last_of(directory):
    """Let a process come to its end; return the steps that it took, and what was trained."""
    out, _ = started(directory).communicate()
    with np.load(directory / "last.npz") as found:
        return out.count("step "), [found[name] for name in found.files]


@pytest.mark.whole
def test_killed_again_and_again_a_run_ends_with_the_undisturbed_bits(tmp_path):
    _, expected = last_of(tmp_path / "undisturbed")
    rng, unfinished = np.random.default_rng(0), 0
    for _ in range(6):
        child = started(tmp_path / "run")
        for _ in range(int(rng.integers(2, 6))):
            child.stdout.readline()
        time.sleep(rng.uniform(0, 0.3))
        child.kill()
        child.wait()
        child.stdout.close()
        unfinished += any((tmp_path / "run").glob("*.orbax-checkpoint-tmp*"))
    steps, found = last_of(tmp_path / "run")
    assert steps < STEPS
    assert unfinished, "no kill came in the middle of a save"
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)

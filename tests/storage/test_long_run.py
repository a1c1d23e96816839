"""A long run of a table on the host: its memory stays as it is, and at its end nothing is left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT, ROOT = Path(__file__).with_name("long_run.py"), Path(__file__).resolve().parents[2]
RUNNING = "threads while it runs: tpu_embed prefetch tpu_embed write-back"
MIB = 2**20


def run(closed, *steps):
    """Return the lines that a run prints."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    options = {"env": environment | {"PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True}
    command = [sys.executable, "-W", "error", str(SCRIPT), *map(str, (closed, *steps))]
    done = subprocess.run(command, check=False, timeout=3600, **options)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.whole
@pytest.mark.parametrize("closed", [0, 1])
@pytest.mark.quick(1)
def test_the_end_of_a_run_leaves_no_thread(closed):
    *_, last = lines = run(closed, 20)
    assert RUNNING in lines
    assert last == ("threads after it:" if closed else RUNNING)


@pytest.mark.whole
def test_memory_does_not_grow_with_the_steps():
    early, late, *_ = (list(map(int, line.split())) for line in run(1, 2000, 20_000)[:2])
    print(f"{early[1] / MIB:.1f} MiB after {early[0]} steps, {late[1] / MIB:.1f} after {late[0]}")
    assert late[2] == early[2] > 3000  # all rows were touched before
    assert late[3] > 10 * 0.9 * early[3] > 0
    assert late[4] > 0
    # Nothing is kept for each step: 18,000 steps times 100 bytes would be 1.7 MiB.
    assert late[1] - early[1] < 0.02 * early[1] + 4 * MIB

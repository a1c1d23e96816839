"""Kill a training process repeatedly while it saves in the background; nothing is lost."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

SCRIPT, ROOT = Path(__file__).with_name("killed.py"), Path(__file__).resolve().parents[3]
EVERY, KEEP = 2, 2


class Runs:
    """A child after the other in one directory."""

    def __init__(self, directory, steps, cache):
        self.directory, self.steps, self.cache = directory, steps, cache
        self.resumed, self.left = [], 0
        self.errors = directory.with_suffix(".txt")

    def number(self, child, word):
        """Return the number of the line that the child prints next, which begins with a word."""
        said, _, number = child.stdout.readline().partition(" ")
        assert said == word, self.errors.read_text()
        return int(number)

    def start(self):
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        command = [sys.executable, str(SCRIPT), str(self.directory), str(self.steps)]
        with self.errors.open("a") as errors:
            child = subprocess.Popen(
                [*command, str(self.cache)],
                env=environment | {"PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.resumed.append(self.number(child, "resumed"))
        return child

    def killed(self, lines, seconds):
        """Start a child, and kill it so many steps and seconds later; return the last step."""
        child, last = self.start(), self.resumed[-1]
        for _ in range(lines):
            last = self.number(child, "step")
        time.sleep(seconds)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        self.left += any(self.directory.glob("*.orbax-checkpoint-tmp*"))
        return last

    def finished(self):
        """Start a child, let it end; return all that was trained."""
        out, _ = self.start().communicate()
        assert out.endswith("done\n"), self.errors.read_text()
        with np.load(self.directory / "last.npz") as last:
            return [last[name] for name in last.files]


def check_kills(tmp_path, kills, steps):
    undisturbed = Runs(tmp_path / "undisturbed", steps, tmp_path / "cache").finished()
    rng, runs = np.random.default_rng(kills), Runs(tmp_path / "runs", steps, tmp_path / "cache")
    for _ in range(kills):
        last = runs.killed(int(rng.integers(1, 7)), rng.uniform(0, 0.05))
        assert last < steps, "it came to its end before it was killed"
    last = runs.finished()
    assert len(runs.resumed) == kills + 1
    assert runs.resumed == sorted(runs.resumed)
    assert all(step % EVERY == 0 for step in runs.resumed)
    assert runs.resumed[-1] > 0
    left = {path.name for path in runs.directory.iterdir() if path.is_dir()}
    assert left == {f"{steps - n * EVERY}" for n in range(KEEP)}
    print(f"{kills} kills, {runs.left} of them while a save was under way; resumed {runs.resumed}")
    assert len(last) == len(undisturbed)
    for a, b in zip(last, undisturbed, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.whole
def test_a_killed_run_ends_with_the_same_bits(tmp_path):
    check_kills(tmp_path, kills=2, steps=24)


@pytest.mark.whole
def test_many_kills_end_with_the_same_bits(tmp_path):
    check_kills(tmp_path, kills=60, steps=400)

"""Kill a training process repeatedly while it saves in the background; nothing is lost."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from bucket_servers import fake_gcs, set_environment

from tpu_embed.io.commits import committer
from tpu_embed.io.store import place_of

SCRIPT, ROOT = Path(__file__).with_name("killed.py"), Path(__file__).resolve().parents[3]
EVERY, KEEP = 2, 2


class Runs:
    """A child after the other in one directory, or at one URL."""

    def __init__(self, directory, steps, cache, url=None):
        self.directory, self.steps, self.cache = directory, steps, cache
        self.place, self.last = url or directory, directory.with_suffix(".npz")
        self.resumed, self.errors = [], directory.with_suffix(".txt")

    def number(self, child, word):
        """Return the number of the line that the child prints next, which begins with a word."""
        said, _, number = child.stdout.readline().partition(" ")
        assert said == word, self.errors.read_text()
        return int(number)

    def start(self):
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        options = {"env": environment | {"PYTHONPATH": str(ROOT)}, "text": True}
        given = map(str, (SCRIPT, self.place, self.steps, self.cache, self.last))
        with self.errors.open("a") as errors:
            options |= {"stdout": subprocess.PIPE, "stderr": errors}
            child = subprocess.Popen([sys.executable, *given], **options)
        self.resumed.append(self.number(child, "resumed"))
        return child

    def killed(self, lines, seconds):
        """Start a child, and kill it so many steps and seconds later; return the last step."""
        child, last = self.start(), self.resumed[-1]
        for _ in range(lines):
            last = self.number(child, "step")
        time.sleep(seconds)
        child.kill()
        child.wait()
        child.stdout.close()
        return last

    def finished(self):
        """Start a child, let it end; return all that was trained."""
        out, _ = self.start().communicate()
        assert out.endswith("done\n"), self.errors.read_text()
        with np.load(self.last) as last:
            return [last[name] for name in last.files]


def check_kills(tmp_path, kills, steps, url=None):
    undisturbed = Runs(tmp_path / "undisturbed", steps, tmp_path / "cache").finished()
    rng = np.random.default_rng(kills)
    runs = Runs(tmp_path / "runs", steps, tmp_path / "cache", url)
    for _ in range(kills):
        last = runs.killed(int(rng.integers(1, 7)), rng.uniform(0, 0.05))
        assert last < steps, "it came to its end before it was killed"
    last = runs.finished()
    assert len(runs.resumed) == kills + 1
    assert runs.resumed == sorted(runs.resumed)
    assert all(step % EVERY == 0 for step in runs.resumed)
    assert runs.resumed[-1] > 0
    left = set(committer(place_of(url or runs.directory)).names())
    assert left == {f"{steps - n * EVERY}" for n in range(KEEP)}
    for a, b in zip(last, undisturbed, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.whole
@pytest.mark.parametrize(("kills", "steps"), [(2, 24), (60, 400)])
def test_a_run_that_is_killed_ends_with_the_same_bits(tmp_path, kills, steps):
    check_kills(tmp_path, kills, steps)


@pytest.mark.whole
@pytest.mark.parametrize("kills", [4, 50])
def test_kills_leave_whole_checkpoints_in_a_bucket(tmp_path, kills, monkeypatch):
    with fake_gcs() as server:
        set_environment(monkeypatch, "gs", server.server_address)
        check_kills(tmp_path, kills, steps=7 * kills + 10, url="gs://bucket/run")
        run = place_of("gs://bucket/run")
        said = [committer(run / step)._said() for step in committer(run).names()]
        named = tuple(f"run/{one}/" for each in said for one in (each["root"], *each["shared"]))
        left = [name for name in server.objects if not name.startswith(("run/commits/", *named))]
        assert not left  # all of it has been swept

"""Loops of both APIs that are interrupted at random: never a wrong number, never a hang."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("interrupted_loops.py")
MOST = 600
"""Seconds in which each ends."""


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.whole)])
@pytest.mark.parametrize("which", ["embedding", "functional"])
def test_interrupts_at_random_moments(which, count):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    options = {"env": environment, "capture_output": True, "text": True, "timeout": MOST}
    ended = subprocess.run([sys.executable, str(PROGRAM), which, str(count), "0"], **options)
    assert ended.returncode == 0, ended.stderr
    interrupts, kept = map(int, ended.stdout.split())
    assert interrupts == count
    assert kept >= {"embedding": 0.95, "functional": 0.3}[which] * count

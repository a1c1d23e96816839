"""The example of many hosts: two processes on this machine train as one process does."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
STEPS, BATCH = 40, 256


def start(*arguments, cwd, environment):
    command = [sys.executable, str(ROOT / "examples" / "multi_host.py"), *map(str, arguments)]
    command += ["--steps", str(STEPS), "--batch-size", str(BATCH)]
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def outputs(processes):
    """Return what the processes print, once all are done; none outlives this."""
    try:
        done = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, done, strict=True):
        assert process.returncode == 0, errors
    return [out for out, _ in done]


def losses(out):
    return np.array([float(x) for x in re.findall(r"loss (\S+)", out)])


@pytest.fixture
def environment(monkeypatch):
    """Return this environment without the tests' own 8 devices."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return dict(os.environ)


def test_two_processes_train_as_one(environment, tmp_path):
    with socket.socket() as probe:  # the system picks a free port
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    many = ("--distributed", "--coordinator", address, "--processes", 2, "--devices", 2)
    runs = [(*many, "--process", 0), (*many, "--process", 1), ("--devices", 4)]
    first, second, one = outputs(
        [start(*arguments, cwd=tmp_path, environment=environment) for arguments in runs]
    )
    assert "2 process(es), 4 cpu device(s)" in first
    assert "1 process(es), 4 cpu device(s)" in one
    assert "ids outside their tables: 0" in first
    assert not losses(second).size
    assert len(losses(one)) == STEPS // 10
    assert losses(one)[-1] < losses(one)[0]
    # The loss and the network's gradients are sums over devices, which the collectives of several
    # processes add in another order: last bits of float32, that may turn the last printed digit.
    np.testing.assert_allclose(losses(first), losses(one), rtol=0, atol=2e-6)

"""The multihost example: processes on this machine train as one does, and survive a kill."""

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from example_cases import ROOT, numbers
from process_runs import free_port

COMMAND = [sys.executable, str(ROOT / "examples" / "multihost.py")]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
ENVIRONMENT.pop("XLA_FLAGS", None)  # the tests' own 8 devices
STEPS, BATCH = 150, 64
ENDS_WITHIN = 60
"""Seconds: a process misses another one after 20, and its own death may take some."""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Return what starts the example; nothing that it starts outlives the tests."""
    started, folder = [], tmp_path_factory.mktemp("outputs")

    def start(*arguments):
        out, err = (folder / f"{len(started)}.{kind}" for kind in ("out", "err"))
        given = [*map(str, arguments), "--steps", str(STEPS), "--batch-size", str(BATCH)]
        with out.open("w") as a, err.open("w") as b:
            process = subprocess.Popen([*COMMAND, *given], env=ENVIRONMENT, stdout=a, stderr=b)
        started.append(process)
        return started[-1], out, err

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def undisturbed(start):
    """Return what two processes print that the example starts itself."""
    return finished(*start("--local", 2, "--devices", 2))


def finished(process, out, err):
    """Return what a process printed, once it is done."""
    assert process.wait(timeout=240) == 0, err.read_text()
    return out.read_text()


def start_two(start, *arguments):
    """Start two processes with two devices each; return both."""
    address = f"127.0.0.1:{free_port()}"
    many = ("--distributed", "--coordinator", address, "--processes", 2, "--devices", 2)
    return [start(*many, "--process", number, *arguments) for number in range(2)]


losses = functools.partial(numbers, r"loss (\S+)")
checksum = re.compile(r"checksum of tables and network: (\S+)").findall


@pytest.mark.whole
def test_two_processes_train_as_one(start, undisturbed):
    one = finished(*start("--devices", 4))
    assert "2 process(es), 4 cpu device(s)" in undisturbed
    assert "1 process(es), 4 cpu device(s)" in one
    assert len(losses(one)) == STEPS // 10
    assert losses(one)[-1] < losses(one)[0]
    # The loss and the network's gradients are sums over devices, which the collectives of several
    # processes add in another order: last bits of float32, that may turn the last printed digit.
    np.testing.assert_allclose(losses(undisturbed), losses(one), rtol=0, atol=2e-6)


@pytest.mark.whole
def test_one_killed_both_end_and_go_on_to_the_same_bits(start, undisturbed, tmp_path):
    saved = "--directory", tmp_path / "checkpoints"
    survivor, victim = start_two(start, *saved)
    deadline = time.monotonic() + 200
    # A checkpoint appears under its name when it is whole, some steps after its own.
    while not (tmp_path / "checkpoints" / "50").exists():
        assert survivor[0].poll() is None, survivor[2].read_text()
        assert time.monotonic() < deadline, survivor[1].read_text()
        time.sleep(0.05)
    victim[0].send_signal(signal.SIGKILL)
    assert survivor[0].wait(timeout=ENDS_WITHIN) != 0
    assert not checksum(survivor[1].read_text())
    first, second = (finished(*run) for run in start_two(start, *saved))
    assert checksum(second) == checksum(first)
    assert not losses(second).size
    assert "step 50 " not in first  # it went on from there
    assert checksum(first)
    assert checksum(undisturbed) == 2 * checksum(first)


@pytest.mark.whole
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_the_one_that_started_them(number):
    """They hold its output open for as long as one of them lives."""
    given = ["--local", "2", "--devices", "2", "--batch-size", str(BATCH), "--steps", "1000000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    options = {"env": ENVIRONMENT, "start_new_session": True}
    launcher = subprocess.Popen([*COMMAND, *given], **pipes, **options)
    try:
        assert any("step 10 " in line for line in launcher.stdout)
        launcher.send_signal(number)
        launcher.communicate(timeout=ENDS_WITHIN)  # until nothing holds its output
    finally:
        with contextlib.suppress(ProcessLookupError):  # there is nobody left
            os.killpg(launcher.pid, signal.SIGKILL)


@pytest.mark.whole
def test_a_failure_of_one_is_the_failure_of_all(start):
    process, _, err = start("--local", 2, "--devices", 3)
    assert process.wait(timeout=240) == 1
    assert "--batch-size must be a multiple of 6 devices" in err.read_text()

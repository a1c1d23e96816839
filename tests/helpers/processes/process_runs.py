"""Run functions of the helpers in several processes at once."""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("process_program.py")


def free_port():
    """Return a port that the system has picked."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(processes, directory, calls, timeout=540):
    """Return the exit status and the errors of several processes, and where their results are.

    Each makes the calls one after the other: tuples of a function and its arguments. No process
    outlives this.
    """
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("XLA_FLAGS", None)
    outputs = [directory / f"{processes}-{number}.pickle" for number in range(processes)]
    asked, options = directory / "calls.pickle", {"stderr": subprocess.PIPE, "text": True}
    asked.write_bytes(pickle.dumps(calls))
    started = []
    for number, output in enumerate(outputs):
        given = map(str, (PROGRAM, processes, number, port, asked, output))
        started.append(subprocess.Popen([sys.executable, *given], env=environment, **options))
    try:
        errors = [process.communicate(timeout=timeout)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(p.returncode, error) for p, error in zip(started, errors, strict=True)], outputs


def run(processes, directory, calls):
    """Return what the calls return in each of several processes."""
    ended, outputs = start(processes, directory, calls)
    for status, error in ended:
        assert status == 0, error
    return [pickle.loads(output.read_bytes()) for output in outputs]

"""Run functions of the helpers in several processes at once."""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("process_program.py")


def start(processes, directory, calls, timeout=540):
    """Return the exit status and the errors of several processes, and where their results are.

    Each makes the calls one after the other: tuples of a function and its arguments.

    None outlives this.
    """
    with socket.socket() as probe:  # the system picks a free port
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("XLA_FLAGS", None)
    outputs = [directory / f"{processes}-{number}.pickle" for number in range(processes)]
    script = [sys.executable, str(PROGRAM), str(processes)]
    (directory / "calls.pickle").write_bytes(pickle.dumps(calls))
    started = [
        subprocess.Popen(
            [*script, str(number), str(port), str(directory / "calls.pickle"), str(output)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, output in enumerate(outputs)
    ]
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

"""Run a program several times on this machine, as the processes of one distributed run.

None of them outlives the process that started them, however that ends: the standard input of each
is a pipe that only the starter holds open, so the system closes it when the starter ends.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading


def run_all(count: int) -> int:
    """Run this program `count` times; return the first exit status that is not 0, else 0."""
    with socket.socket() as probe:  # the system picks a free port
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, *sys.argv, "--distributed", "--coordinator", address]
    command += ["--processes", str(count), "--local", "0", "--end-with-input", "--process"]
    processes = [
        subprocess.Popen([*command, str(number)], stdin=subprocess.PIPE) for number in range(count)
    ]
    return next(filter(None, [process.wait() for process in processes]), 0)


def end_with_input() -> None:
    """End this process when its standard input closes, because its starter has ended."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

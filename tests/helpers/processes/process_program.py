"""Be one of several processes: `process_program.py PROCESSES NUMBER PORT CALLS OUTPUT`.

CALLS is a file of pickled calls, each a function and its arguments. Their results are pickled into
OUTPUT. Tables without an initializer have the rows of `quick_rows.py`, and random numbers are those
of `quick_random.py`, as in other tests.
"""

import pickle
import sys
import tempfile
from pathlib import Path

import jax
import quick_random
import quick_rows
from process_cases import DEVICES

from tpu_embed.core.layout import layout


def main():
    """Make the calls, and write what they return."""
    processes, number, port = map(int, sys.argv[1:4])
    calls, output = map(Path, sys.argv[4:6])
    quick_random.install()
    layout.initializer_of = quick_rows.initializer_of
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES // processes)
    if processes > 1:
        address = f"127.0.0.1:{port}"
        seconds = {"heartbeat_timeout_seconds": 20, "shutdown_timeout_seconds": 10}
        jax.distributed.initialize(address, processes, number, **seconds)
    results = [call(*arguments) for call, *arguments in pickle.loads(calls.read_bytes())]
    with tempfile.NamedTemporaryFile(dir=output.parent, delete=False) as file:
        pickle.dump(results, file)
    Path(file.name).replace(output)


if __name__ == "__main__":
    main()

"""What it costs two processes to make the same map: `place` of keys beside `place` of row numbers.

    python benchmarks/living_processes.py [--new 0.05]

This starts two processes of one device each on this machine. Each places its half of the batches
of `living.py`, in turns for a table with a dynamic vocabulary and for a fixed one. Prints medians
of the milliseconds of `place` in process 0, and the bytes that this process sends for a batch.
"""

from __future__ import annotations

import argparse
import pickle
import socket
import subprocess
import sys
from typing import Any

import common
import jax
import living
import numpy as np

import tpu_embed
from tpu_embed.processes import messages

PROCESSES = 2


def count_bytes() -> list[int]:
    """Return a list to which the size of each message of this process is appended."""
    sizes, exchange = [], messages.exchange

    def counted(what: str, name: str, news: Any, seconds: int, **options: str) -> dict[int, Any]:
        sizes.append(0 if news is None else len(pickle.dumps(news)))
        return exchange(what, name, news, seconds, **options)

    messages.exchange = counted
    return sizes


def work(given: argparse.Namespace) -> None:
    """Place batches as one of the processes; the first one prints."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{given.port}", PROCESSES, given.process)
    sizes, capacity = count_bytes(), given.capacity
    contestants = {
        "living": living.Contestant(capacity, 64, PROCESSES, tpu_embed.DynamicVocabulary()),
        "fixed": living.Contestant(capacity, 64, PROCESSES, None),
    }
    sent: dict[str, list[int]] = {name: [] for name in contestants}
    rng, items = np.random.default_rng(0), capacity // 2
    row_of, half = rng.permutation(capacity), np.s_[given.process :: PROCESSES]
    for step in range(10 + given.steps):
        keys = living.draw(rng, step, (given.batch, given.bag), items, given.new)[half]
        for name, one in contestants.items():
            sizes.clear()
            one.train(keys if name == "living" else row_of[keys % capacity])
            sent[name].append(sum(sizes))
    if given.process == 0:
        print(common.machine())
        for name, one in contestants.items():
            median = one.medians(given.steps)["place"]
            each = np.median(sent[name][-given.steps :])
            print(f"  {name:6s} place {median:6.2f} ms, {each:7.0f} bytes sent per batch")


def main() -> None:
    """Start the processes, or be one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--capacity", type=int, default=500_000)
    parser.add_argument("--batch", type=int, default=4096, help="of both processes together")
    parser.add_argument("--bag", type=int, default=20)
    parser.add_argument("--new", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--process", type=int)
    parser.add_argument("--port", type=int)
    given = parser.parse_args()
    if given.process is not None:
        work(given)
        return
    with socket.socket() as probe:  # the system picks a free port
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, *sys.argv[1:], "--port", f"{port}", "--process"]
    started = [subprocess.Popen([*command, f"{number}"]) for number in range(PROCESSES)]
    sys.exit(max(process.wait() for process in started))


if __name__ == "__main__":
    main()

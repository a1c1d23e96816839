"""Compare one thread with two, and one device with eight, for the same global batch.

    python benchmarks/scaling.py [--exchange-dtype bfloat16]

Every setting needs its own process. The processes are started several times in turns. The median of
a step (lookup, gradient, update) is printed as soon as a process ends; the best medians of a cell
follow with their ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

import common
from contestants import BATCHES, Cell, Data

CELLS = [
    Cell(1_000_000, 64, 20, 1, "uniform", "sgd"),
    Cell(1_000_000, 64, 20, 1, "uniform", "adagrad"),
    Cell(1_000_000, 128, 20, 1, "uniform", "adagrad"),
    Cell(1_000_000, 64, 20, 1, "zipf", "adagrad"),
]
SETTINGS = {"1 thread": (1, 1), "2 threads": (2, 1), "8 devices": (2, 8)}
"""(threads, emulated devices)"""


def measure(cell: Cell, batch: int, threads: int, devices: int, exchange_dtype: str) -> float:
    """Return the median milliseconds of a step; this process must not have imported JAX yet."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    common.emulate(devices)
    from contestants import Ours

    ours, spent = Ours(Data(cell, batch), "native", exchange_dtype=exchange_dtype), []
    for i in range(30):
        start = time.perf_counter()
        ours.step(i % BATCHES)
        spent.append(1e3 * (time.perf_counter() - start))
    return statistics.median(spent[5:])


def main() -> None:
    """Print one line per cell; a child process prints one number."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--exchange-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--child", nargs=3, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        number, threads, devices = args.child
        print(measure(CELLS[number], args.batch, threads, devices, args.exchange_dtype))
        return
    print(f"{common.machine()}, exchange in {args.exchange_dtype}", flush=True)
    for number, cell in enumerate(CELLS):
        print(cell, flush=True)
        found: dict[str, list[float]] = {name: [] for name in SETTINGS}
        for one_round in range(args.rounds):
            for name, setting in SETTINGS.items():
                child = [sys.executable, __file__, f"--batch={args.batch}"]
                child += [f"--exchange-dtype={args.exchange_dtype}", "--child"]
                command = [*child, str(number), *map(str, setting)]
                output = subprocess.run(command, check=True, capture_output=True, text=True)
                found[name].append(float(output.stdout))
                print(f"  round {one_round + 1}, {name}: {found[name][-1]:.2f} ms", flush=True)
        one, two, eight = (min(found[name]) for name in SETTINGS)
        print(
            f"  best: 1 thread {one:.2f} ms, 2 threads {two:.2f} ms ({one / two:.2f} x as fast),"
            f" 8 devices {eight:.2f} ms ({eight / two:.2f} times the cost of one)",
            flush=True,
        )


if __name__ == "__main__":
    main()

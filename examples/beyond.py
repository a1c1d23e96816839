"""Train a table with twenty times the rows that the devices have room for, to the bit.

Two learners get the same batches. The table of one is at home on the host, and the devices hold a
twentieth of its rows; that of the other is wholly on the devices. Their errors are equal, bit for
bit, whatever has moved in between. The picture shows the curve, the share of rows that a batch
found on the devices, and what moving the others costs.

With --limit, the first learner is alone, and its process may ask for only so many MB of memory once
everything is compiled. With --path, its rows are in a file and do not count; without, they do.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import settings
from beyond_model import Learner, Problem

from tpu_embed import HostStorage


class Curves:
    """Errors, seconds and hits of learners, window by window.

    Args:
      learners: by name.
    """

    def __init__(self, learners: dict[str, Learner]) -> None:
        self.learners = learners
        self.errors = {name: [] for name in learners}
        self.seconds = {name: [] for name in learners}
        self.found, self.brought = [], []

    def add(self, batches: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """Train every learner on the batches of a window, in turns, and note what came of it."""
        errors = {name: [] for name in self.learners}
        seconds = dict.fromkeys(self.learners, 0.0)
        hosted = self.learners["host"]
        before = hosted.moved()
        for batch in batches:
            for name, learner in self.learners.items():
                begin = time.perf_counter()
                errors[name].append(learner.learn(*batch))
                seconds[name] += time.perf_counter() - begin
        for name in self.learners:
            self.errors[name].append(np.concatenate(errors[name]))
            self.seconds[name].append(seconds[name] / len(batches))
        # Rows that were drawn are not at home yet: they are neither found nor brought.
        brought = hosted.moved() - before
        distinct = sum(np.unique(items).size for items, _ in batches)
        self.brought.append(brought / len(batches))
        self.found.append(1 - brought / distinct)

    def means(self, name: str) -> np.ndarray:
        """Return the mean error of each window."""
        return np.array([errors.mean() for errors in self.errors[name]])

    def line(self, number: int) -> str:
        """Return what is printed after a window."""
        parts = [f"batch {number}  error {self.means('host')[-1]:.5f}"]
        parts.append(f"not moved {self.found[-1]:.1%}  brought {self.brought[-1]:.0f} rows a batch")
        parts += [f"{name} {1000 * some[-1]:.1f} ms" for name, some in self.seconds.items()]
        return "  ".join(parts)


def limit_memory(megabytes: int) -> None:
    """Let this process ask for so many MB more than it has; shared files do not count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (now,) = (int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (now + megabytes * 2**20, resource.RLIM_INFINITY))


def draw(curves: Curves, config, path: Path) -> None:
    """Draw the errors, and below them what was found, and the milliseconds of a step."""
    figure, axes = plt.subplots(3, figsize=(6, 6.6), sharex=True, layout="constrained")
    batches = config.window * np.arange(1, len(curves.found) + 1)
    styles = {"host": "o-", "devices": "k:"}
    for name in curves.learners:
        label = {"host": "rows at home on the host", "devices": "all rows on the devices"}[name]
        axes[0].plot(batches, curves.means(name), styles[name], markersize=4, label=label)
        axes[2].plot(batches, 1000 * np.array(curves.seconds[name]), styles[name], markersize=4)
    axes[0].axhline(config.noise**2, color="gray", linewidth=0.8, label="noise")
    axes[0].set(ylabel="squared error", ylim=(0, None), title="A table beyond the devices")
    axes[0].legend()
    axes[1].plot(batches, 100 * np.array(curves.found), "o-", markersize=4)
    axes[1].set(ylabel="rows not moved, %", ylim=(0, 100))
    axes[2].set(xlabel="batches", ylabel="ms a batch", ylim=(0, None))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    options = settings.parser(__doc__, "beyond.py")
    options.add_argument("--plot", type=Path, default="build/beyond.png", help="drawn at the end")
    options.add_argument("--path", help="a folder for the rows, on a fast local disk")
    options.add_argument("--limit", type=int, help="MB of memory that may still be asked for")
    args, config = settings.read(options)

    problem = Problem(config)
    storage = HostStorage(device_rows=config.device_rows, evict=config.evict, path=args.path)
    learners = {"host": Learner(config, storage)}
    if args.limit is None:
        learners["devices"] = Learner(config, None)
    print(f"{jax.device_count()} device(s), {config.rows} rows, {storage.device_rows} on them")
    curves = Curves(learners)
    for number in range(config.window, config.batches + 1, config.window):
        curves.add([problem.batch(n) for n in range(number - config.window, number)])
        print(curves.line(number), flush=True)
        if number == config.window and args.limit is not None:
            limit_memory(args.limit)
    homes = learners["host"].engine.storage
    assert homes is not None, "its table is on the host"
    homes.flush()
    counted = homes.counters["items"]
    print(f"{counted['rows']} rows at home take {counted['bytes'] / 2**20:.0f} MB")
    if args.limit is None:
        for host, devices in zip(*curves.errors.values(), strict=True):
            np.testing.assert_array_equal(host, devices)
        hosted, resident = (one.touched_rows() for one in learners.values())
        np.testing.assert_array_equal(hosted, resident)
        print("errors and rows are equal, bit for bit")
    draw(curves, config, args.plot)
    print(f"the curves are in {args.plot}")


if __name__ == "__main__":
    main()

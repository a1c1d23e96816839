"""Compare tpu_embed on CPU with torch, FBGEMM, flax + optax and its own jnp path, in one run.

    make bench                                        # everything, in its own environment
    python benchmarks/embedding.py --cells 3          # a few lines only

In every cell all contestants start from the same tables. After one step their rows must agree; then
they are timed in turns. Forward is the lookup alone; a step is lookup, gradient (activation minus
target) and update. The results go to `benchmarks/results/embedding.md` and
`docs/images/embedding.png`.

The roofline is the bytes that must move, divided by the bandwidth of a two-threaded copy of 512 MB
(bytes read + written), which is measured in every cell. Forward must read the ids and each distinct
row once, and write the activations. A step must in addition read the gradients of the activations,
and read and write each distinct row with its slots.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import math
import statistics
import time
from pathlib import Path
from typing import Any

import common
import contestants
import numpy as np
from contestants import BATCHES, Cell, Data

ROOT = Path(__file__).parent.parent
RIVALS = ("torch", "FBGEMM", "flax + optax")
GRID = [
    Cell(*line)
    for line in [
        (100_000, 16, 1, 26, "uniform", "sgd"),
        (100_000, 16, 1, 26, "zipf", "adagrad"),
        (100_000, 64, 1, 26, "uniform", "adam"),
        (100_000, 128, 1, 8, "zipf", "sgd"),
        (100_000, 16, 20, 8, "uniform", "adagrad"),
        (100_000, 64, 20, 8, "zipf", "adam"),
        (100_000, 64, 20, 1, "uniform", "sgd"),
        (100_000, 128, 20, 1, "zipf", "adagrad"),
        (100_000, 16, 20, 26, "zipf", "sgd"),
        (1_000_000, 16, 1, 8, "uniform", "adagrad"),
        (1_000_000, 16, 20, 1, "zipf", "adam"),
        (1_000_000, 64, 1, 1, "uniform", "sgd"),
        (1_000_000, 64, 20, 1, "uniform", "sgd"),
        (1_000_000, 64, 20, 1, "uniform", "adagrad"),
        (1_000_000, 64, 20, 1, "uniform", "adam"),
        (1_000_000, 64, 20, 1, "zipf", "adagrad"),
        (1_000_000, 64, 20, 8, "uniform", "sgd"),
        (1_000_000, 128, 20, 1, "uniform", "adagrad"),
        (1_000_000, 128, 1, 1, "zipf", "adam"),
        (5_000_000, 16, 20, 1, "uniform", "adagrad"),
        (5_000_000, 16, 1, 1, "zipf", "sgd"),
        (5_000_000, 64, 20, 1, "uniform", "adagrad"),
        (5_000_000, 64, 1, 1, "uniform", "sgd"),
        (5_000_000, 128, 20, 1, "uniform", "sgd"),
    ]
]
DENSE_LIMIT = 600_000_000
"""Bytes of tables beyond which the dense gradients of flax + optax are left out."""


def make(name: str, data: Data) -> Any:
    """Return a contestant, or None if it cannot do the cell."""
    cell = data.cell
    if name == "tpu_embed":
        return contestants.Ours(data, "native")
    if name == "jnp path":
        return contestants.Ours(data, "reference")
    if name == "torch":
        return contestants.Torch(data)
    if name == "FBGEMM":
        return None if cell.optimizer == "adam" else contestants.Fbgemm(data)
    return None if cell.table_bytes > DENSE_LIMIT else contestants.Flax(data)


def check_equal(running: dict[str, Any], data: Data) -> None:
    """Take one step with each contestant, and compare the rows that it touched."""
    for one in running.values():
        one.step(0)
    for t in range(data.cell.tables):
        touched = np.unique(data.ids[0, t])[:5000]
        ours = running["tpu_embed"].rows(t)[touched]
        for name, one in running.items():
            np.testing.assert_allclose(
                one.rows(t)[touched], ours, rtol=1e-3, atol=1e-4, err_msg=f"{name}, {data.cell}"
            )


def timed(calls: dict[Any, Any], budget: float) -> dict[Any, float]:
    """Return the median milliseconds of every call; calls take turns until the budget is spent."""
    spent: dict[Any, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    for turn in range(40):
        for name, call in calls.items():
            time.sleep(0.01)  # let the threads of the previous call stop spinning
            begin = time.perf_counter()
            for repeat in range(3):  # repeat fast calls, so that all turns take about as long
                before = time.perf_counter()
                call((turn + repeat) % BATCHES)
                if turn:
                    spent[name].append(1e3 * (time.perf_counter() - before))
                if time.perf_counter() - begin > 0.05:
                    break
        if turn >= 3 and time.perf_counter() - start > budget:
            break
    return {name: statistics.median(times) for name, times in spent.items()}


class Copy:
    """A copy of 512 MB by two threads."""

    def __init__(self) -> None:
        self.source, self.target = np.ones(2**27, np.float32), np.zeros(2**27, np.float32)
        self.pool = concurrent.futures.ThreadPoolExecutor(2)

    def __call__(self, _: int) -> None:
        parts = zip(np.split(self.target, 2), np.split(self.source, 2), strict=True)
        list(self.pool.map(lambda pair: np.copyto(*pair), parts))

    @property
    def bytes(self) -> int:
        """The bytes that are read and written."""
        return 2 * self.source.nbytes


def must_move(data: Data) -> tuple[float, float]:
    """Return the bytes of the forward pass and of the step."""
    cell = data.cell
    distinct = statistics.mean(sum(np.unique(table).size for table in ids) for ids in data.ids)
    rows, activations = distinct * cell.dim * 4, data.targets.nbytes
    forward = data.ids[0].nbytes + rows + activations
    return forward, forward + activations + 2 * rows * (1 + cell.slots)


def run(cell: Cell, batch: int, budget: float, copy: Copy) -> dict[str, Any]:
    """Return the figures of one cell."""
    data = Data(cell, batch)
    made = {name: make(name, data) for name in ("tpu_embed", *RIVALS, "jnp path")}
    running = {name: one for name, one in made.items() if one is not None}
    check_equal(running, data)
    calls: dict[Any, Any] = {(name, "forward"): one.forward for name, one in running.items()}
    calls |= {(name, "step"): one.step for name, one in running.items()}
    found = timed({**calls, ("copy", ""): copy}, budget)
    bandwidth = copy.bytes / found["copy", ""]
    figures: dict[str, Any] = {"cell": cell, "GB/s": bandwidth / 1e6}
    for verb, moved in zip(("forward", "step"), must_move(data), strict=True):
        ours = found["tpu_embed", verb]
        rivals = {name: found[name, verb] for name in RIVALS if (name, verb) in found}
        best = min(rivals, key=lambda name: rivals[name])
        figures[verb] = {
            "ours": ours,
            "best": best,
            "ratio": rivals[best] / ours,
            "jnp": found["jnp path", verb],
            "rivals": rivals,
            "roofline": moved / bandwidth / ours,
        }
    return figures


def geometric_mean(values: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(statistics.mean(math.log(value) for value in values))


def line(figures: dict[str, Any]) -> str:
    """Return one line of the Markdown table."""
    cell = figures["cell"]
    parts = [f"{cell.rows:,}", cell.dim, cell.hot, cell.tables, cell.ids, cell.optimizer]
    for verb in ("forward", "step"):
        one = figures[verb]
        rivals = [f"{one['rivals'][n]:.2f}" if n in one["rivals"] else "" for n in RIVALS]
        ours = [f"**{one['ours']:.2f}**", *rivals, f"{one['jnp']:.2f}"]
        parts += [*ours, f"{one['ratio']:.1f}", f"{100 * one['roofline']:.0f} %"]
    return f"| {' | '.join(map(str, parts))} |"


def report(done: list[dict[str, Any]], args: argparse.Namespace, versions: str) -> str:
    """Return the results of the whole run in Markdown."""
    columns = ["rows", "D", "ids", "tables", "drawn", "optimizer"]
    for verb in ("forward", "step"):
        columns += [f"{verb} ms", *RIVALS, "jnp path", "best rival ÷ ours", "of roofline"]
    text = [
        "# tpu_embed beside its rivals, on CPU",
        "",
        f"`python benchmarks/embedding.py --budget {args.budget:g}`; {versions}.",
        f"B = {args.batch}; `ids` a sample and table; zipf: exponent 1.2. Medians, taken in turns.",
        f"Copy bandwidth {statistics.median(f['GB/s'] for f in done):.1f} GB/s (read + written).",
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *map(line, done),
        "",
    ]
    for verb in ("forward", "step"):
        ratios = [f[verb]["ratio"] for f in done]
        mean, least = geometric_mean(ratios), min(ratios)
        text.append(
            f"{verb.capitalize()}: {mean:.2f} times as fast as the best rival of each line in the"
            f" geometric mean, {least:.2f} in the worst line."
        )
    text += [
        "",
        "Empty: FBGEMM has no Adam on CPU; dense gradients of large tables are left out. How bytes",
        "are counted for the roofline: the docstring of `benchmarks/embedding.py`.",
    ]
    return "\n".join(text) + "\n"


def chart(done: list[dict[str, Any]], path: Path) -> None:
    """Plot, for every line, the time of each rival's step divided by ours."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 0.32 * len(done) + 1.6), layout="constrained")
    height = 0.26
    for k, name in enumerate(RIVALS):
        places, lengths = [], []
        for i, figures in enumerate(done):
            one = figures["step"]
            if name in one["rivals"]:
                places.append(i + (k - 1) * height)
                lengths.append(one["rivals"][name] / one["ours"])
        axes.barh(places, lengths, height, label=name)
    cells = [f["cell"] for f in done]
    names = [
        f"{c.tables} × {c.rows:,} × {c.dim}, {c.hot} {c.ids} ids, {c.optimizer}" for c in cells
    ]
    axes.set_yticks(range(len(done)), names, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("time of a training step, as a multiple of tpu_embed's (log scale)")
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the grid, print each line as it is done, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--budget", type=float, default=3.0, help="seconds of timing a cell")
    parser.add_argument("--cells", type=int, default=len(GRID))
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cells, from 0")
    args = parser.parse_args()
    common.emulate(1)
    import fbgemm_gpu
    import torch

    torch.set_num_threads(2)
    versions = f"{common.machine()}; torch {torch.__version__}, FBGEMM {fbgemm_gpu.__version__}"
    print(versions, flush=True)
    done, copy = [], Copy()
    for cell in [GRID[i] for i in args.only] if args.only else GRID[: args.cells]:
        done.append(run(cell, args.batch, args.budget, copy))
        print(line(done[-1]), flush=True)
        gc.collect()
    text = report(done, args, versions)
    print(text[text.rindex("|\n") + 2 :])
    if len(done) == len(GRID):
        results = ROOT / "benchmarks" / "results"
        results.mkdir(exist_ok=True)
        (results / "embedding.md").write_text(text)
        chart(done, ROOT / "docs" / "images" / "embedding.png")


if __name__ == "__main__":
    main()

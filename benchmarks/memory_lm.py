"""A memory of n-grams in a language model: what it costs beside none, and beside a smaller one.

    python benchmarks/memory_lm.py --text tiny_shakespeare.txt

First the example `examples/memory_lm` is trained by `fit` without a memory, with one on the device,
and with one at home on the host, in three processes that take turns of 50 steps. Printed are the
milliseconds of a step of each, and ratios.

Then two tables at home, of 10⁸ and 10⁶ rows of 64 numbers with the sums of `RowWiseAdagrad`, get
the same 10⁶ rows from batches of 12,288 ids, which are drawn by a power law and spread over the
table. Printed are the bytes that the process has grown by meanwhile, divided by those of the rows
and sums, and then the milliseconds of a step with each, in turns. With --declared alone, no text is
needed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import runpy
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import common
import jax
import numpy as np
from checkpoint import resident

import tpu_embed

ROOT = Path(__file__).resolve().parents[1]
DECLARED = 100_000_000, 1_000_000
ROWS, DIM, IDS = 1_000_000, 64, 12 * 64 * 16
"""Rows that are touched, numbers in one, and ids in a batch."""


def train(turn: Connection, kind: str, text: str, turns: int, steps: int) -> None:
    """Train one kind of the example, and stop for the others after every few steps.

    Args:
      turn: gets the seconds of these steps, and gives the sign to go on.
      kind: of the example's `KINDS`.
      text: its path.
      turns: how many, after a first one in which programs are compiled.
      steps: of each turn.
    """
    sys.path += [str(ROOT / "examples"), str(ROOT / "examples" / "memory_lm")]
    import train as example

    numbers = runpy.run_path(str(ROOT / "configs" / "memory_lm.py"))
    numbers |= {"steps": (turns + 1) * steps, "evaluate_every": None}
    config = SimpleNamespace(**numbers)
    source = example.Text.read(Path(text), config, with_memory=kind != "without")
    source.evaluation = None
    began = time.perf_counter()

    def stop(report) -> None:
        nonlocal began
        turn.send(time.perf_counter() - began)
        turn.recv()
        began = time.perf_counter()

    options = {"callback": stop, "report_every": steps, "progress": False}
    example.train(config, source, kind, **options)


def measure_example(text: str, turns: int, steps: int) -> None:
    """Print the milliseconds of a step of each kind, and ratios."""
    context = multiprocessing.get_context("spawn")
    kinds = "without", "resident", "host"
    ends, processes = {}, []
    for kind in kinds:
        ends[kind], other = context.Pipe()
        given = other, kind, text, turns, steps
        processes.append(context.Process(target=train, args=given, daemon=True))
        processes[-1].start()
        other.close()  # so that its end is noticed
        ends[kind].recv()  # it has compiled its programs
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(turns):
        for kind, end in ends.items():
            end.send("go on")
            found[kind].append(1e3 * end.recv() / steps)
    for process in processes:
        process.terminate()
    for kind, times in found.items():
        spread = f"{min(times):.1f} to {max(times):.1f}"
        print(f"  {kind:10s}{statistics.median(times):6.1f} ms a step ({spread})")
    for kind, other in (("host", "resident"), ("host", "without"), ("resident", "without")):
        ratios = [a / b for a, b in zip(found[kind], found[other], strict=True)]
        print(f"  {kind} / {other}: {statistics.median(ratios):.2f}")


class Declared:
    """A table at home of so many rows, trained on batches of the same numbers of rows.

    Args:
      rows: V.
      draws: numbers of rows, below `ROWS`, `[steps, IDS]`; each call is a step with the next ones.
    """

    def __init__(self, rows: int, draws: np.ndarray) -> None:
        table = tpu_embed.TableConfig(
            rows,
            DIM,
            name="memory",
            optimizer=tpu_embed.optimizers.RowWiseAdagrad(0.05),
            storage=tpu_embed.HostStorage(device_rows=50_000),
        )
        self.engine = tpu_embed.EmbeddingEngine({"memory": tpu_embed.FeatureConfig(table)})
        self.state = self.engine.init(jax.random.key(0))
        self.apart, self.draws = rows // ROWS, iter(draws)

    def step(self, numbers: np.ndarray) -> None:
        ids = (numbers * self.apart).reshape(12, 64, 16, 1)  # [B, L, C, 1]
        state, batch = self.engine.admit(self.state, self.engine.place({"memory": ids}))
        rows = self.engine.lookup(state, batch)
        self.state = self.engine.update_in_place(state, batch, rows)
        jax.block_until_ready(self.state.tables)

    def __call__(self) -> None:
        self.step(next(self.draws))

    def touch_all(self) -> str:
        """Train all rows once; return by how much memory has grown, as text."""
        storage = self.engine.storage
        assert storage is not None, "the table is at home"
        every = np.arange(ROWS // IDS * IDS).reshape(-1, IDS)
        for numbers in (every[0], every[-1]):  # programs are compiled, arrays are there
            self.step(numbers)
        storage.flush()
        before = resident("VmRSS")
        for numbers in every:
            self.step(numbers)
        storage.flush()
        ideal = every.size * 4 * (DIM + 1)
        grown, counted = resident("VmRSS") - before, storage.counters["memory"]["bytes"]
        return (
            f"{every.size:,} touched: the process has grown by {grown / ideal:.2f} of their bytes; "
            f"the store counts {counted / ideal:.2f}"
        )


def measure_declared(rounds: int) -> None:
    """Print the memory of tables at home by what they declare, and the times of their steps."""
    shares = 1 / np.arange(1, ROWS + 1) ** 0.75
    drawn = np.random.default_rng(0).choice(ROWS, (rounds + 1, IDS), p=shares / shares.sum())
    cases = {}
    for rows in DECLARED:
        name = f"{rows:,} rows declared"
        cases[name] = Declared(rows, drawn)
        print(f"  {name}, {cases[name].touch_all()}", flush=True)
    found = common.interleaved(cases, rounds)
    for name, spent in found.items():
        print(f"  {name}: {spent:.1f} ms a step")
    large, small = found.values()
    print(f"  ratio {large / small:.2f}")


def main() -> None:
    """Print the figures of the example, then those of tables of different sizes."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--text", help="a file of UTF-8, for the example")
    parser.add_argument("--turns", type=int, default=10, help="of the example's kinds")
    parser.add_argument("--steps", type=int, default=50, help="of a turn")
    parser.add_argument("--declared", action="store_true", help="leave out the example")
    parser.add_argument("--rounds", type=int, default=100, help="steps of each size of table")
    given = parser.parse_args()
    if not given.text and not given.declared:
        parser.error("give --text for the example, or --declared for the tables alone")
    print(common.machine(), flush=True)
    if given.text and not given.declared:
        measure_example(given.text, given.turns, given.steps)
    measure_declared(given.rounds)


if __name__ == "__main__":
    main()

"""Rows at home on the host: what they take, how fast they are read and written, saved and restored.

    python benchmarks/rows_at_home.py [--rows 10000000] [--row-bytes 512 128] [--path DIR]

The ids of the rows are spread over 10⁹ ids. Three parts, for each size of a row:

- memory: what the store and its index say that they take, and by how much the process has grown,
  divided by the bytes of the rows;
- 100,000 random rows read and written, in turns with NumPy, which copies the same rows out of one
  array and into it by their numbers, and so has nothing to look up;
- a checkpoint of `--saved` of the rows, whole; then one after a tenth of the rows has changed; then
  a restore of the latter into another engine. In turns with NumPy, which writes all rows to one
  file, with fsync, and reads them.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import common
import jax
import numpy as np
from checkpoint import numpy_write, resident

import tpu_embed
from tpu_embed import io
from tpu_embed.storage import HostRows, RowField

IDS = 10**9
BLOCK = 100_000
"""Rows that are written at a time, and that are read and written in turns with NumPy."""


def ids_of(numbers: np.ndarray) -> np.ndarray:
    """Return different ids below 10⁹ for different numbers below 10⁹, uint64 `[n]`."""
    return numbers.astype(np.uint64) * np.uint64(618_033_989) % np.uint64(IDS)


def rows_of(numbers: np.ndarray, row_bytes: int) -> dict[str, np.ndarray]:
    """Return rows of two fields, values and one slot, float32 `[n, D]` each."""
    values = np.repeat(numbers.astype(np.float32)[:, None], row_bytes // 8, axis=1)
    return {"values": values, "slot accumulators": values}


def fill(store: HostRows, rows: int, row_bytes: int) -> None:
    """Write all rows, block by block."""
    for first in range(0, rows, BLOCK):
        numbers = np.arange(first, min(first + BLOCK, rows))
        store.write(ids_of(numbers), rows_of(numbers, row_bytes))


def measure_memory(rows: int, row_bytes: int, path: str | None) -> HostRows:
    """Print what a store takes, and return it."""
    field = RowField((row_bytes // 8,), np.dtype(np.float32))
    fields = {"values": field, "slot accumulators": field}
    small = HostRows(fields, path)
    fill(small, 1, row_bytes)
    before = resident("VmRSS")
    store = HostRows(fields, path)
    fill(store, rows, row_bytes)
    grown, ideal = resident("VmRSS") - before, rows * row_bytes
    print(f"{rows:,} of {IDS:,} rows of {row_bytes} bytes, {path or 'in memory'}")
    print(f"  one row takes {small.nbytes / 1024:.0f} KiB", end="; ")
    print(f"all of them {store.nbytes / ideal:.3f} of the bytes of rows", end="")
    print("" if path else f"; the process has grown by {grown / ideal:.3f}")
    return store


def measure_moves(store: HostRows, rows: int, row_bytes: int, rounds: int) -> None:
    """Print the times of reading and writing random rows, beside NumPy."""
    rng, count = np.random.default_rng(0), min(BLOCK, rows)
    array = np.zeros((rows, row_bytes), np.uint8)
    for first in range(0, rows, BLOCK):  # its memory is there before a copy is timed
        array[first : first + BLOCK] = 1
    room = np.zeros((count, row_bytes), np.uint8)
    into = rows_of(np.zeros(count), row_bytes)
    drawn = [rng.choice(rows, count, replace=False) for _ in range(rounds + 1)]
    ids, numbers = itertools.cycle([ids_of(one) for one in drawn]), itertools.cycle(drawn)
    cases: dict[str, Callable[[], object]] = {
        "read": lambda: store.read_into(into, None, next(ids)),
        "read NumPy": lambda: np.take(array, next(numbers), axis=0, out=room),
        "write": lambda: store.write(next(ids), into),
        "write NumPy": lambda: array.__setitem__(next(numbers), room),
    }
    medians = common.interleaved(cases, rounds)
    for name in ("read", "write"):
        ours, theirs = medians[name], medians[f"{name} NumPy"]
        print(f"  {name:5s} {count:,} rows: {ours:6.1f} ms, NumPy {theirs:6.1f} ms", end="")
        print(f", ratio {ours / theirs:.2f}")


def engine_of(row_bytes: int, path: str | None) -> tpu_embed.EmbeddingEngine:
    """Return an engine of one table on the host, whose rows have so many bytes."""
    storage = tpu_embed.HostStorage(device_rows=1024, path=path)
    table = tpu_embed.TableConfig(IDS, row_bytes // 8, name="items", storage=storage)
    feature = tpu_embed.FeatureConfig(table)
    return tpu_embed.EmbeddingEngine(feature, tpu_embed.optimizers.Adagrad(0.1))


def measure_saves(rows: int, row_bytes: int, path: str | None, rounds: int) -> None:
    """Print the times of a whole save, of one of a tenth of the rows, and of a restore."""
    engine, other = engine_of(row_bytes, path), engine_of(row_bytes, path)
    state, home = engine.init(jax.random.key(0)), home_of(engine)
    fill(home, rows, row_bytes)
    array = np.zeros((rows, row_bytes), np.uint8)
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=path) as directory:
        root = Path(directory)

        def timed(name: str, run: Callable[[], object]) -> None:
            start = time.perf_counter()
            run()
            seconds.setdefault(name, []).append(time.perf_counter() - start)

        for number in range(rounds):
            timed("whole", functools.partial(io.save, root / "0", engine, state))
            changed = np.random.default_rng(number).choice(rows, rows // 10, replace=False)
            home.write(ids_of(changed), rows_of(changed + 1, row_bytes))
            timed("tenth", functools.partial(io.save, root / "1", engine, state))
            timed("restore", functools.partial(io.restore, root / "1", other))
            timed("NumPy write", functools.partial(numpy_write, root / "numpy", [array]))
            timed("NumPy read", functools.partial(np.fromfile, root / "numpy" / "0", np.uint8))
            check_equal(home, home_of(other), ids_of(changed[:1000]))
            for one in root.iterdir():
                shutil.rmtree(one)
    found = {name: statistics.median(times) for name, times in seconds.items()}
    whole, tenth, restored = (found[name] for name in ("whole", "tenth", "restore"))
    written, read = found["NumPy write"], found["NumPy read"]
    print(f"  {rows:,} rows saved whole: {whole:.2f} s, NumPy {written:.2f} s", end="")
    print(f", ratio {whole / written:.2f}")
    print(f"  saved after a tenth has changed: {tenth:.2f} s, {tenth / whole:.3f} of a whole save")
    print(f"  restored: {restored:.2f} s, NumPy {read:.2f} s, ratio {restored / read:.2f}")


def home_of(engine: tpu_embed.EmbeddingEngine) -> HostRows:
    """Return the rows at home of the engine's table."""
    assert engine.storage is not None, "its table is on the host"
    return engine.storage["items"]


def check_equal(store: HostRows, other: HostRows, ids: np.ndarray) -> None:
    """Check that both have the same rows of these ids, and as many in all."""
    (rows, found), (restored, again) = store.read(ids), other.read(ids)
    assert found.all()
    assert again.all()
    assert len(store) == len(other)
    for name, some in rows.items():
        np.testing.assert_array_equal(some, restored[name])


def measure(row_bytes: int, given: argparse.Namespace) -> None:
    """Print the figures for one size of a row."""
    store = measure_memory(given.rows, row_bytes, given.path)
    measure_moves(store, given.rows, row_bytes, given.rounds)
    del store
    rounds = max(1, given.rounds // 5)
    measure_saves(int(given.saved * given.rows), row_bytes, given.path, rounds)


def main() -> None:
    """Print the figures for each size of a row, measured in a process of its own."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--row-bytes", type=int, nargs="+", default=[512, 128])
    parser.add_argument("--saved", type=float, default=0.2, help="the share that is saved")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--path", help="a folder for a scratch file, instead of the memory")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(given.measure, given)
        return
    print(common.machine(), flush=True)
    for row_bytes in given.row_bytes:
        command = [sys.executable, *sys.argv, "--measure", f"{row_bytes}"]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()

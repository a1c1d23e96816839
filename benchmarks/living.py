"""A training step with a dynamic vocabulary beside the same step on a fixed table, in the same run.

    python benchmarks/living.py [--capacities 500000 50000000] [--dim 2] [--device-rows 100000]

Bags of Zipf keys, of which a share is new in every step. The fixed table, of as many rows, gets a
row number for each key, frequent ones spread at random as in the living table. Both engines do a
step in turns, first the one, then the other: place, admit (the living one) and lookup with update.
They wait only at the end of a step, so a part of admit is in the last figure. Medians of
milliseconds, and their ratio. Then each does ten steps at a time without waiting between them, as
loops that train do: `loop`, milliseconds per step. With `--device-rows` the rows of the living
table are at home on the host, and the devices hold so many of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import common
import jax
import numpy as np

import tpu_embed
from tpu_embed import optimizers


class Contestant:
    """An engine of one table, its state, and the milliseconds of the parts of each step."""

    def __init__(self, capacity: int, dim: int, devices: int, vocabulary, storage=None) -> None:
        made = {"vocabulary": vocabulary, "storage": storage}
        table = tpu_embed.TableConfig(capacity, dim, combiner="sum", name="items", **made)
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("d",))
        self.engine = tpu_embed.EmbeddingEngine(
            {"x": tpu_embed.FeatureConfig(table)}, optimizers.Adagrad(0.1), mesh=mesh
        )
        self.state = self.engine.init(jax.random.key(0))
        self.parts: dict[str, list[float]] = {"place": [], "admit": [], "step": []}

    def step(self, keys: np.ndarray) -> list[float]:
        """Do one step on bags of keys; return when it began, was placed and was admitted."""
        marks = [time.perf_counter()]
        batch = self.engine.place({"x": keys})
        marks.append(time.perf_counter())
        self.state, batch = self.engine.admit(self.state, batch)
        marks.append(time.perf_counter())
        activations = self.engine.lookup(self.state, batch)
        self.state = self.engine.update_in_place(self.state, batch, activations)
        return marks

    def train(self, keys: np.ndarray) -> None:
        """Do one step, wait for it, and note how long its parts take."""
        marks = self.step(keys)
        jax.block_until_ready(self.state.tables)
        marks.append(time.perf_counter())
        for name, first, last in zip(self.parts, marks, marks[1:], strict=False):
            self.parts[name].append(1e3 * (last - first))

    def loop(self, batches: Sequence[np.ndarray]) -> float:
        """Train on each batch without waiting between steps; return milliseconds per step."""
        jax.block_until_ready(self.state.tables)
        start = time.perf_counter()
        for keys in batches:
            self.step(keys)
        jax.block_until_ready(self.state.tables)
        return 1e3 * (time.perf_counter() - start) / len(batches)

    def medians(self, steps: int) -> dict[str, float]:
        """Return the median of each part of the last steps, and of whole steps."""
        last = {name: times[-steps:] for name, times in self.parts.items()}
        whole = [sum(parts) for parts in zip(*last.values(), strict=True)]
        return {n: statistics.median(times) for n, times in (last | {"whole": whole}).items()}


def loops(
    one: Contestant,
    other: Contestant,
    batches: Sequence[np.ndarray],
    others: Sequence[np.ndarray],
) -> tuple[float, float]:
    """Return milliseconds per step of two contestants in loops, medians of turns of ten steps."""
    times: dict[Contestant, list[float]] = {one: [], other: []}
    for turn, first in enumerate(range(0, len(batches), 10)):
        turns = [(one, batches[first : first + 10]), (other, others[first : first + 10])]
        for contestant, some in turns if turn % 2 else turns[::-1]:
            times[contestant].append(contestant.loop(some))
    return statistics.median(times[one]), statistics.median(times[other])


def draw(rng, step: int, size: tuple[int, int], items: int, new: float) -> np.ndarray:
    """Return bags of Zipf keys, a share of which no step had before."""
    ranks = np.minimum(rng.zipf(1.2, size) - 1, items - 1)
    distinct = np.unique(ranks).size
    fresh = int(new * distinct)
    places = rng.choice(ranks.size, fresh, replace=False)
    ranks.reshape(-1)[places] = items + step * ranks.size + np.arange(fresh)
    return ranks


def main() -> None:
    """Print the times of both tables for each capacity."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--capacities", type=int, nargs="+", default=[500_000])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--bag", type=int, default=20)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--new", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device-rows", type=int, help="at least a batch of keys that all differ")
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", given.devices)
    print(common.machine())
    storage = given.device_rows and tpu_embed.HostStorage(device_rows=given.device_rows)
    for capacity in given.capacities:
        vocabulary = tpu_embed.DynamicVocabulary(evict="lru")
        living = Contestant(capacity, given.dim, given.devices, vocabulary, storage)
        fixed = Contestant(capacity, given.dim, given.devices, None)
        rng = np.random.default_rng(0)
        items, row_of = min(capacity // 2, 250_000), rng.permutation(capacity)
        for first in range(0, items, given.batch * given.bag):  # all items have rows
            keys = np.arange(first, first + given.batch * given.bag) % items
            keys = keys.reshape(given.batch, given.bag)
            living.train(keys)
            fixed.train(row_of[keys])
        shape = given.batch, given.bag
        batches = [draw(rng, n, shape, items, given.new) for n in range(10 + 2 * given.steps)]
        rows = [row_of[keys % capacity] for keys in batches]
        steps = 10 + given.steps
        for step in range(steps):
            turns = [(living, batches[step]), (fixed, rows[step])]
            for one, ids in turns if step % 2 else turns[::-1]:
                one.train(ids)
        ours, theirs = living.medians(given.steps), fixed.medians(given.steps)
        looped = loops(living, fixed, batches[steps:], rows[steps:])
        counted = living.engine.vocabularies.counters["items"]
        bytes_per_row = living.engine.vocabularies.nbytes / capacity
        print(f"{capacity} rows of {given.dim}, {given.devices} devices, {counted['keys']} keys")
        for name in ours:
            print(f"  {name:6s} living {ours[name]:8.2f} ms   fixed {theirs[name]:8.2f} ms")
        print(f"  ratio {ours['whole'] / theirs['whole']:.2f}, map {bytes_per_row:.1f} bytes a row")
        print(f"  loop   living {looped[0]:8.2f} ms   fixed {looped[1]:8.2f} ms")
        print(f"  ratio {looped[0] / looped[1]:.2f}")
        del living, fixed


if __name__ == "__main__":
    main()

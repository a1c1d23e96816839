"""The map of a dynamic vocabulary: keys per second, bytes, and what it costs at another capacity.

    python benchmarks/vocabulary_map.py

Batches of a stream in which old keys come at random and a part is new. `find` and `take` are timed
in turns: with the map at two capacities, and with a Python OrderedDict at the smaller one, which
evicts what was seen longest ago, as the map does. Then the bytes per row and per waiting key.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import OrderedDict

import common
import numpy as np

from tpu_embed.vocabulary import DynamicVocabulary, VocabularyMap


def keys_of(items: np.ndarray) -> np.ndarray:
    """Return different keys of 64 bits for different numbers."""
    return items.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)


class Ordered:
    """The map with `evict="lru"`, as a few lines of Python."""

    def __init__(self, capacity: int) -> None:
        self.rows: OrderedDict[int, int] = OrderedDict()
        self.capacity = capacity

    def find(self, keys: np.ndarray) -> np.ndarray:
        row_of = self.rows.get
        return np.array([row_of(key, -1) for key in keys.tolist()])

    def take(self, keys: np.ndarray, _: np.ndarray) -> None:
        rows = self.rows
        for key in keys.tolist():
            if key in rows:
                rows.move_to_end(key)
            elif len(rows) < self.capacity:
                rows[key] = len(rows)
            else:
                rows[key] = rows.popitem(last=False)[1]


class Map:
    """The map, whose log is dropped after each batch."""

    def __init__(self, capacity: int, **options) -> None:
        self.map = VocabularyMap(DynamicVocabulary(**options), capacity)
        self.capacity = capacity
        self.find = self.map.find

    def take(self, keys: np.ndarray, rows: np.ndarray) -> None:
        self.map.take(rows[rows >= 0], keys[rows < 0])
        self.map.forget(self.map.step)


def fill(one: Ordered | Map, size: int) -> None:
    """Give all rows to the keys of the first items, in batches."""
    for begin in range(0, one.capacity, size):
        keys = keys_of(np.arange(begin, min(begin + size, one.capacity)))
        one.take(keys, one.find(keys))


def batches(capacity: int, size: int, new: float, rounds: int) -> list[np.ndarray]:
    """Return batches of keys; old ones are of the last nine tenths of all that the map has had."""
    rng, newest, found = np.random.default_rng(0), capacity, []
    for _ in range(rounds):
        fresh = np.arange(newest, newest + int(size * new))
        old = rng.integers(newest - capacity * 9 // 10, newest, size - fresh.size)
        found.append(keys_of(rng.permutation(np.concatenate([old, fresh]))))
        newest += fresh.size
    return found


def time_in_turns(
    contestants: dict[str, Ordered | Map], size: int, new: float, rounds: int
) -> dict[str, tuple[float, float]]:
    """Return the median milliseconds of find and of take."""
    given = {name: batches(one.capacity, size, new, rounds) for name, one in contestants.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name, one in contestants.items():
            keys = given[name][number]
            start = time.perf_counter()
            rows = one.find(keys)
            found = time.perf_counter()
            one.take(keys, rows)
            times[name].append((1e3 * (found - start), 1e3 * (time.perf_counter() - found)))
    return {
        name: tuple(map(statistics.median, zip(*one, strict=True))) for name, one in times.items()
    }


def bytes_per_row(capacity: int, **options) -> float:
    """Return the bytes of a map per row, without what a batch needs."""
    return Map(capacity, **options).map.nbytes / capacity


def bytes_per_waiting_key(capacity: int) -> float:
    """Return the bytes per key of a map in which as many keys wait as may, with small batches."""
    one = Map(capacity, admit_after=2)
    before = one.map.nbytes
    for begin in range(0, 5 * capacity, 1000):
        keys = keys_of(np.arange(begin, begin + 1000))
        one.take(keys, one.find(keys))
    return (one.map.nbytes - before) / one.map.state().waiting_keys.size


def main() -> None:
    """Print one line per contestant, and one per kind of map."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs=2, default=[500_000, 50_000_000])
    parser.add_argument("--batch", type=int, default=100_000)
    parser.add_argument("--new", type=float, default=0.05, help="part of a batch that is new")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    small, large = args.rows
    print(common.machine())
    contestants = {
        f"map, {small:,} rows": Map(small),
        f'map, {small:,} rows, "lfu"': Map(small, evict="lfu"),
        f"OrderedDict, {small:,} rows": Ordered(small),
        f"map, {large:,} rows": Map(large),
    }
    for one in contestants.values():
        fill(one, args.batch)
    print(f"batches of {args.batch:,} ids, of which {args.new:.0%} are new keys:")
    timed = time_in_turns(contestants, args.batch, args.new, args.rounds)
    for name, (finding, taking) in timed.items():
        rates = (f"{args.batch / ms / 1e3:6.1f} million/s" for ms in (finding, taking))
        print(f"  {name:32s} find {finding:6.2f} ms, {next(rates)}; ", end="")
        print(f"take {taking:6.2f} ms, {next(rates)}")
    for options in ({}, {"evict": "lfu"}, {"evict": "lfu", "ttl": 9}):
        print(f"  bytes per row, {options}: {bytes_per_row(small, **options):.2f}")
    print(f"  bytes per waiting key: {bytes_per_waiting_key(small):.2f}")


if __name__ == "__main__":
    main()

"""A training step with a table on the host beside the same step with all rows on the devices.

    python benchmarks/beyond.py [--rows 2000000] [--share 0.1] [--zipf 1.2 1.05] [--devices 8]

Bags of Zipf ids, frequent ones spread at random. Every row of the host's table is at home before
the first step, and its places on the devices are all taken. Both engines do a step in turns, first
the one, then the other: place, admit (the host's) and lookup with update. They wait only at the end
of a step. Medians of milliseconds, their ratio, and the rows that a batch brings. Then each does
ten steps at a time without waiting between them: `loop`, milliseconds per step. Both tables end
with the same bits, which is checked.
"""

from __future__ import annotations

import argparse

import common
import jax
import numpy as np
from living import Contestant, loops

import tpu_embed
from tpu_embed.storage import HostRows


class Hosted(Contestant):
    """A contestant whose table is on the host, with every row at home."""

    def __init__(self, resident: Contestant, rows: int, places: int, dim: int, path) -> None:
        storage = tpu_embed.HostStorage(device_rows=places, path=path)
        super().__init__(rows, dim, resident.engine.layout.axes.mesh.size, None, storage)
        home: HostRows = self.engine.storage["items"]
        for ids in np.array_split(np.arange(rows), max(1, rows // 100_000)):
            slot = resident.engine.rows(resident.state, "items", ids, slot="accumulators")
            values = resident.engine.rows(resident.state, "items", ids)
            home.write(ids.astype(np.uint64), {"values": values, "slot accumulators": slot})

    @property
    def brought(self) -> int:
        """The rows that batches have brought from home so far."""
        return self.engine.storage.counters["items"]["brought"]


def measure(zipf: float, given: argparse.Namespace) -> None:
    """Print the times of both tables for ids of one distribution."""
    places = int(given.share * given.rows)
    resident = Contestant(given.rows, given.dim, given.devices, None)
    hosted = Hosted(resident, given.rows, places, given.dim, given.path)
    rng, shape = np.random.default_rng(0), (given.batch, given.bag)
    row_of = rng.permutation(given.rows)
    shares = np.cumsum(np.arange(1, given.rows + 1) ** -zipf)

    def draw() -> np.ndarray:
        """Return bags of ids; the n-th most frequent has a share in proportion to n ** -zipf."""
        return row_of[np.searchsorted(shares, rng.random(shape) * shares[-1])]

    while len(hosted.engine.vocabularies) < places:  # until every place is taken
        ids = draw()
        hosted.train(ids)
        resident.train(ids)
    before = hosted.brought
    for step in range(10 + given.steps):
        if step == 10:
            before = hosted.brought
        ids = draw()
        for one in (hosted, resident) if step % 2 else (resident, hosted):
            one.train(ids)
    ours, theirs = hosted.medians(given.steps), resident.medians(given.steps)
    brought = (hosted.brought - before) / given.steps
    print(f"Zipf {zipf}: {brought:.0f} of {np.unique(ids).size} distinct rows brought in a step")
    for name in ours:
        print(f"  {name:6s} host {ours[name]:8.2f} ms   devices {theirs[name]:8.2f} ms")
    print(f"  ratio {ours['whole'] / theirs['whole']:.2f}")
    batches = [draw() for _ in range(given.steps)]
    looped = loops(hosted, resident, batches, batches)
    print(f"  loop   host {looped[0]:8.2f} ms   devices {looped[1]:8.2f} ms")
    print(f"  ratio {looped[0] / looped[1]:.2f}")
    some = rng.permutation(given.rows)[:10_000]
    found = [one.engine.rows(one.state, "items", some) for one in (hosted, resident)]
    np.testing.assert_array_equal(*found)


def main() -> None:
    """Print the times for each distribution."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--zipf", type=float, nargs="+", default=[1.2, 1.05])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--bag", type=int, default=20)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--path", help="a folder for a scratch file, instead of the memory")
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", given.devices)
    print(common.machine())
    for zipf in given.zipf:
        measure(zipf, given)


if __name__ == "__main__":
    main()

"""Train a table on the host for many small steps; a test starts this as a process of its own.

    python long_run.py CLOSED STEP [STEP …]

Prints a line after each of these steps, with the bytes of memory that the process holds, the rows
at home, and how many rows were sent there and came back late. With CLOSED 1 the prefetcher is
closed at the end and the engine let go, and the threads that are left then are printed; with 0 the
process ends with batches placed ahead and rows on their way home.
"""

import gc
import itertools
import re
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np

import tpu_embed
from tpu_embed import optimizers as o

ROWS, BATCH, BAG = 4000, 16, 8


def batches():
    for step in itertools.count():
        yield np.random.default_rng(step).integers(0, ROWS, (BATCH, BAG))


def held_bytes():
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0])


def train(engine, ahead, steps):
    """Train; look up without training now and then, too."""
    state = engine.init(jax.random.key(0))
    for step, batch in enumerate(ahead, 1):
        state, batch = engine.admit(state, batch)
        state = engine.update_in_place(state, batch, engine.lookup(state, batch))
        if step % 25 == 0:
            rows = np.random.default_rng(step).integers(0, ROWS, (BATCH, BAG))
            jax.block_until_ready(engine.lookup(state, engine.place(rows, training=False)))
        if step in steps:
            jax.block_until_ready(state.tables)
            count = engine.storage.counters["items"]
            print(step, held_bytes(), count["rows"], count["sent"], count["late"], flush=True)
        if step == steps[-1]:
            return


def threads():
    """Return the names of this package's threads."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("tpu_embed")]


def main(closed, *steps):
    jax.config.update("jax_platforms", "cpu")
    storage = tpu_embed.HostStorage(device_rows=600)
    table = tpu_embed.TableConfig(ROWS, 8, name="items", storage=storage)
    engine = tpu_embed.EmbeddingEngine(tpu_embed.FeatureConfig(table), o.Adagrad(0.1))
    ahead = tpu_embed.data.Prefetcher(engine, batches())
    train(engine, ahead, [int(step) for step in steps])
    print("threads while it runs:", *sorted(threads()))
    if closed == "0":
        return
    ahead.close()
    del engine, ahead, table
    gc.collect()
    end = time.monotonic() + 60  # threads end by themselves, soon
    while threads() and time.monotonic() < end:
        time.sleep(0.01)
    print("threads after it:", *threads())


if __name__ == "__main__":
    main(*sys.argv[1:])

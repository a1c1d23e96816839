"""One of two processes that train and publish together: `delta_process.py ROOT PORT NUMBER`."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.io import TouchedRows, export_delta
from tpu_embed.io.delta import delta


def save(path, engine, state):
    """Write all tables, from the first process."""
    tables = multihost_utils.process_allgather(engine.tables(state), tiled=True)
    if jax.process_index() == 0:
        np.savez(path, **tables)


def no_room(*args):
    """Fail as a process does that cannot hold what it keeps."""
    raise MemoryError


def main(root, port, number):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, number)
    table = TableConfig(50, 4, name="item")
    engine = EmbeddingEngine({"x": FeatureConfig(table)}, o.Adagrad(0.5))
    state, touched = engine.init(jax.random.key(0)), TouchedRows(engine)
    save(root / "first.npz", engine, state)
    mine = np.arange(0, 40, 2) if number else np.arange(1, 20)
    batch = engine.place({"x": np.resize(mine, 20)})
    touched.record(batch, 1)
    state = engine.update(state, batch, engine.lookup(state, batch))

    def refused(name, since=0):
        """Return the class of the error of an export that at least one process refuses."""
        try:
            export_delta(root / name, engine, state, touched, since)
        except Exception as error:
            return type(error).__name__

    seen = [export_delta(root / "d", engine, state, touched, since=0).step]
    seen += [refused("d"), refused(f"of {number}"), refused("e", since=2 * number)]
    delta._kept = no_room
    seen.append(refused("e"))
    save(root / "last.npz", engine, state)
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))

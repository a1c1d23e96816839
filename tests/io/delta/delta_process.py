"""One of two processes that train and publish together."""

from unittest import mock

import jax
import numpy as np
from jax.experimental import multihost_utils
from process_cases import told

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.io import TouchedRows, export_delta
from tpu_embed.io.delta import delta


def tables_of(engine, state):
    gathered = multihost_utils.process_allgather(engine.tables(state), tiled=True)
    return jax.tree.map(np.array, gathered)


def publish(root):
    """Return what exports say, of which at least one process refuses most; and tables around."""
    engine = EmbeddingEngine(FeatureConfig(TableConfig(50, 4, name="item")), o.Adagrad(0.5))
    number, touched = jax.process_index(), TouchedRows(engine)
    state = engine.init(jax.random.key(0))
    first = tables_of(engine, state)
    batch = engine.place(np.resize(np.arange(0, 40, 2) if number else np.arange(1, 20), 20))
    touched.record(batch, 1)
    state = engine.update(state, batch, engine.lookup(state, batch))

    def refused(name, since=0):
        return told(export_delta, root / name, engine, state, touched, since)[0]

    seen = [export_delta(root / "d", engine, state, touched, since=0).step]
    seen += [refused("d"), refused(f"of {number}"), refused("e", since=2 * number)]
    last = tables_of(engine, state)
    if number == 0:  # which keeps the rows
        delta.DeviceRows.empty = mock.Mock(side_effect=MemoryError)
    return [*seen, refused("e")], first, last

"""What several processes do together in a bucket."""

from unittest import mock

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from process_cases import told

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig, io
from tpu_embed import optimizers as o
from tpu_embed.io import commits


def features(placement):
    return {n: FeatureConfig(TableConfig(50, 6, name=n, placement=placement)) for n in "ab"}


def engine(placement):
    mesh = Mesh(jax.devices(), ("d",))
    return tpu_embed.EmbeddingEngine(features(placement), o.Adagrad(0.5), mesh=mesh)


def saved_and_restored(url):
    """Return rows and a network from before and after, the steps, and what a failure has left."""
    made, other = engine("mod"), engine("div")
    state = made.init(jax.random.key(0))
    sharding = made.layout.axes.sharding(made.layout.axes.names)
    whole = np.arange(32, dtype=np.float32).reshape(16, 2)
    kernel = jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)
    model = {"kernel": kernel, "n": 3}
    with io.CheckpointManager(url, made, keep=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, state, model=model, position=step)
        manager.wait()
        steps = manager.all_steps()
    found = io.restore(f"{url}/3", other, model=model)
    shards = found.model["kernel"].addressable_shards
    pieces = [np.array_equal(one.data, whole[one.index]) for one in shards]
    ids = np.arange(50)
    rows = [e.rows(s, n, ids) for e, s in ((made, state), (other, found.state)) for n in "ab"]
    full, real = mock.Mock(side_effect=OSError("no space left")), commits._InBucket.finish
    with mock.patch.object(commits._InBucket, "finish", real if jax.process_index() else full):
        _, text = told(io.save, f"{url}/4", made, state)
    return rows, all(pieces), found.position, steps, text


def published(url, cache):
    """Publish a whole model and a delta; return rows, and what a server of each process answers."""
    made, ids = engine("mod"), np.arange(50)
    state, touched = made.init(jax.random.key(0)), io.TouchedRows(made)
    asked = dict.fromkeys("ab", ids)

    def export(path, version):
        tables = multihost_utils.process_allgather(made.tables(state), tiled=True)
        if jax.process_index() == 0:
            options = {"version": version, "platforms": "cpu"}
            io.export_model(path, lambda rows: rows, tables, features("mod"), asked, **options)

    io.publish(url, made, state, touched, export)
    served = io.follow(url, cache=f"{cache}/{jax.process_index()}")
    mine = 1 + 4 * jax.process_index() + np.arange(4)  # other ids in each process
    touched.record(batch := made.place(dict.fromkeys("ab", mine)), 1)
    state = made.update(state, batch, made.lookup(state, batch))
    io.publish(url, made, state, touched, export)
    served.poll()
    return [made.rows(state, name, ids) for name in "ab"], jax.tree.map(np.asarray, served(asked))

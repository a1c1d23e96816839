"""What several processes do together in a bucket."""

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.io import (
    CheckpointManager,
    TouchedRows,
    commits,
    export_model,
    follow,
    publish,
    restore,
    save,
)


def features(placement):
    tables = {name: TableConfig(50, 6, name=name, placement=placement) for name in ("a", "b")}
    return {name: FeatureConfig(table) for name, table in tables.items()}


def engine(placement):
    made = features(placement)
    return tpu_embed.EmbeddingEngine(made, o.Adagrad(0.5), mesh=Mesh(jax.devices(), ("d",)))


def saved_and_restored(url):
    """Return rows and a network from before and after, the steps, and what a failure has left."""
    made, other = engine("mod"), engine("div")
    state = made.init(jax.random.key(0))
    sharding = made.layout.axes.sharding(made.layout.axes.names)
    kernel = jax.make_array_from_callback(
        (16, 2), sharding, np.arange(32, dtype=np.float32).reshape(16, 2).__getitem__
    )
    model = {"kernel": kernel, "n": 3}
    with CheckpointManager(url, made, keep=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, state, model=model, position=step)
        manager.wait()
        steps = manager.all_steps()
    found = restore(f"{url}/3", other, model=model)
    pieces = [np.array_equal(one.data, np.arange(32).reshape(16, 2)[one.index])
              for one in found.model["kernel"].addressable_shards]  # fmt: skip
    ids = np.arange(50)
    rows = [e.rows(s, n, ids) for e, s in ((made, state), (other, found.state)) for n in "ab"]
    told, real = "", commits._InBucket.finish
    if jax.process_index() == 0:
        commits._InBucket.finish = lambda *_: (_ for _ in ()).throw(OSError("no space left"))
    try:
        save(f"{url}/4", made, state)
    except Exception as error:
        told = f"{error}"
    commits._InBucket.finish = real
    return rows, all(pieces), found.position, steps, told


def published(url, cache):
    """Publish a whole model and a delta; return rows, and what a server of each process answers."""
    made, ids = engine("mod"), np.arange(50)
    state, touched = made.init(jax.random.key(0)), TouchedRows(made)
    asked = dict.fromkeys("ab", ids)

    def export(path, version):
        tables = multihost_utils.process_allgather(made.tables(state), tiled=True)
        if jax.process_index() == 0:
            options = {"version": version, "platforms": "cpu"}
            export_model(path, lambda rows: rows, tables, features("mod"), asked, **options)

    publish(url, made, state, touched, export)
    served = follow(url, cache=f"{cache}/{jax.process_index()}")
    mine = 1 + 4 * jax.process_index() + np.arange(4)  # other ids in each process
    touched.record(batch := made.place(dict.fromkeys("ab", mine)), 1)
    state = made.update(state, batch, made.lookup(state, batch))
    publish(url, made, state, touched, export)
    served.poll()
    return [made.rows(state, name, ids) for name in "ab"], jax.tree.map(np.asarray, served(asked))

"""Train a small model from its latest checkpoint, saving as it goes; the tests kill it.

    python killed.py DIRECTORY STEPS CACHE LAST

Prints one line after resuming, one per step and one at the end; then the file LAST has everything
that was trained. DIRECTORY is that of the checkpoints, or a URL. There are two emulated devices
with tables on both, one of them with a dynamic vocabulary whose keys come and go, one on the host,
a network, and a position: the state of the generator that draws the batches. A batch is always
placed ahead, also while a save begins.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

import tpu_embed
from tpu_embed import optimizers as o
from tpu_embed.io import CheckpointManager
from tpu_embed.vocabulary import COUNTERS

SIZES = {"item": 3000, "user": 1500, "query": 400, "far": 600}
"""Different ids of each table; of the keys a seventh have rows."""


def make_engine():
    living = tpu_embed.DynamicVocabulary(admit_after=2, ttl=2, waiting=150)
    rule, host = o.Adam(0.1), tpu_embed.HostStorage(device_rows=100)
    given = {"user": {"dtype": "bfloat16", "placement": "div", "optimizer": rule}}
    given |= {"item": {}, "query": {"vocabulary": living}, "far": {"storage": host}}
    features = {}
    for name, options in given.items():
        size = SIZES[name] // 7 if name == "query" else SIZES[name]
        features[name] = tpu_embed.FeatureConfig(
            tpu_embed.TableConfig(size, 8, name=name, **options)
        )
    return tpu_embed.EmbeddingEngine(features, o.Adagrad(0.5))


def step_of(engine):
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(state, kernel, batch):
        def loss_fn(kernel, found):
            product = found["item"] * found["user"] + found["query"] + found["far"]
            return jnp.mean((product @ kernel - 1.0) ** 2)

        dense, sparse = jax.grad(loss_fn, argnums=(0, 1))(kernel, engine.lookup(state, batch))
        return engine.update(state, batch, sparse), kernel - 0.01 * dense

    return step


def draw(rng):
    return {name: rng.integers(0, size, (16, 3)) for name, size in SIZES.items()}


def main(directory, steps, cache, last_file):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    engine = make_engine()
    model = {"kernel": jax.device_put(jnp.ones(8), engine.layout.axes.sharding(()))}
    rng, train = np.random.default_rng(0), step_of(engine)
    with CheckpointManager(directory, engine, every=2, keep=2) as manager:
        first = manager.latest_step()
        if first is None:
            first, state = 0, engine.init(jax.random.key(0))
        else:
            state, model, rng.bit_generator.state = manager.restore(model=model)
        print("resumed", first, flush=True)
        batch = engine.place(draw(rng))
        for number in range(first + 1, steps + 1):
            state, batch = engine.admit(state, batch)
            state, model["kernel"] = train(state, model["kernel"], batch)
            position = rng.bit_generator.state
            batch = engine.place(draw(rng))
            manager.save(number, state, model=model, position=position)
            print("step", number, flush=True)
    query = engine.vocabularies.held("query")
    counters = dict(zip(COUNTERS, query.counters.tolist(), strict=True))
    assert all(counters.values()), f"some of {counters} did not happen"
    rows = [
        engine.rows(state, name, np.arange(table.vocabulary_size), slot=slot)
        for name, table in engine.table_configs.items()
        for slot in (None, "velocities" if name == "user" else "accumulators")
    ]
    last = jax.tree.leaves((rows, query, model, rng.random(3)))
    np.savez(last_file, *[np.asarray(x, np.float32) for x in last])
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])

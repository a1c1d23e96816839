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
import optax

import tpu_embed
from tpu_embed import optimizers as o
from tpu_embed.io import CheckpointManager
from tpu_embed.vocabulary import COUNTERS

ROWS, KEYS, FAR, DIM, BATCH, EVERY = 3000, 400, 600, 8, 16, 2
DENSE = optax.adam(0.01)


def features():
    given = {"item": (ROWS, {}), "user": (ROWS // 2, {"dtype": "bfloat16", "placement": "div"})}
    living = tpu_embed.DynamicVocabulary(admit_after=2, ttl=2, waiting=150)
    given["query"] = KEYS // 7, {"vocabulary": living}
    given["far"] = FAR, {"storage": tpu_embed.HostStorage(device_rows=100)}
    found = {}
    for name, (rows, options) in given.items():
        rule = o.Adam(0.1) if name == "user" else o.Adagrad(0.5)
        table = tpu_embed.TableConfig(rows, DIM, name=name, optimizer=rule, **options)
        found[name] = tpu_embed.FeatureConfig(table)
    return found


def step_of(engine):
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(state, model, batch):
        def loss_fn(kernel, activations):
            product = activations["item"] * activations["user"] + activations["query"]
            product += activations["far"]
            return jnp.mean((product @ kernel - 1.0) ** 2)

        activations = engine.lookup(state, batch)
        dense, sparse = jax.grad(loss_fn, argnums=(0, 1))(model["kernel"], activations)
        updates, optimizer = DENSE.update(dense, model["optimizer"], model["kernel"])
        kernel = optax.apply_updates(model["kernel"], updates)
        return engine.update(state, batch, sparse), {"kernel": kernel, "optimizer": optimizer}

    return step


def draw(rng):
    sizes = {"item": ROWS, "user": ROWS // 2, "query": KEYS, "far": FAR}
    return {name: rng.integers(0, rows, (BATCH, 3)) for name, rows in sizes.items()}


def main(directory, steps, cache, last_file):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    engine = tpu_embed.EmbeddingEngine(features())
    kernel = jnp.ones(DIM)
    model = jax.device_put(
        {"kernel": kernel, "optimizer": DENSE.init(kernel)}, engine.layout.axes.sharding(())
    )
    rng, train = np.random.default_rng(0), step_of(engine)
    with CheckpointManager(directory, engine, every=EVERY, keep=2) as manager:
        first = manager.latest_step()
        if first is None:
            first, state = 0, engine.init(jax.random.key(0))
        else:
            state, model, rng.bit_generator.state = manager.restore(model=model)
        print("resumed", first, flush=True)
        batch = engine.place(draw(rng))
        for number in range(first + 1, steps + 1):
            state, batch = engine.admit(state, batch)
            state, model = train(state, model, batch)
            position = rng.bit_generator.state
            batch = engine.place(draw(rng))
            manager.save(number, state, model=model, position=position)
            print("step", number, flush=True)
    query = engine.vocabularies.held("query")
    counters = dict(zip(COUNTERS, query.counters.tolist(), strict=True))
    assert all(counters.values()), f"some of {counters} did not happen"
    slots = {"item": "accumulators", "user": "velocities", "query": "accumulators"}
    rows = [
        engine.rows(state, name, np.arange(table.vocabulary_size), slot=slot)
        for name, table in engine.table_configs.items()
        for slot in (None, slots.get(name, "accumulators"))
    ]
    last = jax.tree.leaves((rows, query, model, rng.random(3)))
    np.savez(last_file, *[np.asarray(x, np.float32) for x in last])
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])

"""Train a small model from its latest checkpoint, saving as it goes; the tests kill it.

    python killed.py DIRECTORY STEPS CACHE

Prints one line after resuming, one per step and one at the end; then `DIRECTORY/last.npz` has
everything that was trained. There are two emulated devices with tables on both, a network, and a
position: the state of the generator that draws the batches.
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tpu_embed
from tpu_embed import optimizers as o
from tpu_embed.io import CheckpointManager

ROWS, DIM, BATCH, EVERY = 3000, 8, 16, 2
DENSE = optax.adam(0.01)


def features():
    item = tpu_embed.TableConfig(ROWS, DIM, name="item", optimizer=o.Adagrad(0.5))
    user = tpu_embed.TableConfig(
        ROWS // 2, DIM, name="user", optimizer=o.Adam(0.1), dtype="bfloat16", placement="div"
    )
    return {"item": tpu_embed.FeatureConfig(item), "user": tpu_embed.FeatureConfig(user)}


def step_of(engine):
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(state, model, batch):
        def loss_fn(kernel, activations):
            return jnp.mean(((activations["item"] * activations["user"]) @ kernel - 1.0) ** 2)

        activations = engine.lookup(state, batch)
        dense, sparse = jax.grad(loss_fn, argnums=(0, 1))(model["kernel"], activations)
        updates, optimizer = DENSE.update(dense, model["optimizer"], model["kernel"])
        kernel = optax.apply_updates(model["kernel"], updates)
        return engine.update(state, batch, sparse), {"kernel": kernel, "optimizer": optimizer}

    return step


def draw(rng):
    sizes = {"item": ROWS, "user": ROWS // 2}
    return {name: rng.integers(0, rows, (BATCH, 3)) for name, rows in sizes.items()}


def main(directory, steps, cache):
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
    spec = tpu_embed.BatchSpec.union(
        *(engine.place(draw(np.random.default_rng(seed))).spec for seed in range(5))
    )
    with CheckpointManager(directory, engine, every=EVERY, keep=2) as manager:
        first = manager.latest_step()
        if first is None:
            first, state = 0, engine.init(jax.random.key(0))
        else:
            state, model, rng.bit_generator.state = manager.restore(model=model)
        print("resumed", first, flush=True)
        for number in range(first + 1, steps + 1):
            state, model = train(state, model, engine.place(draw(rng), spec=spec))
            manager.save(number, state, model=model, position=rng.bit_generator.state)
            print("step", number, flush=True)
    tables, slots = engine.tables(state), engine.slots(state)
    last = jax.tree.leaves((tables, slots, model, rng.random(3)))
    np.savez(Path(directory) / "last.npz", *[np.asarray(x, np.float32) for x in last])
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])

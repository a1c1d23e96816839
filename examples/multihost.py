"""Train on one process or on many; each reads and places its own part of every global batch.

    python examples/multihost.py                          # one process, all of its devices
    python examples/multihost.py --local 2 --devices 4    # two here, with 4 CPU devices each
    python examples/multihost.py --distributed            # on every worker of a TPU slice

With --directory everything is saved every 50 steps, in the background. If one process ends, the
others end with an error; started again, all continue from the last checkpoint, with the same bits.
"""

from __future__ import annotations

import argparse
import functools
import sys
import zlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import local_processes
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import tpu_embed
from tpu_embed import FeatureConfig, RaggedIds, TableConfig
from tpu_embed.data import Prefetcher
from tpu_embed.io import CheckpointManager

USERS, ITEMS, HISTORY, DIM = 200, 1_000, 6, 16


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on one process or on many.")
    parser.add_argument("--steps", type=int, default=200, help="of training in all")
    parser.add_argument("--batch-size", type=int, default=512, help="of the global batch")
    parser.add_argument("--directory", help="of checkpoints, which all processes can reach")
    parser.add_argument("--distributed", action="store_true", help="this is one of many processes")
    parser.add_argument("--coordinator", help="host:port of process 0; a TPU slice knows it")
    parser.add_argument("--processes", type=int, help="how many; a TPU slice knows it")
    parser.add_argument("--process", type=int, help="number of this one; a TPU slice knows it")
    parser.add_argument("--devices", type=int, help="emulate this many CPU devices a process")
    parser.add_argument("--local", type=int, help="start this many processes on this machine")
    parser.add_argument("--end-with-input", action="store_true", help="set by --local")
    return parser.parse_args()


def start(args: argparse.Namespace) -> None:
    """Join the processes, before anything asks JAX for its devices."""
    if args.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
    if args.distributed:  # JAX finds out what is None: on a TPU slice, Slurm or MPI
        join = functools.partial(jax.distributed.initialize, heartbeat_timeout_seconds=20)
        join(args.coordinator, args.processes, args.process, shutdown_timeout_seconds=10)


def read(numbers: range) -> tuple[dict, np.ndarray]:
    """Return made-up features and labels `[n]` of the examples with these numbers.

    This stands for a reader of files. Histories have 0 to 5 items.
    """
    likes = np.random.default_rng(0).normal(size=USERS + ITEMS)
    draws = np.stack([np.random.default_rng(n).random(3 + HISTORY) for n in numbers])
    user = (USERS * draws[:, 0] ** 2).astype(np.int32)
    shown = (ITEMS * draws[:, 2:] ** 3).astype(np.int32)  # small ids are popular
    history = RaggedIds.from_lists([row[: row[0] % HISTORY] for row in shown[:, 1:]])
    score = 2.0 * (likes[user] + likes[USERS + shown[:, 0]])
    label = draws[:, 1] < 1.0 / (1.0 + np.exp(-score))
    return {"user": user, "item": shown[:, 0], "history": history}, label.astype(np.float32)


def parts(first: int, args: argparse.Namespace) -> Iterator[tuple[dict, np.ndarray]]:
    """Yield this process's parts of the batches from number `first` on."""
    mine = args.batch_size // jax.process_count()  # examples of each batch that it reads
    for number in range(first, args.steps):
        start = number * args.batch_size + jax.process_index() * mine
        yield read(range(start, start + mine))


def loss_fn(params, acts, label):
    both = acts["user"] + acts["item"] + acts["history"]
    logit = both @ params["weight"] + params["bias"]
    return optax.sigmoid_binary_cross_entropy(logit, label).mean()


def make_step(engine, dense):
    """Return the jitted training step; the state and the network are donated."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(state, network, batch, label):
        params, opt_state = network
        acts = engine.lookup(state, batch)
        loss, grads = jax.value_and_grad(loss_fn, argnums=(0, 1))(params, acts, label)
        updates, opt_state = dense.update(grads[0], opt_state)
        network = optax.apply_updates(params, updates), opt_state
        return engine.update(state, batch, grads[1]), network, loss

    return step


def digest(engine, state, network) -> str:
    """Return a checksum of tables, slots and network; every process must call this."""
    leaves = jax.tree.leaves((engine.tables(state), engine.slots(state), network))
    return f"{zlib.crc32(b''.join(np.asarray(leaf).tobytes() for leaf in leaves)):08x}"


def main() -> None:
    args = arguments()
    if args.local:
        raise SystemExit(local_processes.run_all(args.local))
    if args.end_with_input:
        local_processes.end_with_input()
    start(args)
    process, processes = jax.process_index(), jax.process_count()
    mesh = jax.sharding.Mesh(jax.devices(), ("devices",))  # of all processes
    if args.batch_size < 1 or args.batch_size % mesh.size:
        raise SystemExit(f"error: --batch-size must be a multiple of {mesh.size} devices")
    users, items = TableConfig(USERS, DIM, name="users"), TableConfig(ITEMS, DIM, name="items")
    features = jax.tree.map(FeatureConfig, {"user": users, "item": items, "history": items})
    engine = tpu_embed.EmbeddingEngine(features, tpu_embed.optimizers.Adagrad(0.3))
    state = engine.init(jax.random.key(0))  # each device makes its own rows
    params = {"weight": jnp.full(DIM, 0.25, jnp.float32), "bias": jnp.zeros(())}
    dense = optax.adam(1e-2)
    network = jax.device_put((params, dense.init(params)), state.step.sharding)  # everywhere
    manager = CheckpointManager(args.directory, engine, every=50) if args.directory else None
    if manager and manager.latest_step() is not None:
        state, network, _ = manager.restore(model=network)
    step = make_step(engine, dense)
    split = NamedSharding(mesh, PartitionSpec("devices"))
    if process == 0:
        print(f"{processes} process(es), {mesh.size} {jax.devices()[0].device_kind} device(s)")
    # A thread places the next batches during a step; all processes agree on their shapes.
    batches = Prefetcher(engine, parts(int(state.step), args))
    for number, (batch, label) in enumerate(batches, int(state.step)):
        label = jax.make_array_from_process_local_data(split, label)
        state, network, loss = step(state, network, batch, label)
        if number % 10 == 9 and process == 0:  # every process has the loss; one prints it
            print(f"step {number + 1}  loss {loss:.6f}", flush=True)
        if manager:
            manager.save(number + 1, state, model=network)
    if manager:
        manager.close()
    # One write: lines of processes that share an output stay whole, even unbuffered.
    sys.stdout.write(f"checksum of tables and network: {digest(engine, state, network)}\n")


if __name__ == "__main__":
    main()

"""Train on one process or on many: each host reads its own part of every global batch.

    python examples/multi_host.py                  # one process, all of its devices
    python examples/multi_host.py --distributed    # on every worker of a TPU slice
    python examples/multi_host.py --distributed --coordinator 127.0.0.1:8476 \
        --processes 2 --process 0 --devices 2      # and another with --process 1: two on CPU

`EmbeddingEngine.place` is for one process. Here dense arrays of ids are given to `lookup` and
`update` inside a jit, as global arrays that all processes make together.
"""

from __future__ import annotations

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig

USERS, ITEMS, HISTORY, DIM = 200, 1_000, 6, 16


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=512, help="of the global batch")
    parser.add_argument("--distributed", action="store_true", help="this is one of many processes")
    parser.add_argument("--coordinator", help="host:port of process 0; a TPU slice knows it")
    parser.add_argument("--processes", type=int, help="how many; a TPU slice knows it")
    parser.add_argument("--process", type=int, help="number of this one; a TPU slice knows it")
    parser.add_argument("--devices", type=int, help="emulate this many CPU devices a process")
    return parser.parse_args()


def start(args: argparse.Namespace) -> None:
    """Join the processes, before anything asks JAX for its devices."""
    if args.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
    if args.distributed:  # what is None is read from the environment: a TPU slice, Slurm, MPI
        jax.distributed.initialize(args.coordinator, args.processes, args.process)


def feature_config() -> dict[str, FeatureConfig]:
    users = TableConfig(USERS, DIM, name="users")
    items = TableConfig(ITEMS, DIM, name="items", combiner="mean")
    return {
        "user": FeatureConfig(users),
        "item": FeatureConfig(items),
        "history": FeatureConfig(items),
    }


class Clicks:
    """Examples by number, as a reader of shuffled files gives them; made up, from hidden scores."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.user, self.item = rng.normal(size=USERS), rng.normal(size=ITEMS)

    def read(self, numbers: range) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return the features of some examples, int32 `[n]` and `[n, H]`, and labels `[n]`."""
        draws = np.stack([np.random.default_rng(n).random(3 + HISTORY) for n in numbers])
        user = (USERS * draws[:, 0] ** 2).astype(np.int32)
        shown = (ITEMS * draws[:, 2:] ** 3).astype(np.int32)  # small ids are popular
        history = np.where(shown[:, 1:] % 3 > 0, shown[:, 1:], -1)  # -1 pads
        score = 2.0 * (self.user[user] + self.item[shown[:, 0]])
        label = draws[:, 1] < 1.0 / (1.0 + np.exp(-score))
        features = {"user": user, "item": shown[:, 0], "history": history}
        return features, label.astype(np.float32)


def loss_fn(params, acts, label):
    both = acts["user"] + acts["item"] + acts["history"]
    logit = both @ params["weight"] + params["bias"]
    return optax.sigmoid_binary_cross_entropy(logit, label).mean()


def make_step(engine, dense):
    """Return the jitted training step; all that it trains is donated."""

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(state, params, opt_state, features, label):
        acts = engine.lookup(state, features)
        loss, grads = jax.value_and_grad(loss_fn, argnums=(0, 1))(params, acts, label)
        updates, opt_state = dense.update(grads[0], opt_state)
        state = engine.update(state, features, grads[1])
        return state, optax.apply_updates(params, updates), opt_state, loss

    return step


def main() -> None:
    args = arguments()
    start(args)
    process, processes = jax.process_index(), jax.process_count()
    mesh = jax.sharding.Mesh(jax.devices(), ("devices",))  # of all processes
    split = NamedSharding(mesh, P("devices"))

    engine = tpu_embed.EmbeddingEngine(
        feature_config(), tpu_embed.optimizers.Adagrad(0.3), mesh=mesh
    )
    state = engine.init(jax.random.key(0))  # each device makes its own rows
    params = {"weight": jnp.full(DIM, 0.25, jnp.float32), "bias": jnp.zeros(())}
    dense = optax.adam(1e-2)
    everywhere = state.step.sharding  # where a step leaves them: it is compiled once, not twice
    params, opt_state = jax.device_put((params, dense.init(params)), everywhere)
    step = make_step(engine, dense)

    mine = args.batch_size // processes  # examples of each batch that this process reads
    if mine * processes != args.batch_size or args.batch_size % mesh.size:
        raise SystemExit(f"error: --batch-size must be a multiple of {mesh.size} devices")
    data = Clicks()
    if process == 0:
        print(f"{processes} process(es), {mesh.size} {jax.devices()[0].device_kind} device(s)")
    for number in range(args.steps):
        first = number * args.batch_size + process * mine
        local = data.read(range(first, first + mine))
        features, label = jax.make_array_from_process_local_data(split, local)  # nothing is sent
        state, params, opt_state, loss = step(state, params, opt_state, features, label)
        if number % 10 == 9 and process == 0:  # every process has the loss; one prints it
            print(f"step {number + 1}  loss {loss:.6f}")
    if process == 0:
        print(f"ids outside their tables: {int(state.counters['bad_ids'].sum())}")


if __name__ == "__main__":
    main()

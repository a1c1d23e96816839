"""Retrieve items for users of MovieLens-100K: two towers, in-batch softmax, recall@50.

An engine holds the tables and updates the rows of each batch. The towers are replicated: every
device works on its part of the batch, and `cross_shard` averages their gradients before Adam.
"""

from __future__ import annotations

import functools
import time

import jax
import movielens_data
import numpy as np
import optax
import ranking
import settings
import two_tower_model as model
from flax import nnx
from jax.sharding import PartitionSpec as P

import tpu_embed
from tpu_embed.data import Prefetcher
from tpu_embed.training.optimizer import cross_shard


def make_step(engine, dense, graph, config):
    """Return the jitted training step, which updates state, params and opt_state in place."""

    def on_each_device(params, opt_state, activations, item, log_share):
        def loss_fn(params, activations):
            towers = nnx.merge(graph, params)
            return model.in_batch_loss(towers, activations, item, log_share, config.temperature)

        loss, (grads, activation_grads) = jax.value_and_grad(loss_fn, (0, 1))(params, activations)
        updates, opt_state = dense.update(grads, opt_state, params)
        share = 1.0 / jax.lax.axis_size("devices")  # of the mean over all devices
        activation_grads = jax.tree.map(lambda g: g * share, activation_grads)
        loss = jax.lax.pmean(loss, "devices")
        return optax.apply_updates(params, updates), opt_state, activation_grads, loss

    replicated = jax.shard_map(
        on_each_device,
        mesh=engine.layout.axes.mesh,
        in_specs=(P(), P(), P("devices"), P("devices"), P("devices")),
        out_specs=(P(), P(), P("devices"), P()),
        check_vma=False,  # gradients differ per device until `cross_shard` averages them
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(state, params, opt_state, batch, item, log_share):
        activations = engine.lookup(state, batch)
        params, opt_state, grads, loss = replicated(params, opt_state, activations, item, log_share)
        return engine.update(state, batch, grads), params, opt_state, loss

    return step


def main() -> None:
    options = settings.movielens_parser(__doc__, "two_tower.py")
    last = "predict the last rating of each user, by recall@10, as sequences.py does"
    options.add_argument("--leave-one-out", action="store_true", help=last)
    args, config = settings.read(options)

    data = movielens_data.load(args.data)
    top, (train_rows, test_rows) = 50, data.split(config.seed)
    if args.leave_one_out:
        top, (train_rows, test_rows) = 10, ranking.leave_one_out(data)
    users, items = len(data.age), len(data.decade)
    pairs = [(data.user[rows], data.item[rows]) for rows in (train_rows, test_rows)]
    count = np.bincount(pairs[0][1], minlength=items)
    log_share = np.log(np.maximum(count, 1) / len(train_rows)).astype(np.float32)
    steps = config.epochs * (len(train_rows) // config.batch_size)

    schedule = optax.cosine_decay_schedule(config.learning_rate, steps)
    mesh = jax.sharding.Mesh(jax.devices(), ("devices",))
    adagrad = tpu_embed.optimizers.Adagrad(schedule, initial_accumulator_value=1e-6)
    engine = tpu_embed.EmbeddingEngine(model.feature_config(config, data), adagrad, mesh=mesh)
    state = engine.init(jax.random.key(config.seed))
    graph, params = nnx.split(model.Towers(config, nnx.Rngs(config.seed)))
    dense_schedule = optax.cosine_decay_schedule(config.dense_learning_rate, steps)
    dense = cross_shard(optax.adam(dense_schedule), "devices", reduction="mean")
    params, opt_state = jax.device_put((params, dense.init(params)), state.step.sharding)
    step = make_step(engine, dense, graph, config)

    @jax.jit
    def vectors(state, params, batch):
        return nnx.merge(graph, params)(engine.lookup(state, batch))

    every = np.arange(max(users, items), dtype=np.int32)  # one line per user and item
    everything = model.inputs(data, np.minimum(every, users - 1), np.minimum(every, items - 1))
    everything = engine.place(tpu_embed.pad_batch(everything, jax.device_count()))

    def measure(scores) -> str:
        recall, ndcg = ranking.recall_and_ndcg(scores, pairs[0], pairs[1], top)
        return f"recall@{top} {recall:.4f}  NDCG@{top} {ndcg:.4f}"

    def evaluate() -> str:
        user_vectors, item_vectors = vectors(state, params, everything)
        return measure(user_vectors[:users] @ item_vectors[:items].T)

    def chunks(rows):
        for start in range(0, len(rows) - config.batch_size + 1, config.batch_size):
            chunk = rows[start : start + config.batch_size]
            item = data.item[chunk]
            yield model.inputs(data, data.user[chunk], item), item, log_share[item]

    first = next(Prefetcher(engine, chunks(train_rows)))
    engine.check_in_place(step, state, params, opt_state, *first)
    print(f"{jax.device_count()} device(s), {len(train_rows)} ratings to train on")
    print(f"popularity  {measure(np.tile(count, (users, 1)) * 1.0)}")
    rng = np.random.default_rng(config.seed)
    for epoch in range(1, config.epochs + 1):
        begin, losses = time.perf_counter(), []
        for batch in Prefetcher(engine, chunks(rng.permutation(train_rows))):
            state, params, opt_state, loss = step(state, params, opt_state, *batch)
            losses.append(loss)
        found, seconds = evaluate(), time.perf_counter() - begin
        print(f"epoch {epoch:2d}  loss {np.mean(losses):.4f}  {found}  {seconds:.1f} s")


if __name__ == "__main__":
    main()

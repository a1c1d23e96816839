"""Predict the next film of each user of MovieLens-100K: HSTU layers over jagged histories.

The engine looks up each history as it is: `Jagged` has the events of a device's histories one after
the other, and `jax.vmap` runs the network on each device's part. All items are looked up, too, for
the softmax over them. Held out is the last rating of each user; `retrieval.top_k` finds what is
recommended in the table of items.
"""

from __future__ import annotations

import functools
import time

import jax
import movielens_data
import numpy as np
import optax
import ranking
import sequences_model as model
import settings
from flax import nnx

import tpu_embed
from tpu_embed import RaggedIds, retrieval
from tpu_embed.data import Prefetcher

TOP = 10


def make_step(engine, dense, graph, items: int):
    """Return the jitted training step, which updates state, params and opt_state in place."""
    everywhere = jax.sharding.NamedSharding(engine.layout.axes.mesh, jax.sharding.PartitionSpec())

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(state, params, opt_state, batch):
        values, rebuild = tpu_embed.split_activations(engine.lookup(state, batch))

        def loss_fn(params, values):
            network, activations = nnx.merge(graph, params), rebuild(values)
            # Each device needs the vectors of all items; of the histories, only its own.
            every = jax.lax.with_sharding_constraint(activations["item"], everywhere)[:items]
            of_replica = functools.partial(model.next_item_losses, network, items=every)
            losses, counts = jax.vmap(of_replica)(activations["history"])
            return losses.sum() / counts.sum()

        loss, (grads, value_grads) = jax.value_and_grad(loss_fn, (0, 1))(params, values)
        updates, opt_state = dense.update(grads, opt_state, params)
        state = engine.update(state, batch, value_grads)
        return state, optax.apply_updates(params, updates), opt_state, loss

    return step


def main() -> None:
    args, config = settings.read(settings.movielens_parser(__doc__, "sequences.py"))

    data = movielens_data.load(args.data)
    users, items = len(data.age), len(data.decade)
    pairs = [(data.user[rows], data.item[rows]) for rows in ranking.leave_one_out(data)]
    seen, relevant = (ranking.by_user(*pair, users) for pair in pairs)
    histories = np.split(pairs[0][1], np.flatnonzero(np.diff(pairs[0][0])) + 1)
    rng = np.random.default_rng(config.seed)
    steps = config.epochs * (len(model.pieces(histories, config.longest, rng)) // config.batch_size)

    schedule = optax.cosine_decay_schedule(config.learning_rate, steps)
    adam = tpu_embed.optimizers.Adam(schedule, beta_2=config.beta_2)
    engine = tpu_embed.EmbeddingEngine(model.feature_config(config, items), adam)
    state = engine.init(jax.random.key(config.seed))
    graph, params = nnx.split(model.Network(config, nnx.Rngs(config.seed)))
    dense = optax.adam(schedule, b2=config.beta_2)
    params, opt_state = jax.device_put((params, dense.init(params)), state.step.sharding)
    step = make_step(engine, dense, graph, items)

    def features(histories):
        batch = {"history": RaggedIds.from_lists(histories), "item": np.arange(items)}
        return tpu_embed.pad_batch(batch, jax.device_count())

    @jax.jit
    def recommend(state, params, batch):
        history = engine.lookup(state, batch)["history"]
        of_replica = functools.partial(model.last_vectors, nnx.merge(graph, params))
        vectors = jax.vmap(of_replica)(history).reshape(-1, config.dim)[:users]
        return retrieval.top_k(engine, state, "items", vectors, TOP, exclude=seen).ids

    everyone = engine.place(features([history[-config.longest :] for history in histories]))

    def batches():
        cut = model.pieces(histories, config.longest, rng)
        order = rng.permutation(len(cut))
        for start in range(0, len(cut) - config.batch_size + 1, config.batch_size):
            yield features([cut[i] for i in order[start : start + config.batch_size]])

    engine.check_in_place(step, state, params, opt_state, next(Prefetcher(engine, batches())))
    print(f"{jax.device_count()} device(s), {len(pairs[0][0])} ratings to train on")
    print(f"popularity  {ranking.describe(ranking.most_popular(seen, items, TOP), relevant)}")
    for epoch in range(1, config.epochs + 1):
        begin, losses = time.perf_counter(), []
        for batch in Prefetcher(engine, batches()):
            state, params, opt_state, loss = step(state, params, opt_state, batch)
            # Wait for it: many unfinished steps on emulated devices can stop for good.
            losses.append(float(loss))
        found = ranking.describe(recommend(state, params, everyone), relevant)
        seconds = time.perf_counter() - begin
        print(f"epoch {epoch:2d}  loss {np.mean(losses):.4f}  {found}  {seconds:.1f} s")


if __name__ == "__main__":
    main()

"""Retrieve items for users of MovieLens-100K: two towers, in-batch softmax, recall@50.

An engine holds the tables and updates the rows of each batch. The towers are replicated, and the
compiler divides their work; the negatives of the softmax are the items of the global batch. To
recommend, the vectors of all items become a table, in which `retrieval.top_k` finds the best.
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

import tpu_embed
from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, retrieval
from tpu_embed.data import Prefetcher


def make_step(engine, dense, graph, temperature: float):
    """Return the jitted training step, which updates state, params and opt_state in place."""

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(state, params, opt_state, batch, item, log_q):
        def loss_fn(params, activations):
            vectors = nnx.merge(graph, params)(activations)
            sampling = {"log_q": log_q, "candidate_ids": item, "temperature": temperature}
            return retrieval.in_batch_softmax(*vectors, **sampling).mean()

        activations = engine.lookup(state, batch)
        loss, grads = jax.value_and_grad(loss_fn, (0, 1))(params, activations)
        updates, opt_state = dense.update(grads[0], opt_state, params)
        state = engine.update(state, batch, grads[1])
        return state, optax.apply_updates(params, updates), opt_state, loss

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
    seen, relevant = (ranking.by_user(*pair, users) for pair in pairs)
    log_q = retrieval.counted_log_q(np.bincount(pairs[0][1], minlength=items))
    steps = config.epochs * (len(train_rows) // config.batch_size)

    schedule = optax.cosine_decay_schedule(config.learning_rate, steps)
    adagrad = tpu_embed.optimizers.Adagrad(schedule, initial_accumulator_value=1e-6)
    engine = EmbeddingEngine(model.feature_config(config, data), adagrad)
    state = engine.init(jax.random.key(config.seed))
    graph, params = nnx.split(model.Towers(config, nnx.Rngs(config.seed)))
    dense_schedule = optax.cosine_decay_schedule(config.dense_learning_rate, steps)
    dense = optax.adam(dense_schedule)
    params, opt_state = jax.device_put((params, dense.init(params)), state.step.sharding)
    step = make_step(engine, dense, graph, config.temperature)

    @jax.jit
    def vectors(state, params, batch):
        return nnx.merge(graph, params)(engine.lookup(state, batch))

    every = np.arange(max(users, items), dtype=np.int32)  # one line per user and item
    everything = model.inputs(data, np.minimum(every, users - 1), np.minimum(every, items - 1))
    everything = engine.place(tpu_embed.pad_batch(everything, jax.device_count()))

    vector = FeatureConfig(TableConfig(items, config.dim, trainable=False, name="vector"))
    index = EmbeddingEngine(vector)
    empty = index.init(jax.random.key(0))

    def evaluate() -> str:
        of_users, of_items = vectors(state, params, everything)
        found = index.load_arrays(empty, {"vector": of_items[:items]})
        best = retrieval.top_k(index, found, "vector", of_users[:users], top, exclude=seen)
        return ranking.describe(best.ids, relevant)

    def chunks(rows):
        for start in range(0, len(rows) - config.batch_size + 1, config.batch_size):
            chunk = rows[start : start + config.batch_size]
            item = data.item[chunk]
            yield model.inputs(data, data.user[chunk], item), item, log_q[item]

    first = next(Prefetcher(engine, chunks(train_rows)))
    engine.check_in_place(step, state, params, opt_state, *first)
    print(f"{jax.device_count()} device(s), {len(train_rows)} ratings to train on")
    print(f"popularity  {ranking.describe(ranking.most_popular(seen, items, top), relevant)}")
    rng = np.random.default_rng(config.seed)
    for epoch in range(1, config.epochs + 1):
        begin, losses = time.perf_counter(), []
        for batch in Prefetcher(engine, chunks(rng.permutation(train_rows))):
            state, params, opt_state, loss = step(state, params, opt_state, *batch)
            # Wait for it: many unfinished steps on emulated devices can stop for good.
            losses.append(float(loss))
        found, seconds = evaluate(), time.perf_counter() - begin
        print(f"epoch {epoch:2d}  loss {np.mean(losses):.4f}  {found}  {seconds:.1f} s")


if __name__ == "__main__":
    main()

"""Retrieve items for users of MovieLens-100K: two towers, in-batch softmax, recall@50.

An engine holds the tables and updates the rows of each batch. The towers are replicated, and the
compiler divides their work; the negatives of the softmax are the items of the global batch. To
recommend, the vectors of all items become a table, in which `retrieval.top_k` finds the best.
"""

from __future__ import annotations

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


def make_recommend(engine, config, data, seen: np.ndarray, top: int):
    """Return a function of a state and towers that finds the best items of every user."""
    users, items = len(data.age), len(data.decade)
    every = np.arange(max(users, items), dtype=np.int32)  # one line per user and item
    everything = model.inputs(data, np.minimum(every, users - 1), np.minimum(every, items - 1))
    everything = engine.place(tpu_embed.pad_batch(everything, jax.device_count()))

    vector = FeatureConfig(TableConfig(items, config.dim, trainable=False, name="vector"))
    index = EmbeddingEngine(vector)
    empty = index.init(jax.random.key(0))

    @nnx.jit
    def vectors(towers, state, batch):
        return towers(engine.lookup(state, batch))

    def recommend(state, towers) -> jax.Array:
        of_users, of_items = vectors(towers, state, everything)
        found = index.load_arrays(empty, {"vector": of_items[:items]})
        return retrieval.top_k(index, found, "vector", of_users[:users], top, exclude=seen).ids

    return recommend


def train(config, data, rows: np.ndarray, seen: np.ndarray, relevant: np.ndarray, top: int) -> None:
    """Train on ratings, and print after each epoch how well the items of the test are found."""
    per_epoch = len(rows) // config.batch_size
    rates = (config.learning_rate, config.dense_learning_rate)
    rate, dense_rate = (optax.cosine_decay_schedule(x, config.epochs * per_epoch) for x in rates)
    adagrad = tpu_embed.optimizers.Adagrad(rate, initial_accumulator_value=1e-6)
    engine = EmbeddingEngine(model.feature_config(config, data), adagrad)
    counts = np.bincount(data.item[rows], minlength=len(data.decade))
    log_q = retrieval.counted_log_q(counts)

    def loss(towers, activations, item, log_q):
        sampling = {"log_q": log_q, "candidate_ids": item, "temperature": config.temperature}
        return retrieval.in_batch_softmax(*towers(activations), **sampling).mean()

    def batches():
        rng = np.random.default_rng(config.seed)
        for _ in range(config.epochs):
            order = rng.permutation(rows)[: per_epoch * config.batch_size]
            for chunk in order.reshape(per_epoch, -1):
                item = data.item[chunk]
                yield model.inputs(data, data.user[chunk], item), item, log_q[item]

    recommend = make_recommend(engine, config, data, seen, top)
    tpu_embed.fit(
        engine,
        loss,
        batches(),
        model=model.Towers(config, nnx.Rngs(config.seed)),
        optimizer=optax.adam(dense_rate),
        seed=config.seed,
        report_every=per_epoch,
        callback=ranking.print_epochs(per_epoch, recommend, relevant),
        progress=False,
    )


def main() -> None:
    options = settings.movielens_parser(__doc__, "two_tower.py")
    last = "predict the last rating of each user, by recall@10, as sequences.py does"
    options.add_argument("--leave-one-out", action="store_true", help=last)
    args, config = settings.read(options)

    data = movielens_data.load(args.data)
    top, (train_rows, test_rows) = 50, data.split(config.seed)
    if args.leave_one_out:
        top, (train_rows, test_rows) = 10, ranking.leave_one_out(data)
    pairs = [(data.user[rows], data.item[rows]) for rows in (train_rows, test_rows)]
    seen, relevant = (ranking.by_user(*pair, len(data.age)) for pair in pairs)
    popular = ranking.most_popular(seen, len(data.decade), top)
    print(f"{jax.device_count()} device(s), {len(train_rows)} ratings to train on")
    print(f"popularity  {ranking.describe(popular, relevant)}", flush=True)
    train(config, data, train_rows, seen, relevant, top)


if __name__ == "__main__":
    main()

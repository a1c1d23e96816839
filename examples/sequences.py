"""Predict the next film of each user of MovieLens-100K: HSTU layers over jagged histories.

The engine looks up each history as it is: `Jagged` has the events of a device's histories one after
the other, and `jax.vmap` runs the network on each device's part. All items are looked up, too, for
the softmax over them. Held out is the last rating of each user; `retrieval.top_k` finds what is
recommended in the table of items.
"""

from __future__ import annotations

import functools
import itertools

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

TOP = 10


def features(histories, items: int) -> dict:
    """Return the features of histories, and all items; padded to what the devices can share."""
    batch = {"history": RaggedIds.from_lists(histories), "item": np.arange(items)}
    return tpu_embed.pad_batch(batch, jax.device_count())


def make_loss(engine, items: int):
    """Return the loss: -log softmax of the next events over all items, the mean over events."""
    everywhere = jax.sharding.NamedSharding(engine.layout.axes.mesh, jax.sharding.PartitionSpec())

    def loss(network, activations):
        # Each device needs the vectors of all items; of the histories, only its own.
        every = jax.lax.with_sharding_constraint(activations["item"], everywhere)[:items]
        of_replica = functools.partial(model.next_item_losses, network, items=every)
        losses, counts = jax.vmap(of_replica)(activations["history"])
        return losses.sum() / counts.sum()

    return loss


def make_recommend(engine, newest, items: int, seen: np.ndarray):
    """Return a function of a state and a network that finds the next items of every user."""
    everyone = engine.place(features(newest, items))

    @nnx.jit
    def last_vectors(network, state, batch):
        history = engine.lookup(state, batch)["history"]
        vectors = jax.vmap(functools.partial(model.last_vectors, network))(history)
        return vectors.reshape(-1, vectors.shape[-1])[: len(newest)]

    def recommend(state, network) -> jax.Array:
        vectors = last_vectors(network, state, everyone)
        return retrieval.top_k(engine, state, "items", vectors, TOP, exclude=seen).ids

    return recommend


def train(config, histories, items: int, seen: np.ndarray, relevant: np.ndarray) -> None:
    """Train on histories, and print after each epoch how well the last items are found."""
    rng = np.random.default_rng(config.seed)
    # Where histories are cut is drawn, so the number of pieces differs a little between epochs.
    per_epoch = len(model.pieces(histories, config.longest, rng)) // config.batch_size
    steps = config.epochs * per_epoch
    schedule = optax.cosine_decay_schedule(config.learning_rate, steps)
    adam = tpu_embed.optimizers.Adam(schedule, beta_2=config.beta_2)
    engine = tpu_embed.EmbeddingEngine(model.feature_config(config, items), adam)

    def batches():
        for _ in itertools.count():
            cut = model.pieces(histories, config.longest, rng)
            order = rng.permutation(len(cut))
            for start in range(0, len(cut) - config.batch_size + 1, config.batch_size):
                chosen = order[start : start + config.batch_size]
                yield features([cut[i] for i in chosen], items)

    newest = [history[-config.longest :] for history in histories]
    recommend = make_recommend(engine, newest, items, seen)
    tpu_embed.fit(
        engine,
        make_loss(engine, items),
        batches(),
        steps=steps,
        model=model.Network(config, nnx.Rngs(config.seed)),
        optimizer=optax.adam(schedule, b2=config.beta_2),
        seed=config.seed,
        report_every=per_epoch,
        callback=ranking.print_epochs(per_epoch, recommend, relevant),
        progress=False,
    )


def main() -> None:
    args, config = settings.read(settings.movielens_parser(__doc__, "sequences.py"))
    data = movielens_data.load(args.data)
    users, items = len(data.age), len(data.decade)
    pairs = [(data.user[rows], data.item[rows]) for rows in ranking.leave_one_out(data)]
    seen, relevant = (ranking.by_user(*pair, users) for pair in pairs)
    histories = np.split(pairs[0][1], np.flatnonzero(np.diff(pairs[0][0])) + 1)
    popular = ranking.most_popular(seen, items, TOP)
    print(f"{jax.device_count()} device(s), {len(pairs[0][0])} ratings to train on")
    print(f"popularity  {ranking.describe(popular, relevant)}", flush=True)
    train(config, histories, items, seen, relevant)


if __name__ == "__main__":
    main()

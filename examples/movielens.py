"""Train on MovieLens-100K; print the test error after every epoch, and the published errors.

Adagrad trains nine tables (one of them looked up by ragged bags) on the rows of each batch, and
optax trains a small network; all in one jitted step.
"""

from __future__ import annotations

import collections
import functools
import itertools
import time
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import movielens_data
import movielens_model as model
import numpy as np
import optax
import settings
from flax import nnx

import tpu_embed
from tpu_embed.data import Prefetcher

PUBLISHED = {"SVD": 0.934, "SVD++": 0.92}  # test RMSE, mean of 5 folds


def make_steps(engine, dense, graph, config, mean):
    """Return the jitted training step and prediction."""

    def loss_fn(params, activations, rating):
        return model.loss(nnx.merge(graph, params), activations, mean, rating, config)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def train(state, params, opt_state, batch, rating):
        activations = engine.lookup(state, batch)
        grads, activation_grads = jax.grad(loss_fn, argnums=(0, 1))(params, activations, rating)
        updates, opt_state = dense.update(grads, opt_state)
        state = engine.update(state, batch, activation_grads)
        return state, optax.apply_updates(params, updates), opt_state

    @jax.jit
    def rate(state, params, batch):
        activations = engine.lookup(state, batch)
        return model.predict(nnx.merge(graph, params), activations, mean).clip(1.0, 5.0)

    return train, rate


def draw(curve: list[float], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    axes.plot(range(1, len(curve) + 1), curve, marker="o", label=f"tpu_embed: {curve[-1]:.3f}")
    for (name, value), style in zip(PUBLISHED.items(), ("--", ":"), strict=True):
        axes.axhline(value, color="gray", linestyle=style, label=f"{name}, published: {value}")
    axes.set(xlabel="epoch", ylabel="test RMSE", title="MovieLens-100K, 80/20 split")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    options = settings.movielens_parser(__doc__, "movielens.py")
    options.add_argument("--plot", default="build/movielens.png", help="where to draw the curve")
    args, config = settings.read(options)

    data = movielens_data.load(args.data)
    train_rows, test_rows = data.split(config.seed)
    mean = float(data.rating[train_rows].mean())
    steps = config.epochs * (len(train_rows) // config.batch_size)

    # The tables: the schedule counts the steps of the engine.
    schedule = optax.cosine_decay_schedule(config.learning_rate, steps)
    adagrad = tpu_embed.optimizers.Adagrad(schedule, initial_accumulator_value=1e-6)
    engine = tpu_embed.EmbeddingEngine(model.feature_config(config, data), adagrad)
    state = engine.init(jax.random.key(config.seed))

    # The network: plain flax and optax.
    side = len(model.SIDE) * config.side_dim
    graph, params = nnx.split(model.Tower(side, config.hidden, rngs=nnx.Rngs(config.seed)))
    dense = optax.adam(optax.cosine_decay_schedule(config.dense_learning_rate, steps))
    everywhere = state.step.sharding  # as a step returns them, so that it is compiled only once
    params, opt_state = jax.device_put((params, dense.init(params)), everywhere)
    train, rate = make_steps(engine, dense, graph, config, mean)

    def chunks(rows):
        for start in range(0, len(rows) - config.batch_size + 1, config.batch_size):
            chunk = rows[start : start + config.batch_size]
            yield model.inputs(data, chunk), data.rating[chunk]

    def batches(rows):
        return Prefetcher(engine, chunks(rows))  # a thread places the next ones during a step

    # Place all batches once: the engine learns all shapes, so the step is compiled only once.
    (last,) = collections.deque(itertools.chain(batches(test_rows), batches(train_rows)), maxlen=1)
    engine.check_in_place(train, state, params, opt_state, *last)
    print(f"{jax.device_count()} device(s), {len(train_rows)} ratings to train on")
    rng, curve = np.random.default_rng(config.seed), []
    for epoch in range(1, config.epochs + 1):
        begin = time.perf_counter()
        for batch, rating in batches(rng.permutation(train_rows)):
            state, params, opt_state = train(state, params, opt_state, batch, rating)
        errors = [rate(state, params, batch) - rating for batch, rating in batches(test_rows)]
        curve.append(float(np.sqrt(np.mean(np.square(errors)))))
        print(f"epoch {epoch:2d}  test RMSE {curve[-1]:.4f}  {time.perf_counter() - begin:.1f} s")
    print("published test RMSE:", ", ".join(f"{k} {v}" for k, v in PUBLISHED.items()))
    draw(curve, Path(args.plot))
    print(f"the curve is in {args.plot}")


if __name__ == "__main__":
    main()

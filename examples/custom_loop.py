"""Write your own training loop: flax network, optax, tables with their own optimizers, one jit.

The clicks are drawn from made-up preferences. The loss falls from ln 2 = 0.693 towards 0.326, the
entropy of the click probabilities, which no model can beat.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig
from tpu_embed.data import Prefetcher
from tpu_embed.optimizers import Adam, RowWiseAdagrad

USERS, ITEMS, HISTORY, DIM = 500, 1_000, 8, 16


def feature_config() -> dict[str, FeatureConfig]:
    adagrad = RowWiseAdagrad(0.1, initial_accumulator_value=1e-6)
    users = TableConfig(USERS, DIM, name="users", optimizer=adagrad)
    items = TableConfig(ITEMS, DIM, name="items", combiner="mean")  # the engine's optimizer
    return {
        "user": FeatureConfig(users),
        "item": FeatureConfig(items),
        "history": FeatureConfig(items),  # the same table, one bag per example
    }


def clicks(batch_size: int, seed: int) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Yield batches without end: features, and labels float32 [B]."""
    rng = np.random.default_rng(seed)
    taste, style = rng.normal(size=(USERS, 4)), rng.normal(size=(ITEMS, 4))
    popular = 1.0 / np.arange(1, ITEMS + 1)
    popular /= popular.sum()
    while True:
        user = rng.integers(USERS, size=batch_size)
        shown = rng.choice(ITEMS, size=(batch_size, 1 + HISTORY), p=popular)
        history = np.where(rng.random((batch_size, HISTORY)) < 0.7, shown[:, 1:], -1)  # -1 pads
        score = 2.0 * (taste[user] * style[shown[:, 0]]).sum(-1)
        label = rng.random(batch_size) < 1.0 / (1.0 + np.exp(-score))
        features = {"user": user, "item": shown[:, 0], "history": history}
        yield features, label.astype(np.float32)


class Network(nnx.Module):
    """Map the activations of each example to one logit."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(4 * DIM, 64, rngs=rngs)
        self.last = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, acts: dict[str, jax.Array]) -> jax.Array:
        both = acts["user"] * acts["item"]
        x = jnp.concatenate([both, acts["user"], acts["item"], acts["history"]], axis=-1)
        return self.last(nnx.relu(self.first(x)))[:, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--devices", type=int, help="emulate this many CPU devices")
    args = parser.parse_args()
    if args.devices:  # before anything asks JAX for its devices
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)

    engine = tpu_embed.EmbeddingEngine(feature_config(), Adam(0.01))
    state = engine.init(jax.random.key(0))
    graph, params = nnx.split(Network(rngs=nnx.Rngs(0)))
    dense = optax.adamw(1e-3)
    everywhere = state.step.sharding  # as a step returns them, so that it is compiled only once
    params, opt_state = jax.device_put((params, dense.init(params)), everywhere)

    def loss_fn(params, acts, label):
        logit = nnx.merge(graph, params)(acts)
        return optax.sigmoid_binary_cross_entropy(logit, label).mean()

    # Tables, slots and parameters are donated: the step writes into the buffers it was given.
    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def train(state, params, opt_state, batch, label):
        acts = engine.lookup(state, batch)
        loss, grads = jax.value_and_grad(loss_fn, argnums=(0, 1))(params, acts, label)
        updates, opt_state = dense.update(grads[0], opt_state, params)
        state = engine.update(state, batch, grads[1])
        return state, optax.apply_updates(params, updates), opt_state, loss

    source, losses = clicks(args.batch_size, seed=1), []
    *_, seen = Prefetcher(engine, itertools.islice(source, 20))  # shows the shapes to come
    engine.check_in_place(train, state, params, opt_state, *seen)
    # A thread draws and places the next batches while the devices work on this one.
    with Prefetcher(engine, itertools.islice(source, args.steps)) as batches:
        progress = tqdm(batches, total=args.steps, unit="step")
        for step, (batch, label) in enumerate(progress):
            state, params, opt_state, loss = train(state, params, opt_state, batch, label)
            losses.append(loss)
            if step % 50 == 49:
                progress.set_postfix(loss=f"{np.mean(losses[-50:]):.4f}")
    part = max(1, args.steps // 10)
    print(f"loss {np.mean(losses[:part]):.4f} at first, {np.mean(losses[-part:]):.4f} at last")


if __name__ == "__main__":
    main()

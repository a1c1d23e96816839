"""Look each user up once, and many candidates beside: features with batch sizes of their own.

A request is one user and 32 candidates, of which the user picks one; the choices are drawn from
made-up preferences. The user's features are looked up, and the user's tower runs, once per request
and not once per candidate. Each device holds whole requests, so a candidate finds its user by an
index within the device: `jax.vmap` over the devices' parts, and nothing is gathered from others.

After training, `retrieval.top_k` finds the best of all items for a user. Printed beside what was
learned: how often the best candidate, by the true preferences, is what the user picked.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig, retrieval

USERS, ITEMS, HISTORY, CANDIDATES, DIM = 400, 1_000, 6, 32, 16


def feature_config() -> dict[str, FeatureConfig]:
    """Return the features: `user` and `history` once per request, `item` once per candidate."""
    users = TableConfig(USERS, DIM, name="users")
    items = TableConfig(ITEMS, DIM, combiner="mean", name="items")
    return {
        "user": FeatureConfig(users),
        "history": FeatureConfig(items),
        "item": FeatureConfig(items),
    }


class Requests:
    """Requests drawn from made-up preferences."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        truth = np.random.default_rng(0)
        self.taste, self.style = truth.normal(size=(USERS, 4)), truth.normal(size=(ITEMS, 4))

    def draw(self, requests: int) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        """Return features, the picked candidate of each request, and the best one.

        Returns:
          features: `user` [R], `history` [R, HISTORY], `item` [R * CANDIDATES], the candidates of
            one request after another's.
          picked: int [R], positions among the candidates of the request.
          best: int [R], the same of the candidate with the largest true score.
        """
        user = self.rng.integers(USERS, size=requests)
        shown = self.rng.integers(ITEMS, size=(requests, CANDIDATES))
        score = 2.0 * np.einsum("rd,rcd->rc", self.taste[user], self.style[shown])
        picked = np.argmax(score + self.rng.gumbel(size=score.shape), axis=1)
        # What the user liked before: the best of many items.
        seen = self.rng.integers(ITEMS, size=(requests, HISTORY, 20))
        liked = np.einsum("rd,rhnd->rhn", self.taste[user], self.style[seen]).argmax(-1)
        history = np.take_along_axis(seen, liked[..., None], axis=-1)[..., 0]
        features = {"user": user, "history": history, "item": shown.reshape(-1)}
        return features, picked, score.argmax(1)


def tower(params: dict, acts: dict[str, jax.Array]) -> jax.Array:
    """Return the vector of each request, `[requests, D]`."""
    return jnp.concatenate([acts["user"], acts["history"]], axis=-1) @ params["tower"]


def logits(params: dict, acts: dict[str, jax.Array], index: jax.Array) -> jax.Array:
    """Return one score per candidate of one device, `[candidates]`.

    Args:
      params: the user's tower.
      acts: `user` and `history` [requests, D], `item` [candidates, D].
      index: int32 [candidates], the request of each candidate, counted within the device.
    """
    return (tower(params, acts)[index] * acts["item"]).sum(-1)


def parts(tree, devices: int):
    """Return arrays `[devices, n, …]` of arrays `[devices * n, …]`: one part per device."""
    return jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), tree)


def arguments() -> argparse.Namespace:
    """Return the arguments; emulate devices if they are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--requests", type=int, default=256, help="per batch")
    parser.add_argument("--devices", type=int, help="emulate this many CPU devices")
    args = parser.parse_args()
    if args.devices:  # before anything asks JAX for its devices
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
    return args


def main() -> None:
    args = arguments()
    devices = jax.device_count()
    engine = tpu_embed.EmbeddingEngine(feature_config(), tpu_embed.optimizers.Adam(0.01))
    index = jnp.repeat(jnp.arange(args.requests // devices), CANDIDATES)

    def scores(params, acts):
        # One part per device, and `index` within it: no device reads another one's users.
        by_part = jax.vmap(logits, in_axes=(None, 0, None))(params, parts(acts, devices), index)
        return by_part.reshape(args.requests, CANDIDATES)

    def loss(params, acts, picked):
        return optax.softmax_cross_entropy_with_integer_labels(scores(params, acts), picked).mean()

    source = Requests(seed=1)
    trained = tpu_embed.fit(
        engine,
        loss,
        (source.draw(args.requests)[:2] for _ in range(args.steps)),
        model={"tower": np.tile(np.eye(DIM, dtype=np.float32), (2, 1))},
        optimizer=optax.adam(3e-3),
        report_every=50,
    )
    state, params = trained.state, trained.model

    features, picked, best = Requests(seed=2).draw(args.requests)
    acts = engine.lookup(state, engine.place(features))
    chosen = jax.jit(scores)(params, acts).argmax(1)
    hits = np.mean(chosen == picked), np.mean(best == picked)
    print(f"the pick is ranked first: {hits[0]:.3f}, by the true preferences {hits[1]:.3f}")

    # Serving: the best of all items, which are not looked up for it.
    liked = features["history"][:1]
    found = retrieval.top_k(engine, state, "items", tower(params, acts)[:1], 5, exclude=liked)
    print("user", features["user"][0], "gets", *found.ids[0])


if __name__ == "__main__":
    main()

"""The MovieLens model: rating ≈ mean + user bias + item bias + user · item + tower(side).

`feature_config` declares the tables, `inputs` makes one batch for them, and `predict` and `loss`
work on the activations.
"""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import movielens_data
import numpy as np
from flax import nnx

from tpu_embed import FeatureConfig, RaggedIds, TableConfig

SIDE = ("age", "decade", "gender", "genres", "occupation")


def feature_config(config: SimpleNamespace, data: movielens_data.MovieLens) -> dict:
    """Declare a vector and a bias per user and item, and a small vector per side value."""
    normal = jax.nn.initializers.normal(config.init_scale)
    users, items = len(data.age), len(data.decade)

    def feature(name: str, size: int, dim: int, initializer=normal) -> FeatureConfig:
        return FeatureConfig(TableConfig(size, dim, initializer=initializer, name=name))

    return {
        "user": feature("user", users, config.dim),
        "item": feature("item", items, config.dim),
        "user_bias": feature("user_bias", users, 1, jax.nn.initializers.zeros),
        "item_bias": feature("item_bias", items, 1, jax.nn.initializers.zeros),
        "age": feature("age", len(movielens_data.AGES) + 1, config.side_dim),
        "decade": feature("decade", movielens_data.DECADES, config.side_dim),
        "gender": feature("gender", 2, config.side_dim),
        "genres": feature("genres", len(movielens_data.GENRES), config.side_dim),
        "occupation": feature("occupation", int(data.occupation.max()) + 1, config.side_dim),
    }


def inputs(data: movielens_data.MovieLens, rows: np.ndarray) -> dict:
    """Return the features of the ratings at `rows`: one id per example, and a bag of genres."""
    user, item = data.user[rows], data.item[rows]
    genres = data.genres[item]
    there = genres >= 0
    # padded genres [[3, 5], [2, -1]] -> values [3, 5, 2] with row splits [0, 2, 3]
    splits = np.concatenate([[0], np.cumsum(there.sum(axis=1))])
    return {
        "user": user,
        "item": item,
        "user_bias": user,
        "item_bias": item,
        "age": data.age[user],
        "decade": data.decade[item],
        "gender": data.gender[user],
        "genres": RaggedIds(genres[there], splits),
        "occupation": data.occupation[user],
    }


class Tower(nnx.Module):
    """Map the side vectors of each example [B, inputs] to one number [B, 1]."""

    def __init__(self, inputs: int, hidden: int, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(inputs, hidden, rngs=rngs)
        self.second = nnx.Linear(hidden, hidden, rngs=rngs)
        small = nnx.initializers.normal(0.01)
        self.last = nnx.Linear(hidden, 1, kernel_init=small, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.second(nnx.relu(self.first(x)))))


def predict(tower: Tower, activations: dict, mean: float) -> jax.Array:
    """Return the predicted rating of each example, [B]."""
    side = jnp.concatenate([activations[name] for name in SIDE], axis=-1)
    bias = activations["user_bias"] + activations["item_bias"] + tower(side)
    return mean + bias[:, 0] + (activations["user"] * activations["item"]).sum(-1)


def loss(tower: Tower, activations: dict, mean: float, rating, config) -> jax.Array:
    """Return the mean squared error, plus an L2 term on the rows that each example looked up."""

    def square(name: str) -> jax.Array:
        return jnp.sum(activations[name] ** 2, axis=-1)

    decay = config.vector_decay * (square("user") + square("item"))
    decay += config.bias_decay * (square("user_bias") + square("item_bias"))
    return jnp.mean((predict(tower, activations, mean) - rating) ** 2 + decay)

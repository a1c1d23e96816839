"""The two-tower model: user and item tables, one tower each, softmax over the items of a batch.

`feature_config` declares the tables, and `inputs` makes one batch for them. `Towers` works on the
activations.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import movielens_data
from flax import nnx

from tpu_embed import FeatureConfig, TableConfig

USER, ITEM = ("user", "age", "gender", "occupation"), ("item", "decade", "genres")


def feature_config(config, data) -> dict:
    normal = jax.nn.initializers.normal(config.init_scale)
    sizes = {
        "user": (len(data.age), config.dim),
        "age": (len(movielens_data.AGES) + 1, config.side_dim),
        "gender": (2, config.side_dim),
        "occupation": (int(data.occupation.max()) + 1, config.side_dim),
        "item": (len(data.decade), config.dim),
        "decade": (movielens_data.DECADES, config.side_dim),
        "genres": (len(movielens_data.GENRES), config.side_dim),
    }
    return {
        name: FeatureConfig(TableConfig(*size, initializer=normal, name=name))
        for name, size in sizes.items()
    }


def inputs(data, user, item) -> dict:
    """Return one id per example, and a bag of genres padded with -1."""
    about_user = {"age": data.age, "gender": data.gender, "occupation": data.occupation}
    about_item = {"decade": data.decade, "genres": data.genres}
    return {
        "user": user,
        "item": item,
        **{name: column[user] for name, column in about_user.items()},
        **{name: column[item] for name, column in about_item.items()},
    }


class Towers(nnx.Module):
    """Map the activations of users and of items to vectors of length one."""

    def __init__(self, config, rngs: nnx.Rngs):
        def tower(inputs: int) -> nnx.Sequential:
            first = nnx.Linear(inputs, config.hidden, rngs=rngs)
            return nnx.Sequential(first, nnx.relu, nnx.Linear(config.hidden, config.dim, rngs=rngs))

        self.user = tower(config.dim + (len(USER) - 1) * config.side_dim)
        self.item = tower(config.dim + (len(ITEM) - 1) * config.side_dim)

    def __call__(self, activations: dict) -> tuple[jax.Array, jax.Array]:
        def vectors(tower, names):
            mapped = tower(jnp.concatenate([activations[name] for name in names], axis=-1))
            together = mapped + activations[names[0]]  # the towers correct the tables' own vectors
            norm = jnp.sqrt(jnp.sum(together**2, axis=-1, keepdims=True) + 1e-12)
            return together / norm

        return vectors(self.user, USER), vectors(self.item, ITEM)

"""Two towers on Gowalla: a user is an id and the places that the user has been to.

The tower of a user adds the user's vector and what two linear layers make of the mean of the
vectors of these places, as YoutubeDNN does with what was watched (Covington et al., "Deep neural
networks for YouTube recommendations", 2016). The tower of a place is its vector.
"""

from __future__ import annotations

import beside  # noqa: F401, finds the modules that examples share
import gowalla
import jax
import numpy as np
from flax import nnx

import tpu_embed
from tpu_embed import EmbeddingEngine, FeatureConfig, RaggedIds, TableConfig


class Tower(nnx.Module):
    """Map the vector of a user and the mean of places to a vector."""

    def __init__(self, config, rngs: nnx.Rngs):
        self.first = nnx.Linear(config.dim, config.hidden, rngs=rngs)
        self.second = nnx.Linear(config.hidden, config.dim, rngs=rngs)

    def __call__(self, found: dict) -> jax.Array:
        return found["user"] + self.second(nnx.relu(self.first(found["been"])))


def some_places(visits: gowalla.Visits, users: np.ndarray, most: int, rng) -> RaggedIds:
    """Return the places of each user, at most so many: places that stand one after another.

    They stand in a ring: of a b c d e and at most two, a b, b c, c d, d e or e a.
    """
    begin, count = visits.begin[users], visits.begin[users + 1] - visits.begin[users]
    kept = np.minimum(count, most)
    splits = np.concatenate([[0], np.cumsum(kept)])
    within = np.arange(splits[-1]) - np.repeat(splits[:-1], kept)
    ring = (np.repeat(rng.integers(count), kept) + within) % np.repeat(count, kept)
    return RaggedIds(visits.item[np.repeat(begin, kept) + ring], splits)


def prepare(config, visits: gowalla.Visits):
    """Return what `gowalla.main` asks for."""
    normal = jax.nn.initializers.normal(config.init_scale)
    users = TableConfig(visits.users, config.dim, initializer=normal, name="users")
    items = TableConfig(visits.items, config.dim, initializer=normal, name="items")
    tables = {"user": users, "been": items, "item": items, "drawn": items}
    features = {name: FeatureConfig(table) for name, table in tables.items()}
    adam = tpu_embed.optimizers.Adam(gowalla.learning_rate(config, visits))
    engine = EmbeddingEngine(features, adam)

    def loss(tower, found, ids):
        return gowalla.loss_of(config, tower(found), found, ids)

    def of_pairs(pairs, rng):
        users = visits.user[pairs]
        return {"user": users, "been": some_places(visits, users, config.longest, rng)}

    def of_users(users):
        return {"user": users, "been": RaggedIds.from_lists(visits.of(users))}

    source = gowalla.batches(config, visits, of_pairs)
    tower = Tower(config, nnx.Rngs(config.seed))
    return engine, tower, loss, source, of_users, lambda tower, found: tower(found)


if __name__ == "__main__":
    gowalla.main(__doc__, "towers_gowalla.py", prepare)

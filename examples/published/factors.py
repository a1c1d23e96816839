"""Matrix factorisation of Gowalla: a vector per user and per place, and sampled softmax."""

from __future__ import annotations

import beside  # noqa: F401, finds the modules that examples share
import gowalla
import jax

import tpu_embed
from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig


def prepare(config, visits: gowalla.Visits):
    """Return what `gowalla.main` asks for."""
    normal = jax.nn.initializers.normal(config.init_scale)
    users = TableConfig(visits.users, config.dim, initializer=normal, name="users")
    items = TableConfig(visits.items, config.dim, initializer=normal, name="items")
    tables = {"user": users, "item": items, "drawn": items}
    features = {name: FeatureConfig(table) for name, table in tables.items()}
    engine = EmbeddingEngine(
        features, tpu_embed.optimizers.Adam(gowalla.learning_rate(config, visits))
    )

    def loss(found, ids):
        return gowalla.loss_of(config, found["user"], found, ids)

    source = gowalla.batches(config, visits, lambda pairs, rng: {"user": visits.user[pairs]})
    return engine, None, loss, source, lambda users: {"user": users}, lambda _, x: x["user"]


if __name__ == "__main__":
    gowalla.main(__doc__, "factors_gowalla.py", prepare)

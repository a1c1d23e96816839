"""A small trained model, for the tests of what is exported."""

from collections import namedtuple
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed import FeatureConfig, TableConfig
from tpu_embed.io import export_model

ROOT = Path(__file__).resolve().parents[2]
FILMS = TableConfig(50, 8, combiner="sqrtn", name="films")
USERS = TableConfig(20, 8, name="users.v1/eu", dtype="bfloat16")
SMALL = TableConfig(20, 4, name="small")
FEATURES = {
    "user": FeatureConfig(USERS),
    "films": [FeatureConfig(FILMS), FeatureConfig(FILMS, max_sequence_length=3, on_bad_id="clip")],
    "small": FeatureConfig(SMALL, on_bad_id="drop"),
}


def batch(size, seed=0):
    """Return ids, weights and dense inputs of so many examples."""
    rng = np.random.default_rng(seed)
    films = [rng.integers(-1, 50, (size, 4)), rng.integers(-1, 50, (size, 5))]
    ids = {"user": rng.integers(-1, 20, size), "films": films}
    ids["small"] = rng.integers(-1, 20, (size, 2, 3))
    weights = {"user": None, "films": [rng.normal(size=(size, 4)).astype(np.float32), None]}
    dense = rng.normal(size=(size, 7)).astype(np.float32)
    return ids, weights | {"small": None}, dense


IDS, WEIGHTS, DENSE = batch(16)
KERNEL = np.random.default_rng(1).normal(size=(8 + 8 + 24 + 8 + 7, 6)).astype(np.float32)


def network(activations, dense):
    """Return what a model makes of activations: every one of them, and its own input."""
    bags, sequence = activations["films"]
    parts = [activations["user"], bags, sequence, activations["small"]]
    parts = [part.reshape(dense.shape[0], -1) for part in parts]
    hidden = jnp.concatenate([*parts, dense], axis=1) @ jnp.asarray(KERNEL)
    return {"score": jax.nn.sigmoid(hidden).sum(-1), "sequence": sequence}


Trained = namedtuple("Trained", "tables outputs")
"""An engine after training, and the outputs of its process."""


ONE = FeatureConfig(SMALL)
TABLES = {"small": np.ones((20, 4), np.float32)}


def export_one(path, model=lambda a: a, feature=ONE, ids=None, tables=None, **options):
    ids = jax.ShapeDtypeStruct((4, 3), np.int64) if ids is None else ids
    export_model(path, model, TABLES if tables is None else tables, feature, ids, **options)

"""The model of `stream.py`: a vector for each user and item, over a living or a fixed item table.

All that is trained stands in the tables. A score needs the sum of one row only, so it has the same
bits on every number of devices, and so have the curves.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
from stream_data import Impressions

import tpu_embed
from tpu_embed import DynamicVocabulary, FeatureConfig, TableConfig


def feature_config(config, vocabulary: DynamicVocabulary | None) -> dict[str, FeatureConfig]:
    """Return the features; without a vocabulary the item table is a fixed one."""
    normal, zeros = jax.nn.initializers.normal(config.init_scale), jax.nn.initializers.zeros
    users = TableConfig(config.users, config.dim, initializer=normal, name="users")
    # Zeros: an item that is new to the model is scored as an average one, with a row or without.
    items = TableConfig(
        config.rows, config.dim, initializer=zeros, vocabulary=vocabulary, name="items"
    )
    return {"user": FeatureConfig(users), "item": FeatureConfig(items)}


def logits(activations: dict[str, jax.Array]) -> jax.Array:
    """Return the logits [B]: user · item, a constant per user, and another one per item."""
    user, item = activations["user"], activations["item"]
    return (user * item).sum(axis=1) + user[:, 0] + item[:, 1]


def make_step(engine):
    """Return the jitted training step, which updates the state in place."""

    def loss_fn(activations, click):
        scores = logits(activations)
        return optax.sigmoid_binary_cross_entropy(scores, click).sum(), scores

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch, click):
        activations = engine.lookup(state, batch)
        gradients, scores = jax.grad(loss_fn, has_aux=True)(activations, click)
        return engine.update(state, batch, gradients), scores

    return step


class Learner:
    """A model that is trained, batch after batch.

    Args:
      config: the numbers of `configs/stream.py`.
      vocabulary: of the items. None: their names are hashed onto the rows of a fixed table.
    """

    def __init__(self, config, vocabulary: DynamicVocabulary | None) -> None:
        adagrad = tpu_embed.optimizers.Adagrad(
            config.learning_rate, initial_accumulator_value=config.initial_accumulator
        )
        self.config, self.feature_config = config, feature_config(config, vocabulary)
        self.engine = tpu_embed.EmbeddingEngine(self.feature_config, adagrad)
        self.state = self.engine.init(jax.random.key(config.seed))
        self.step = make_step(self.engine)
        # Names become keys of 63 bits for a dynamic vocabulary, row numbers for a fixed table.
        self.ids = None if vocabulary else config.rows

    def features(self, batch: Impressions) -> dict[str, np.ndarray]:
        """Return the features of a batch, which are still to be placed."""
        return {"user": batch.user, "item": tpu_embed.hash_ids(batch.item, self.ids)}

    def check(self, batch: Impressions) -> None:
        """Raise an error if a step would copy a table; nothing is learned."""
        key = jax.random.key(self.config.seed)
        placed = self.engine.place(self.features(batch))
        state, placed = self.engine.admit(self.engine.init(key), placed)
        self.engine.check_in_place(self.step, state, placed, batch.click)
        if self.engine.vocabularies is not None:
            self.state = self.engine.init(key)
            self.engine.vocabularies.rewind(self.state)  # as if there had been no batch

    def learn(self, batch: Impressions) -> np.ndarray:
        """Train on a batch; return its scores from before that, float32 [B]."""
        placed = self.engine.place(self.features(batch))
        self.state, placed = self.engine.admit(self.state, placed)
        self.state, scores = self.step(self.state, placed, batch.click)
        # Wait for them: many unfinished steps on emulated devices can stop for good.
        return np.asarray(scores)

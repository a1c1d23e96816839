"""The problem and the model of `beyond.py`: how good are the items of a bag, taken together?

An item's quality is planted; the table has to find it. Popular items come often, most items hardly
ever, and their rows are at home most of the time.
"""

from __future__ import annotations

import functools

import jax
import numpy as np

import tpu_embed
from tpu_embed import FeatureConfig, HostStorage, TableConfig


class Problem:
    """Bags of items and what they are worth.

    Args:
      config: the numbers of `configs/beyond.py`.
    """

    def __init__(self, config) -> None:
        rng = np.random.default_rng(config.seed)
        self._config = config
        self._qualities = rng.normal(size=config.rows).astype(np.float32)
        self._item_of_rank = rng.permutation(config.rows)
        self._shares = np.cumsum(1 / (np.arange(config.rows) + config.flatness))

    def batch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return items, int64 [B, bag], and the worth of each bag, float32 [B]."""
        config = self._config
        rng = np.random.default_rng((config.seed, number))
        drawn = rng.random((config.batch_size, config.bag)) * self._shares[-1]
        items = self._item_of_rank[np.searchsorted(self._shares, drawn)]
        noise = rng.normal(scale=config.noise, size=config.batch_size)
        return items, (self._qualities[items].mean(1) + noise).astype(np.float32)


class Learner:
    """A model that is trained, batch after batch.

    Args:
      config: the numbers of `configs/beyond.py`.
      storage: of the table; None: all of its rows are on the devices.
    """

    def __init__(self, config, storage: HostStorage | None) -> None:
        zeros = jax.nn.initializers.zeros
        items = TableConfig(
            config.rows, config.dim, initializer=zeros, name="items", storage=storage
        )
        adagrad = tpu_embed.optimizers.Adagrad(
            config.learning_rate, initial_accumulator_value=config.initial_accumulator
        )
        self.engine = tpu_embed.EmbeddingEngine(FeatureConfig(items), adagrad)
        self.state = self.engine.init(jax.random.key(config.seed))
        self._step = self._make_step()

    def _make_step(self):
        engine = self.engine

        def loss_fn(activations, worth):
            errors = (activations.sum(1) - worth) ** 2
            return errors.sum(), errors

        @functools.partial(jax.jit, donate_argnums=0)
        def step(state, batch, worth):
            activations = engine.lookup(state, batch)
            gradients, errors = jax.grad(loss_fn, has_aux=True)(activations, worth)
            return engine.update(state, batch, gradients), errors

        return step

    def learn(self, items: np.ndarray, worth: np.ndarray) -> np.ndarray:
        """Train on a batch; return the squared errors from before that, float32 [B]."""
        batch = self.engine.place(items)
        self.state, batch = self.engine.admit(self.state, batch)
        self.state, errors = self._step(self.state, batch, worth)
        # Wait for them: many unfinished steps on emulated devices can stop for good.
        return np.asarray(errors)

    def moved(self) -> int:
        """Return how many rows have been brought from home so far."""
        return self.engine.storage.counters["items"]["brought"] if self.engine.storage else 0

    def touched_rows(self) -> np.ndarray:
        """Return the rows of a thousand items, float32 [1000, D], wherever they are."""
        return self.engine.rows(self.state, "items", np.arange(1_000))

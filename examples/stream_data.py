"""A made-up stream of items that are born and die, shown to users, with known click probabilities.

Each item has a hidden quality, a hidden style and a popularity by Zipf's law; each user has a
hidden taste. Clicks are drawn from a logistic model of these, so the AUC of the true probabilities
can be printed, which a model exceeds only by chance. Items are named by strings, and nobody knows
beforehand which ones will come.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Impressions(NamedTuple):
    """A batch of B times that a user was shown an item."""

    user: np.ndarray  # int64 [B], row numbers
    item: list[str]  # B names
    click: np.ndarray  # float32 [B]: 1 a click, 0 none
    probability: np.ndarray  # float64 [B], of a click


class Stream:
    """The items and users of a whole run; batch k depends only on the config and k.

    Births are spread evenly over the batches. Lifetimes are exponential, so that births x lifetime
    items are alive in every batch, on average, and as many are there from the beginning.

    Args:
      config: the numbers of `configs/stream.py`.
    """

    def __init__(self, config) -> None:
        rng, self._config = np.random.default_rng(config.seed), config
        alive = config.births * config.lifetime
        items = alive + config.births * config.batches
        self._born = np.maximum(0, (np.arange(items) - alive) // config.births)  # a batch
        self._dies = self._born + rng.exponential(config.lifetime, items)
        self._weight = 1.0 / (rng.integers(alive, size=items) + config.flatness)
        self._quality = config.quality * rng.normal(size=items)
        # The product of a taste and a style then has the standard deviation `config.taste`.
        scale = (config.taste / config.hidden**0.5) ** 0.5
        self._style = scale * rng.normal(size=(items, config.hidden))
        self._taste = scale * rng.normal(size=(config.users, config.hidden))

    def __len__(self) -> int:
        """Return how many items there are in the whole run."""
        return len(self._born)

    def batch(self, number: int) -> Impressions:
        """Return the batch with this number, counted from 0."""
        config, rng = self._config, np.random.default_rng([self._config.seed, number])
        alive = np.flatnonzero((self._born <= number) & (number < self._dies))
        total = np.cumsum(self._weight[alive])
        drawn = rng.random(config.batch_size) * total[-1]
        item = alive[np.searchsorted(total, drawn, side="right")]
        user = rng.integers(config.users, size=config.batch_size)
        liking = (self._taste[user] * self._style[item]).sum(axis=1)
        probability = 1.0 / (1.0 + np.exp(-(config.bias + self._quality[item] + liking)))
        click = (rng.random(config.batch_size) < probability).astype(np.float32)
        return Impressions(user, [f"item-{n}" for n in item], click, probability)

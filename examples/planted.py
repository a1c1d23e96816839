"""Made-up clicks in the format of the Criteo data, for which the best possible AUC is known.

Ids follow Zipf's law. Labels are drawn from a logistic model with a hidden score per row and hidden
weights of the dense features. So the area under the ROC curve (AUC) of the true probabilities can
be computed, and a model can exceed it only by chance.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import multi_hot
import numpy as np
from dlrm_data import DENSE, Examples, Stored

from tpu_embed import hash_ids

EXPONENT = 1.05  # of Zipf's law
TABLE_STRENGTH, DENSE_STRENGTH, BIAS = 2.0, 0.5, -1.0  # of the logit: deviations, a constant
MEAN_COUNT = 10.0  # the mean of x, where a dense feature is log(x + 1)
LEVELS = 2**24  # number of different scores
HELD_OUT = 2**30  # test batches count from here
AUC_BATCHES = 2**40  # the batches of `best_auc` count from here
WEIGHTS = 2**41  # the random stream of the hidden weights


@dataclasses.dataclass(frozen=True)
class Planted:
    """Clicks for tables of V rows and bags of H ids; batch k depends only on seed, k and its size.

    Args:
      rows: V of each table.
      hots: H of each table.
      seed: the seed of scores, weights and examples.
    """

    rows: tuple[int, ...]
    hots: tuple[int, ...]
    seed: int = 0

    def batch(self, index: int, size: int) -> Examples:
        """Return batch `index`, which has `size` examples."""
        return self.batch_and_logits(index, size)[0]

    def batch_and_logits(self, index: int, size: int) -> tuple[Examples, np.ndarray]:
        """Return batch `index` and its true logits, float64 [B]."""
        rng = np.random.default_rng([self.seed, index])
        ids = np.stack([zipf(rng.random(size), rows) for rows in self.rows], axis=1)
        dense = np.log1p(rng.exponential(MEAN_COUNT, (size, DENSE))).astype(np.float32)
        logits = self.logits(dense, ids)
        label = (rng.random(size) < sigmoid(logits)).astype(np.float32)
        return Examples(label, dense, ids), logits

    def logits(self, dense: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Return the true logits, float64 [B], of dense features and single ids."""
        weights = np.random.default_rng([self.seed, WEIGHTS]).normal(size=DENSE + len(self.rows))
        of_dense = weights[:DENSE] * DENSE_STRENGTH / DENSE**0.5
        of_tables = weights[DENSE:] * TABLE_STRENGTH / len(self.rows) ** 0.5
        total = BIAS + (dense - np.log1p(MEAN_COUNT)) @ of_dense
        bags = multi_hot.hashed_bags(self)(ids)
        for table, (weight, name) in enumerate(zip(of_tables, sorted(bags), strict=True)):
            bag = bags[name]
            total += weight * self.scores(table, bag).sum(axis=1) / bag.shape[1] ** 0.5
        return total

    def scores(self, table: int, ids: np.ndarray) -> np.ndarray:
        """Return the hidden scores of rows: uniform, with mean 0 and standard deviation 1."""
        drawn = hash_ids(ids, LEVELS, seed=1_000 * (self.seed + 1) + table)
        return ((drawn + 0.5) / LEVELS - 0.5) * 12**0.5


def zipf(uniform: np.ndarray, rows: int) -> np.ndarray:
    """Return int32 ids in [0, rows); the probability of id i is ∝ ∫ x^-s dx from i + 1 to i + 2.

    The inverse of the integral maps `uniform` numbers in [0, 1) to ids, so no table is needed.
    """
    power = 1.0 - EXPONENT
    x = (1.0 + uniform * ((rows + 1.0) ** power - 1.0)) ** (1.0 / power)
    return np.clip(np.floor(x) - 1, 0, rows - 1).astype(np.int32)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-logits))


def expected_auc(probability: np.ndarray) -> float:
    """Return the AUC of the probabilities themselves, in expectation over the labels.

    It is Σ p_i (1 - p_j) [p_i > p_j] / Σ p_i (1 - p_j) over pairs i ≠ j; equal p count half.
    """
    values, which = np.unique(probability, return_inverse=True)
    click = np.bincount(which, probability, len(values))
    other = np.bincount(which, 1.0 - probability, len(values))
    itself = probability * (1.0 - probability)
    above = (click * (np.cumsum(other) - other)).sum()
    equal = (click * other).sum() - itself.sum()
    return float((above + equal / 2) / (click.sum() * other.sum() - itself.sum()))


def best_auc(planted: Planted, *, batches: int = 16, size: int = 16_384) -> tuple[float, float]:
    """Return the AUC of the true probabilities, and its standard error.

    These are the mean of `expected_auc` over independent batches, and its deviation / √batches.
    """
    areas = [
        expected_auc(sigmoid(planted.batch_and_logits(AUC_BATCHES + k, size)[1]))
        for k in range(batches)
    ]
    return float(np.mean(areas)), float(np.std(areas, ddof=1) / batches**0.5)


def sources(
    config, criteo: Path | None, size: int, *, tests: int
) -> tuple[Iterator[Examples], Iterator[Examples]]:
    """Return endless training batches, and `tests` test batches.

    Args:
      config: the workload.
      criteo: a directory with `train` and `test` from `criteo.py`; None makes clicks up.
      size: B.
      tests: how many test batches; the Criteo data may have fewer.
    """
    if criteo is None:
        clicks = Planted(config.rows, config.hots, config.seed)
        test = (clicks.batch(HELD_OUT + k, size) for k in range(tests))
        return (clicks.batch(k, size) for k in itertools.count()), test
    train, test = (Stored.open(criteo / part, config.rows) for part in ("train", "test"))
    epochs = (train.shuffled(size, seed=config.seed, epoch=k) for k in itertools.count())
    return itertools.chain.from_iterable(epochs), itertools.islice(test.in_order(size), tests)

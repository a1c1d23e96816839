"""Made-up clicks with a known best answer, in the form of the Criteo data.

Ids follow Zipf's law. A label is drawn from a logistic model over a hidden score of every row and
hidden weights of the dense features; so the area under the ROC curve that the true probabilities
reach is known, and no model beats it but by chance.
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
TABLE_STRENGTH, DENSE_STRENGTH, BIAS = 2.0, 0.5, -1.0  # of the logit: deviations, and a constant
MEAN_COUNT = 10.0  # of what a dense feature is the logarithm of
LEVELS = 2**24  # of a score
HELD_OUT = 2**30  # batches from here on are to test with
AUC_BATCHES = 2**40  # batches from here on are those of `best_auc`
WEIGHTS = 2**41  # the stream of the hidden weights


@dataclasses.dataclass(frozen=True)
class Planted:
    """Clicks for tables of V rows and bags of H ids; batch k depends on seed, k and its size.

    Args:
      rows: V of each table.
      hots: H of each table.
      seed: of scores, weights and examples.
    """

    rows: tuple[int, ...]
    hots: tuple[int, ...]
    seed: int = 0

    def batch(self, index: int, size: int) -> Examples:
        """Return batch `index`, `size` examples."""
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
        """Return the hidden scores of rows: uniform, mean 0, deviation 1."""
        drawn = hash_ids(ids, LEVELS, seed=1_000 * (self.seed + 1) + table)
        return ((drawn + 0.5) / LEVELS - 0.5) * 12**0.5


def zipf(uniform: np.ndarray, rows: int) -> np.ndarray:
    """Return ids int32 in [0, rows), id i as often as the integral of x^-s from i + 1 to i + 2.

    The integral has an inverse, so that `uniform` numbers in [0, 1) become ids without a table.
    """
    power = 1.0 - EXPONENT
    x = (1.0 + uniform * ((rows + 1.0) ** power - 1.0)) ** (1.0 / power)
    return np.clip(np.floor(x) - 1, 0, rows - 1).astype(np.int32)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-logits))


def expected_auc(probability: np.ndarray) -> float:
    """Return the area under the ROC curve of the probabilities themselves, labels averaged out.

    Σ p_i (1 - p_j) [p_i > p_j] / Σ p_i (1 - p_j) over pairs i ≠ j; equal ones count half.
    """
    values, which = np.unique(probability, return_inverse=True)
    click = np.bincount(which, probability, len(values))
    other = np.bincount(which, 1.0 - probability, len(values))
    itself = probability * (1.0 - probability)
    above = (click * (np.cumsum(other) - other)).sum()
    equal = (click * other).sum() - itself.sum()
    return float((above + equal / 2) / (click.sum() * other.sum() - itself.sum()))


def best_auc(planted: Planted, *, batches: int = 16, size: int = 16_384) -> tuple[float, float]:
    """Return the area that the true probabilities reach, and its standard error.

    The mean of `expected_auc` over independent batches, and their deviation over √batches.
    """
    areas = [
        expected_auc(sigmoid(planted.batch_and_logits(AUC_BATCHES + k, size)[1]))
        for k in range(batches)
    ]
    return float(np.mean(areas)), float(np.std(areas, ddof=1) / batches**0.5)


def sources(
    config, criteo: Path | None, size: int, *, tests: int
) -> tuple[Iterator[Examples], Iterator[Examples]]:
    """Return batches to train on, without end, and `tests` batches to test with.

    Args:
      config: the workload.
      criteo: holds directories `train` and `test` that `criteo.py` wrote; None: planted clicks.
      size: B.
      tests: how many batches; Criteo's may be fewer.
    """
    if criteo is None:
        clicks = Planted(config.rows, config.hots, config.seed)
        test = (clicks.batch(HELD_OUT + k, size) for k in range(tests))
        return (clicks.batch(k, size) for k in itertools.count()), test
    train, test = (Stored.open(criteo / part, config.rows) for part in ("train", "test"))
    epochs = (train.shuffled(size, seed=config.seed, epoch=k) for k in itertools.count())
    return itertools.chain.from_iterable(epochs), itertools.islice(test.in_order(size), tests)

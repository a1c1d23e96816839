"""Made-up clicks: reproducible, ids by Zipf's law, and the best AUC is the best."""

import dataclasses

import numpy as np
import pytest
from dlrm_cases import CONFIG, exact_auc, joined, planted

CLICKS = planted.Planted(CONFIG.scaled(1e-4, most_hot=4).rows, CONFIG.scaled(1, most_hot=4).hots)


def test_any_batch_by_index():
    first, again, other = CLICKS.batch(3, 100), CLICKS.batch(3, 100), CLICKS.batch(4, 100)
    assert [a.dtype for a in first] == [np.float32, np.float32, np.int32]
    assert [a.shape for a in first] == [(100,), (100, 13), (100, 26)]
    for a, b, c in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a != c).any()
    another = dataclasses.replace(CLICKS, seed=1)
    assert (another.batch(3, 100).ids != first.ids).any()
    assert (another.logits(first.dense, first.ids) != CLICKS.logits(first.dense, first.ids)).all()


def test_expected_auc_counts_pairs():
    p = np.random.default_rng(0).integers(1, 9, size=40) / 10
    pairs = [(i, j) for i in range(40) for j in range(40) if i != j]
    top = sum(p[i] * (1 - p[j]) * ((p[i] > p[j]) + (p[i] == p[j]) / 2) for i, j in pairs)
    expected = top / sum(p[i] * (1 - p[j]) for i, j in pairs)
    assert planted.expected_auc(p) == pytest.approx(expected, rel=1e-12)


def test_best_auc_is_that_of_the_true_logits():
    best, error = planted.best_auc(CLICKS, batches=8, size=4096)
    assert (best, error) == planted.best_auc(CLICKS, batches=8, size=4096)
    assert 0.65 < best < 0.9
    assert 0 < error < 0.005
    batches = [CLICKS.batch_and_logits(index, 4096) for index in range(8)]
    areas = [exact_auc(logits, examples.label) for examples, logits in batches]
    spread = np.std(areas, ddof=1) / len(areas) ** 0.5
    assert abs(np.mean(areas) - best) < 5 * np.hypot(spread, error)
    examples = joined([examples for examples, _ in batches])
    blurred = np.concatenate([logits for _, logits in batches])
    blurred += np.random.default_rng(0).normal(size=blurred.size)
    assert exact_auc(blurred, examples.label) < best - 0.02

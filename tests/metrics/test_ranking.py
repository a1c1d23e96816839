"""AUC, normalized entropy, recall and NDCG, against float64 over all pairs, and loops."""

import math
from functools import partial

import jax
import numpy as np
import pytest

from tpu_embed import metrics

EPS = float(np.finfo(np.float32).eps)


def wide_auc(scores, labels, weights):
    """Return the share of pairs that are in order, of all pairs, in float64."""
    pairs = np.outer(weights * labels, weights * (1 - labels))
    in_order = (1 + np.sign(scores[:, None].astype(np.float64) - scores)) / 2
    return (pairs * in_order).sum() / pairs.sum()


def wide_entropy(logits, labels, weights):
    mean, p = np.average(labels, weights=weights), 1 / (1 + np.exp(-logits.astype(np.float64)))
    losses = -np.log(np.where(labels, p, 1 - p))
    entropy = -mean * math.log(mean) - (1 - mean) * math.log(1 - mean)
    return np.average(losses, weights=weights) / entropy


def cases():
    """Yield scores, labels and weights, also in float64: with ties, without; with 0."""
    rng = np.random.default_rng(0)
    for levels in (2, 5, 1000):
        scores = rng.integers(-levels, levels, 40).astype(np.float32)
        labels = rng.integers(0, 2, 40)
        yield scores, labels, None, np.ones(40)
        for weights in (rng.integers(0, 3, 40), rng.random(40).astype(np.float32)):
            yield scores, labels, weights, weights.astype(np.float64)


auc = jax.jit(metrics.auc)
entropy = jax.jit(metrics.normalized_entropy)
RECALL, NDCG = metrics.recall_at_k, metrics.ndcg_at_k


def test_auc_is_that_of_all_pairs():
    for scores, labels, weights, wide in cases():
        # Sums of at most 40 numbers in pairs, 6 roundings, and a few divisions.
        wanted = pytest.approx(wide_auc(scores, labels, wide), abs=16 * EPS)
        assert float(auc(scores, labels, weights)) == wanted


def test_auc_of_many_examples_keeps_its_digits():
    """Counts are integers, so 50,000 examples are as exact as 40; float32 sums would not be."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, 50_000)
    scores = np.round(rng.normal(size=50_000) + labels, 2).astype(np.float32)
    values, which = np.unique(scores, return_inverse=True)
    upper = np.bincount(which, labels, len(values))
    lower = np.bincount(which, 1 - labels, len(values))
    wanted = (upper * (np.cumsum(lower) - lower / 2)).sum() / (upper.sum() * lower.sum())
    assert float(auc(scores, labels)) == pytest.approx(wanted, abs=40 * EPS)


def test_auc_where_it_is_not_defined_or_hidden():
    scores = np.array([0.5, 1.5, np.nan, 0.0, -0.0], np.float32)
    labels = np.array([0, 1, 1, 1, 0])
    assert math.isnan(auc(scores, labels))
    known = ~np.isnan(scores)
    assert float(auc(scores, labels, known)) == (1 + 1 + 0 + 0.5) / 4
    assert math.isnan(auc(scores[:2], np.ones(2, int)))
    assert math.isnan(auc(scores[:2], np.zeros(2, int)))
    assert float(auc(np.array([np.inf, -np.inf]), np.array([1, 0]))) == 1
    assert math.isnan(auc(np.zeros(0), np.zeros(0, int)))


def test_normalized_entropy_is_that_in_float64():
    for scores, labels, weights, wide in cases():
        logits = np.clip(scores, -8, 8) / 2
        wanted = pytest.approx(wide_entropy(logits, labels, wide), rel=32 * EPS)
        assert float(entropy(logits, labels, weights)) == wanted


def test_normalized_entropy_of_the_base_rate_is_one():
    labels = np.array([1, 0, 0, 0])
    logits = np.full(4, math.log(0.25 / 0.75))
    assert float(entropy(logits, labels)) == pytest.approx(1, rel=4 * EPS)
    hidden, padded = np.append(logits, [np.nan, 9]), np.append(labels, [-1, -1])
    mask = np.array([True] * 4 + [False] * 2)
    assert float(entropy(hidden, padded, mask)) == pytest.approx(1, rel=4 * EPS)
    assert math.isnan(entropy(logits, np.ones(4)))
    far = entropy(np.array([1e4, -1e4]), np.array([0, 1]))  # no overflow: the loss is 1e4
    assert float(far) == pytest.approx(1e4 / math.log(2), rel=4 * EPS)


def loop_places(ids, relevant, k, weights):
    recall = gain = total = 0.0
    for line, right, weight in zip(ids, relevant, weights, strict=True):
        items = {i for i in right.tolist() if i >= 0}
        if not items:
            continue
        places = [p for p, i in enumerate(line[:k].tolist()) if i in items]
        best = sum(1 / math.log2(p + 2) for p in range(min(k, len(items))))
        recall += weight * len(places) / len(items)
        gain += weight * sum(1 / math.log2(p + 2) for p in places) / best
        total += weight
    return recall / total, gain / total


@pytest.mark.parametrize("k", [1, 4, 7])
@pytest.mark.quick(1)
def test_recall_and_ndcg_are_those_of_a_loop(k):
    rng = np.random.default_rng(2)
    ids = np.stack([rng.permutation(20)[:7] for _ in range(9)])
    ids[:3, 5:] = -1  # where the line of relevant items is padded, too, no padding is a hit
    relevant = np.full((9, 6), -1)
    for b in range(1, 9):
        count = 2 if b < 3 else rng.integers(1, 7)
        relevant[b, :count] = rng.permutation(20)[:count]
    measures = jax.jit(lambda *given: [m(*given[:2], k, weights=given[2]) for m in (RECALL, NDCG)])
    for weights in (None, rng.random(9)):
        wanted = loop_places(ids, relevant, k, np.ones(9) if weights is None else weights)
        np.testing.assert_allclose(measures(ids, relevant, weights), wanted, atol=16 * EPS)
    assert math.isnan(RECALL(ids[:1], relevant[:1]))
    assert math.isnan(NDCG(ids, relevant, k, weights=np.zeros(9, bool)))


IDS, WIDE = np.zeros((2, 3), int), np.array([[2**32 + 4]])


REFUSED = [
    (r"auc: expected arrays \[N\] of one length", metrics.auc, ([0] * 3, [0, 0])),
    (r"weights \[2\]", metrics.normalized_entropy, ([0], [0], [0, 0])),
    ("entropy: logits: expected numbers", metrics.normalized_entropy, (["a"], [1])),
    ("labels: expected numbers", metrics.normalized_entropy, ([0.5], [1j])),
    ("weights: expected num", metrics.normalized_entropy, ([0.5], [1], [None])),
    (r"recall_at_k: expected ids \[B, K\]", RECALL, (IDS, IDS[:1])),
    ("k: expected an integer >= 1", RECALL, (IDS, IDS, 0)),
    (r"weights: expected shape \[2\]", partial(RECALL, weights=np.zeros(3)), (IDS, IDS)),
    ("ndcg_at_k: expected k of at most 3", NDCG, (IDS, IDS, 4)),
    ("relevant: expected integers", NDCG, (IDS, IDS.astype(float))),
    (r"ids: expected ids of 32 bits.*np\.uni", RECALL, (WIDE, [[4]])),
    ("relevant: expected ids of 32 bits", NDCG, ([[4]], WIDE)),
]


@pytest.mark.parametrize(("words", "measure", "given"), REFUSED)
def test_what_is_refused(words, measure, given):
    with pytest.raises((ValueError, TypeError), match=words):
        measure(*given)


def test_masked_ids_are_no_hits():
    keys = np.ma.masked_array(np.array([[0, 5]], np.uint64), [[True, False]])
    assert float(RECALL(keys, np.array([[0, 5]], np.uint8))) == 0.5


@pytest.mark.parametrize("kind", [pytest.param("Auto", marks=pytest.mark.whole), "Explicit"])
def test_sharded_examples_are_one_set(kind):
    scores, labels = np.arange(16, dtype=np.float32), np.arange(16) % 3 == 0
    kinds = (jax.sharding.AxisType[kind],)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",), axis_types=kinds)
    whole = auc(scores, labels)
    with jax.set_mesh(mesh):
        split = jax.device_put((scores, labels), jax.NamedSharding(mesh, jax.P("d")))
        assert jax.jit(metrics.auc)(*split) == whole


@pytest.mark.whole
@pytest.mark.parametrize("weight", [2**30, 2**33])
def test_large_weights_of_integers_are_not_cut(weight):
    scores, labels = np.arange(4, dtype=np.float32), np.array([0, 0, 1, 0])
    for figure in (metrics.auc, metrics.normalized_entropy):
        given = np.full(4, weight)
        assert float(figure(scores, labels, given)) == pytest.approx(float(figure(scores, labels)))
    large = np.array([2**40, 2**32 + 1])
    assert float(metrics.auc(large, np.array([1, 0]))) == 1


def test_a_label_that_is_nan_is_no_negative():
    scores, labels = np.arange(4, dtype=np.float32), np.array([0, 1, np.nan, 1])
    known = np.array([True, True, False, True])
    for figure in (auc, entropy):
        assert math.isnan(figure(scores, labels))
        assert float(figure(scores, labels, known)) == float(figure(scores[known], labels[known]))


def test_nothing_retrieved_and_nothing_relevant():
    none, right = np.zeros((1, 0), int), np.array([[3, -1]])
    assert float(RECALL(none, right)) == float(NDCG(none, right)) == 0
    assert math.isnan(NDCG(none, [[]]))
    assert math.isnan(RECALL(right, [[]]))

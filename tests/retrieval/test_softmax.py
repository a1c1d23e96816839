"""Sampled softmax losses and their gradients, against float64 loops; global under a sharded jit."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from softmax_cases import EPS, B, D, N, check, loop_sampled, single

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, optimizers, retrieval


def loop_in_batch(queries, candidates, log_q, ids, temperature):
    """Return losses `[B]`, one pair after the other."""
    ids = np.arange(B) if ids is None else ids
    log_q = log_q if log_q is None else (log_q, log_q)
    return loop_sampled(queries, candidates, candidates, (ids, ids), log_q, temperature)


def vectors(seed, *shape):
    """Return numbers in float64 with the digits of float32, of which products are up to 3.2."""
    numbers = 0.5 * np.random.default_rng(seed).normal(size=shape)
    return numbers.astype(np.float32).astype(np.float64)


IDS = np.array([3, 4, 3, -1, 5, 6, 4, 3])


@pytest.mark.parametrize("ids", [None, IDS], ids=["no ids", "ids"])
@pytest.mark.parametrize("with_log_q", [False, True])
@pytest.mark.quick(1)
def test_in_batch(ids, with_log_q):
    """Each step of the logits' float32 arithmetic rounds once."""
    log_q = np.float32(np.log(np.random.default_rng(0).random(B))) if with_log_q else None
    named = {"log_q": log_q, "temperature": 0.5}
    ours = functools.partial(retrieval.in_batch_softmax, candidate_ids=ids, **named)
    loop = functools.partial(loop_in_batch, ids=ids, **named)
    check(ours, loop, [vectors(1, B, D), vectors(2, B, D)], 16 * (D + 4) * EPS)


@pytest.mark.parametrize("own", [False, True], ids=["shared negatives", "own negatives"])
@pytest.mark.parametrize("lead", [(B,), (2, 3)], ids=["examples", "sequences"])
@pytest.mark.quick(1)
def test_sampled(lead, own):
    rng, bound = np.random.default_rng(4), 16 * (D + 4) * EPS
    drawn = (*lead, N) if own else (N,)
    arrays = [vectors(i, *shape, D) for i, shape in enumerate((lead, lead, drawn))]
    ids = [rng.integers(-1, 4, shape) for shape in (lead, drawn)]
    ids[0].flat[0] = ids[1].flat[0] = -1
    log_q = [np.log(rng.random(shape)).astype(np.float32) for shape in (lead, drawn)]
    names = "positive_ids", "negative_ids", "positive_log_q", "negative_log_q"
    named = dict(zip(names, (*ids, *log_q), strict=True))
    ours = functools.partial(retrieval.sampled_softmax, **named, temperature=0.5)
    loop = functools.partial(loop_sampled, ids=ids, log_q=log_q, temperature=0.5)
    check(ours, loop, arrays, bound)
    plain = loop_sampled(*arrays, ids=None, log_q=None, temperature=1.0)
    np.testing.assert_allclose(retrieval.sampled_softmax(*single(*arrays)), plain, atol=bound)


@pytest.mark.whole
def test_large_logits_are_stable():
    """No overflow, and losses near 0 keep their digits; a batch of one has nothing to lose."""
    queries, loss = jnp.eye(3, dtype=jnp.float32), retrieval.in_batch_softmax
    assert loss(queries * 1e4, queries * 1e4).tolist() == [0, 0, 0]
    turned = loss(queries * 1e4, jnp.roll(queries, 1, 0) * 1e4)
    np.testing.assert_allclose(turned, 1e8, rtol=1e-6)
    far = jnp.array([[100.0, 0.0], [0.0, 100.0]])
    near = loss(far, far * 0.01 + 10)  # all logits are near 1,000
    np.testing.assert_allclose(near, math.log1p(math.exp(-100)), atol=1e-6)
    assert np.isfinite(jax.grad(lambda q: loss(q, q).sum())(queries * 1e4)).all()
    assert loss(queries[:1], queries[:1]).tolist() == [0]
    of_padding = functools.partial(loss, candidate_ids=jnp.array([-1, -1, -1]))
    total, gradient = jax.value_and_grad(lambda q: of_padding(q, q).sum())(queries)
    assert total == 0
    assert not gradient.any()


@pytest.mark.parametrize("kind", ["Auto", pytest.param("Explicit", marks=pytest.mark.whole)])
def test_negatives_are_those_of_the_global_batch(kind):
    """Through an engine on 8 devices: activations are sharded, losses those of one device."""
    kinds = (jax.sharding.AxisType[kind],)
    devices = jax.sharding.Mesh(np.array(jax.devices()), ("d",), axis_types=kinds)
    table = TableConfig(30, D, name="item", combiner="sum")
    features = {name: FeatureConfig(table) for name in ("query", "item")}
    engine = EmbeddingEngine(features, optimizers.SGD(0.1), mesh=devices)
    state = engine.init(jax.random.key(0))
    ids = {"query": np.arange(B), "item": IDS + 10}
    batch = engine.place(ids)

    @jax.jit
    def losses(state, batch):
        found = engine.lookup(state, batch)
        assert found["query"].shape == (B, D)
        return retrieval.in_batch_softmax(found["query"], found["item"], candidate_ids=IDS)

    rows = np.asarray(engine.tables(state)["item"])
    alone = retrieval.in_batch_softmax(rows[ids["query"]], rows[ids["item"]], candidate_ids=IDS)
    with jax.set_mesh(devices):
        found = losses(state, batch)
    np.testing.assert_allclose(found, alone, atol=16 * (D + 4) * EPS)


def test_log_probabilities():
    counts, log_q = np.array([3, 0, 1]), retrieval.log_uniform_log_q
    np.testing.assert_allclose(np.exp(retrieval.counted_log_q(counts)), [0.75, 0.25, 0.25])
    every = np.exp(np.asarray(log_q(np.arange(50), 50), np.float64))
    wanted = [(math.log(i + 2) - math.log(i + 1)) / math.log(51) for i in range(50)]
    np.testing.assert_allclose(every, wanted, rtol=4e-6)
    assert every.sum() == pytest.approx(1, rel=1e-5)
    assert log_q(jnp.array([-1]), 50).tolist() == [0]
    assert log_q(jnp.array([127], jnp.uint8), 2**40) < 0
    known = jnp.array([49])  # to a jit that is given nothing
    np.testing.assert_array_equal(jax.jit(lambda: log_q(known, 50))(), log_q(known, 50))
    traced = jax.jit(lambda ids: log_q(ids, 50))(jnp.array([49, 50, 2**31 - 1]))
    np.testing.assert_array_equal(traced, [*log_q([49], 50), 0, 0])


REFUSED_IDS = [
    ("log_uniform_log_q: ids: expected integers", [0.5], 3),
    ("vocabulary_size: expected an integer >= 1", [0], 0),
    ("ids: expected ids below V = 50, got 50", [3, 50], 50),
    ("ids: expected ids below V = 50, got 50", jnp.array([50]), 50),
    ("ids: expected ids of 32 bits while x64 is off", [2**32], 2**40),
]


def test_log_probabilities_that_are_refused():
    for words, ids, size in REFUSED_IDS:
        with pytest.raises((ValueError, TypeError), match=words):
            retrieval.log_uniform_log_q(ids, size)
    for counts in (np.zeros(3), [-1, 3], [np.inf, 1], [np.nan, 1], []):
        with pytest.raises(ValueError, match=r"counted_log_q: counts: expected .*np.bincount"):
            retrieval.counted_log_q(counts)


Q, ONE, MANY = np.ones((3, D), np.float32), retrieval.in_batch_softmax, retrieval.sampled_softmax


REFUSED = [
    (r"candidates: expected the shape of queries, \[3, 4\]", ONE, (Q, Q[:2]), {}),
    (r"queries: expected shape \[B, D\], got \[4\]", ONE, (Q[0], Q[0]), {}),
    ("queries: expected floats, got int64", ONE, (np.ones((3, D), int), Q), {}),
    (r"log_q: expected shape \[3\]", ONE, (Q, Q), {"log_q": np.zeros(4)}),
    ("ids: expected shape", ONE, (Q, Q), {"candidate_ids": np.arange(4)}),
    ("ids: expected integers", ONE, (Q, Q), {"candidate_ids": np.ones(3)}),
    ("32 bits while.*np.unique", ONE, (Q, Q), {"candidate_ids": [1, 2, 2**40]}),
    ("positives: expected the shape of queries", MANY, (Q, Q[:2], Q), {}),
    (r"queries: expected shape \[B, D\] or more", MANY, (Q[0], Q[0], Q), {}),
    (r"expected shape \[K, 4\] or \[3, N, 4\]", MANY, (Q, Q, Q[0]), {}),
    ("negatives: expected", MANY, (Q, Q, np.ones((2, 5, D))), {}),
    ("got only positive_ids", MANY, (Q, Q, Q), {"positive_ids": np.arange(3)}),
    ("got only negative_log_q", MANY, (Q, Q, Q), {"negative_log_q": np.zeros(3)}),
]
# One temperature per query would divide the columns of the logits, not their rows.
REFUSED += [
    ("temperature: expected one number above 0", loss, arrays, {"temperature": temperature})
    for temperature in (0, -1.0, np.ones(3, np.float32))
    for loss, arrays in ((ONE, (Q, Q)), (MANY, (Q, Q, Q)))
]


@pytest.mark.parametrize(("words", "loss", "arrays", "named"), REFUSED)
def test_what_is_refused(words, loss, arrays, named):
    with pytest.raises((ValueError, TypeError), match=words):
        loss(*arrays, **named)


def test_padding_may_be_anything():
    """A tower may divide the zeros of padding by their length: NaN, which must not spread."""
    q = np.random.default_rng(5).normal(size=(3, D)).astype(np.float32)
    spoilt, right, drawn = q.copy(), np.array([1, 2, -1]), np.array([3, 4, -1])
    spoilt[2] = np.nan
    for loss, count, ids in (
        (ONE, 2, {"candidate_ids": right}),
        (MANY, 3, {"positive_ids": right, "negative_ids": drawn}),
    ):
        total = jax.grad(lambda *a, of=loss, ids=ids: of(*a, **ids).sum(), tuple(range(count)))
        slopes = jax.jit(total)
        for found, wanted in zip(slopes(*[spoilt] * count), slopes(*[q] * count), strict=True):
            np.testing.assert_array_equal(found, wanted)
            assert not np.any(found[2])


def test_without_negatives_the_right_item_is_certain():
    q = np.ones((3, D), np.float32)
    assert retrieval.sampled_softmax(q, q, q[:0]).tolist() == [0, 0, 0]
    ids = {"positive_ids": [5, 5, 5], "negative_ids": []}
    assert retrieval.sampled_softmax(q, q, q[:0], **ids).tolist() == [0, 0, 0]


def test_ids_of_several_kinds_are_compared():
    q = np.eye(3, D, dtype=np.float32)

    def of_ids(positive, negative):
        return MANY(q, q, q, positive_ids=positive, negative_ids=negative)

    wanted = of_ids([1, 2, -1], [1, 2, 3])
    for positive, negative in ((np.int64, np.uint64), (np.int8, np.int64), (np.int32, np.uint8)):
        found = of_ids(np.array([1, 2, -1], positive), np.array([1, 2, 3], negative))
        np.testing.assert_array_equal(found, wanted)
    with pytest.raises(TypeError, match="expected ids of one dtype, got int32 and uint32; cast"):
        of_ids([1, 2, -1], jnp.array([1, 2, 3], jnp.uint32))
    hidden = np.ma.masked_array([0, 1, 2], [True, False, False])
    found, wanted = (ONE(q, q, candidate_ids=ids) for ids in (hidden, [-1, 1, 2]))
    np.testing.assert_array_equal(found, wanted)

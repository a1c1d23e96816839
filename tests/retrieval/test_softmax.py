"""Sampled softmax losses and their gradients, against float64 loops; global under a sharded jit."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import mesh
from softmax_cases import EPS, B, D, N, check, loop_sampled, single

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, nn, retrieval
from tpu_embed import optimizers as o


def loop_in_batch(queries, candidates, log_q, ids, temperature):
    """Return losses `[B]`, one pair after the other."""
    losses = np.zeros(len(queries))
    for i in range(len(queries)):
        if ids is not None and ids[i] < 0:
            continue
        logits = [
            queries[i] @ c / temperature - (0 if log_q is None else log_q[j])
            for j, c in enumerate(candidates)
        ]
        counted = [
            j
            for j in range(len(queries))
            if j == i or ids is None or (ids[j] != ids[i] and ids[j] >= 0)
        ]
        losses[i] = math.log(sum(math.exp(logits[j] - logits[i]) for j in counted))
    return losses


def vectors(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


IDS = np.array([3, 4, 3, -1, 5, 6, 4, 3])


@pytest.mark.parametrize("given", ["nothing", "log_q", "ids", "both"])
@pytest.mark.quick(1)
def test_in_batch(given):
    """Logits are up to 3.2 in size here, and each step of their float32 arithmetic rounds once."""
    rng = np.random.default_rng(0)
    log_q = np.log(rng.random(B)) if given in ("log_q", "both") else None
    ids = IDS if given in ("ids", "both") else None
    arrays = 0.5 * vectors(1, B, D), 0.5 * vectors(2, B, D)
    short = None if log_q is None else log_q.astype(np.float32)
    log_q = None if log_q is None else short.astype(np.float64)
    arrays = [a.astype(np.float32).astype(np.float64) for a in arrays]
    ours = functools.partial(
        retrieval.in_batch_softmax, log_q=short, candidate_ids=ids, temperature=0.5
    )
    loop = functools.partial(loop_in_batch, log_q=log_q, ids=ids, temperature=0.5)
    check(ours, loop, arrays, 16 * (D + 4) * EPS)


@pytest.mark.parametrize("own", [False, True], ids=["shared negatives", "own negatives"])
@pytest.mark.parametrize("lead", [(B,), (2, 3)], ids=["examples", "sequences"])
@pytest.mark.quick(1)
def test_sampled(lead, own):
    rng = np.random.default_rng(4)
    drawn = (*lead, N) if own else (N,)
    arrays = [0.5 * vectors(i, *shape, D) for i, shape in enumerate((lead, lead, drawn))]
    arrays = [a.astype(np.float32).astype(np.float64) for a in arrays]
    ids = rng.integers(-1, 4, lead), rng.integers(-1, 4, drawn)
    ids[0].flat[0] = ids[1].flat[0] = -1
    log_q = [np.log(rng.random(shape)).astype(np.float32) for shape in (lead, drawn)]
    named = dict(zip(("positive_ids", "negative_ids"), ids, strict=True))
    named |= dict(zip(("positive_log_q", "negative_log_q"), log_q, strict=True))
    ours = functools.partial(retrieval.sampled_softmax, **named, temperature=0.5)
    wide = [a.astype(np.float64) for a in log_q]
    loop = functools.partial(loop_sampled, ids=ids, log_q=wide, temperature=0.5)
    check(ours, loop, arrays, 16 * (D + 4) * EPS)
    plain = functools.partial(loop_sampled, ids=None, log_q=None, temperature=1.0)
    np.testing.assert_allclose(
        retrieval.sampled_softmax(*single(*arrays)), plain(*arrays), atol=16 * (D + 4) * EPS
    )


@pytest.mark.whole
def test_large_logits_are_stable():
    """No overflow, and losses near 0 keep their digits; a batch of one has nothing to lose."""
    queries = jnp.eye(3, dtype=jnp.float32)
    losses = retrieval.in_batch_softmax(queries * 1e4, queries * 1e4)
    assert losses.tolist() == [0, 0, 0]
    turned = retrieval.in_batch_softmax(queries * 1e4, jnp.roll(queries, 1, 0) * 1e4)
    np.testing.assert_allclose(turned, 1e8, rtol=1e-6)
    far = jnp.array([[100.0, 0.0], [0.0, 100.0]])
    near = retrieval.in_batch_softmax(far, far * 0.01 + 10)  # all logits are near 1,000
    np.testing.assert_allclose(near, math.log1p(math.exp(-100)), atol=1e-6)
    gradient = jax.grad(lambda q: retrieval.in_batch_softmax(q, q).sum())(queries * 1e4)
    assert np.isfinite(gradient).all()
    assert retrieval.in_batch_softmax(queries[:1], queries[:1]).tolist() == [0]
    with_padding = jnp.array([-1, -1, -1])
    of_padding = functools.partial(retrieval.in_batch_softmax, candidate_ids=with_padding)
    loss, gradient = jax.value_and_grad(lambda q: of_padding(q, q).sum())(queries)
    assert loss == 0
    assert not gradient.any()


@pytest.mark.parametrize("kind", ["Auto", pytest.param("Explicit", marks=pytest.mark.whole)])
def test_negatives_are_those_of_the_global_batch(kind):
    """Through an engine on 8 devices: activations are sharded, losses those of one device."""
    kinds = (jax.sharding.AxisType[kind],)
    devices = jax.sharding.Mesh(np.array(jax.devices()), ("d",), axis_types=kinds)
    table = TableConfig(30, D, name="item", combiner="sum")
    features = {name: FeatureConfig(table) for name in ("query", "item")}
    engine = EmbeddingEngine(features, o.SGD(0.1), mesh=devices)
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


@pytest.mark.whole
def test_negatives_are_a_feature_of_a_layer():
    """Positives and shared negatives are looked up in one table by one layer."""
    from flax import nnx

    films = nn.Embed(30, D, optimizer=o.SGD(0.1), name="film", mesh=mesh(1), rngs=nnx.Rngs(0))
    ids = np.array([[1, 2, 3], [4, 5, -1]])
    negatives = np.array([6, 2, 7, 1])
    before = np.asarray(films.embedding, np.float64)

    def loss_fn(model):
        users = model(ids[:, :1]).mean(axis=1, keepdims=True)
        found = retrieval.sampled_softmax(
            jnp.broadcast_to(users, (2, 3, D)),
            model(ids),
            model(negatives),
            positive_ids=ids,
            negative_ids=negatives,
        )
        return found.sum() / 5

    loss, _ = nn.sparse_value_and_grad(loss_fn)(films)
    queries = np.repeat(before[ids[:, :1]], 3, axis=1)
    padded = np.concatenate([before, np.zeros((1, D))])
    arrays = queries, padded[ids], before[negatives]
    wanted = loop_sampled(*arrays, ids=(ids, negatives), log_q=None, temperature=1.0).sum() / 5
    assert float(loss) == pytest.approx(wanted, rel=1e-5)


def test_log_probabilities():
    counts = np.array([3, 0, 1])
    np.testing.assert_allclose(np.exp(retrieval.counted_log_q(counts)), [0.75, 0.25, 0.25])
    every = np.exp(np.asarray(retrieval.log_uniform_log_q(np.arange(50), 50), np.float64))
    wanted = [(math.log(i + 2) - math.log(i + 1)) / math.log(51) for i in range(50)]
    np.testing.assert_allclose(every, wanted, rtol=4e-6)
    assert every.sum() == pytest.approx(1, rel=1e-5)
    assert retrieval.log_uniform_log_q(jnp.array([-1]), 50).tolist() == [0]
    with pytest.raises(ValueError, match="counted_log_q: counts: expected counts"):
        retrieval.counted_log_q(np.zeros(3))
    with pytest.raises(TypeError, match="log_uniform_log_q: ids: expected integers"):
        retrieval.log_uniform_log_q([0.5], 3)
    with pytest.raises(ValueError, match="vocabulary_size: expected an integer >= 1"):
        retrieval.log_uniform_log_q([0], 0)
    for ids in ([3, 50], jnp.array([50])):
        with pytest.raises(ValueError, match="ids: expected ids below V = 50, got 50"):
            retrieval.log_uniform_log_q(ids, 50)
    with pytest.raises(ValueError, match="ids: expected ids of 32 bits while x64 is off"):
        retrieval.log_uniform_log_q([2**32], 2**40)
    assert retrieval.log_uniform_log_q(jnp.array([127], jnp.uint8), 2**40) < 0
    known = jnp.array([49])  # to a jit that is given nothing
    np.testing.assert_array_equal(
        jax.jit(lambda: retrieval.log_uniform_log_q(known, 50))(),
        retrieval.log_uniform_log_q(known, 50),
    )
    traced = jax.jit(lambda ids: retrieval.log_uniform_log_q(ids, 50))(
        jnp.array([49, 50, 2**31 - 1])
    )
    np.testing.assert_array_equal(traced, [*retrieval.log_uniform_log_q([49], 50), 0, 0])


def test_what_is_refused():
    q = np.ones((3, D), np.float32)

    def refused(kind, match, loss, *arrays, **named):
        with pytest.raises(kind, match=match):
            loss(*arrays, **named)

    one, many = retrieval.in_batch_softmax, retrieval.sampled_softmax
    refused(ValueError, r"candidates: expected the shape of queries, \[3, 4\]", one, q, q[:2])
    refused(ValueError, r"queries: expected shape \[B, D\], got \[4\]", one, q[0], q[0])
    refused(TypeError, "queries: expected floats, got int64", one, np.ones((3, D), int), q)
    refused(ValueError, r"log_q: expected shape \[3\]", one, q, q, log_q=np.zeros(4))
    refused(ValueError, r"candidate_ids: expected shape", one, q, q, candidate_ids=np.arange(4))
    refused(TypeError, "candidate_ids: expected integers", one, q, q, candidate_ids=np.ones(3))
    large = np.array([1, 2, 2**40])
    refused(ValueError, "32 bits while x64 is off.*np.unique", one, q, q, candidate_ids=large)
    refused(ValueError, r"positives: expected the shape of queries", many, q, q[:2], q)
    refused(ValueError, r"queries: expected shape \[B, D\] or more", many, q[0], q[0], q)
    refused(ValueError, r"negatives: expected shape \[K, 4\] or \[3, N, 4\]", many, q, q, q[0])
    refused(ValueError, r"negatives: expected", many, q, q, np.ones((2, 5, D)))
    refused(ValueError, "got only positive_ids", many, q, q, q, positive_ids=np.arange(3))
    refused(ValueError, "got only negative_log_q", many, q, q, q, negative_log_q=np.zeros(3))


def test_padding_may_be_anything():
    """A tower may divide the zeros of padding by their length: NaN, which must not spread."""
    q = np.random.default_rng(5).normal(size=(3, D)).astype(np.float32)
    spoilt, right, drawn = q.copy(), np.array([1, 2, -1]), np.array([3, 4, -1])
    spoilt[2] = np.nan

    def one(a, b):
        return retrieval.in_batch_softmax(a, b, candidate_ids=right).sum()

    def many(a, b, c):
        ids = {"positive_ids": right, "negative_ids": drawn}
        return retrieval.sampled_softmax(a, b, c, **ids).sum()

    for loss, count in ((one, 2), (many, 3)):
        gradients = jax.grad(loss, argnums=tuple(range(count)))
        for found, wanted in zip(
            gradients(*[spoilt] * count), gradients(*[q] * count), strict=True
        ):
            np.testing.assert_array_equal(found, wanted)
            assert not np.any(found[2])


def test_without_negatives_the_right_item_is_certain():
    q = np.ones((3, D), np.float32)
    assert retrieval.sampled_softmax(q, q, q[:0]).tolist() == [0, 0, 0]
    ids = {"positive_ids": [5, 5, 5], "negative_ids": []}
    assert retrieval.sampled_softmax(q, q, q[:0], **ids).tolist() == [0, 0, 0]


def test_ids_of_several_kinds_are_compared():
    q = np.eye(3, D, dtype=np.float32)
    wanted = retrieval.sampled_softmax(q, q, q, positive_ids=[1, 2, -1], negative_ids=[1, 2, 3])
    for positive, negative in ((np.int64, np.uint64), (np.int8, np.int64), (np.int32, np.uint8)):
        ids = np.array([1, 2, -1], positive), np.array([1, 2, 3], negative)
        named = {"positive_ids": ids[0], "negative_ids": ids[1]}
        np.testing.assert_array_equal(retrieval.sampled_softmax(q, q, q, **named), wanted)
    keys = jnp.array([1, 2, 3], jnp.uint32)
    with pytest.raises(TypeError, match="expected ids of one dtype, got int32 and uint32; cast"):
        retrieval.sampled_softmax(q, q, q, positive_ids=[1, 2, -1], negative_ids=keys)
    hidden = np.ma.masked_array([0, 1, 2], [True, False, False])
    found = retrieval.in_batch_softmax(q, q, candidate_ids=hidden)
    np.testing.assert_array_equal(found, retrieval.in_batch_softmax(q, q, candidate_ids=[-1, 1, 2]))


@pytest.mark.parametrize("temperature", [0, -1.0, np.ones(3, np.float32)])
def test_a_temperature_is_one_number_above_zero(temperature):
    """One per query would divide the columns of the logits, not their rows."""
    q = np.ones((3, D), np.float32)
    with pytest.raises(ValueError, match=r"temperature: expected one number above 0.*divide"):
        retrieval.in_batch_softmax(q, q, temperature=temperature)
    with pytest.raises(ValueError, match="temperature: expected one number above 0"):
        retrieval.sampled_softmax(q, q, q, temperature=temperature)


@pytest.mark.parametrize("counts", [[-1, 3], [np.inf, 1], [np.nan, 1], []])
def test_counts_are_finite_and_not_negative(counts):
    with pytest.raises(ValueError, match=r"counts: expected counts.*got.*np.bincount"):
        retrieval.counted_log_q(counts)

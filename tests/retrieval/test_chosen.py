"""Softmax over negatives that each query chooses among rows that are looked up once."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import mesh
from softmax_cases import EPS, B, D, N, check, loop_sampled, single

import tpu_embed
from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, optimizers, retrieval

K = 6
BOUND = 16 * (D + 4) * EPS


def arrays_of(lead, seed=0):
    """Return queries and the rows of K negatives, in float64 with the digits of float32."""
    rng = np.random.default_rng(seed)
    return [np.float64(np.float32(0.5 * rng.normal(size=(*n, D)))) for n in (lead, (K,))]


def numbers_of(lead, seed=1):
    """Return what is chosen, the right items, and ids and log probabilities of both sides."""
    rng = np.random.default_rng(seed)
    chosen, right = rng.integers(-1, K, (*lead, N)), rng.integers(0, K, lead)
    items = np.array([4, 7, 4, -1, 2, 9])  # two rows of one item, and padding
    own = np.where(rng.random(lead) < 0.2, -1, items[right])
    own.flat[0], chosen.flat[-1] = -1, chosen.flat[-2]
    log_q = [np.log(rng.random(shape)).astype(np.float32) for shape in (lead, K)]
    return chosen, right, (own, items), log_q


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def loop(queries, rows, *, chosen, right, ids, log_q, score, temperature):
    """Return the losses of a loop over each query's own rows."""
    if score == "cosine":
        queries, rows = unit(queries), unit(rows)
    ids = ids[0], np.where(chosen < 0, -1, ids[1][chosen])
    log_q = log_q[0], log_q[1][chosen]
    return loop_sampled(queries, rows[right], rows[chosen], ids, log_q, temperature)


@pytest.fixture
def small_parts(monkeypatch):
    """Products of two queries at a time, so that 7 queries are padded to 8."""
    monkeypatch.setattr("tpu_embed.retrieval.softmax.PRODUCT_NUMBERS", 2 * K)
    monkeypatch.setattr("tpu_embed.retrieval.softmax.LEAST_QUERIES", 2)


@pytest.mark.parametrize(("score", "by_index"), [("dot", False), ("cosine", True)])
@pytest.mark.parametrize("lead", [(7,), (2, 5)], ids=["examples", "replicas"])
@pytest.mark.quick(2)
def test_each_query_has_the_negatives_it_chooses(small_parts, lead, score, by_index):
    chosen, right, ids, log_q = numbers_of(lead)
    names = "positive_ids", "negative_ids", "positive_log_q", "negative_log_q"
    named = dict(zip(names, (*ids, *log_q), strict=True)) | {"chosen": chosen}
    how = {"score": score, "temperature": 0.5}

    def ours(queries, rows):
        positives = right if by_index else rows[right]
        return retrieval.sampled_softmax(queries, positives, rows, **named, **how)

    wanted = partial(loop, chosen=chosen, right=right, ids=ids, log_q=log_q, **how)
    check(ours, wanted, arrays_of(lead), BOUND)


def test_without_a_choice_and_without_ids_all_rows_are_negatives(small_parts):
    right = np.arange(7) % K

    def wanted(queries, rows):
        return loop_sampled(queries, rows[right], rows, None, None, 1.0)

    check(lambda q, rows: retrieval.sampled_softmax(q, right, rows), wanted, arrays_of((7,)), BOUND)


def test_products_are_not_there_as_a_whole():
    """Neither C K numbers nor C N D, with the gradient: 64 queries at a time."""
    size, rows, chosen = 4096, 200_000, 8
    kinds = [((1, size, D), np.float32), ((rows, D), np.float32)]
    kinds += [((1, size, chosen), np.int32), ((1, size), np.int32)]

    def loss(queries, negatives, which, right):
        return retrieval.sampled_softmax(queries, right, negatives, chosen=which).sum()

    operands = [jax.ShapeDtypeStruct(*kind) for kind in kinds]
    text = str(jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(*operands))
    found = re.findall(r"[a-z]+[0-9]+\[([0-9,]+)\]", text)
    largest = max(np.prod([int(n) for n in shape.split(",")]) for shape in found)
    assert largest == 64 * rows


def test_an_index_that_is_no_row_is_never_silent():
    """Known ones are refused; inside a jit the loss of the query is NaN, unless it is padding."""
    queries, rows = single(*arrays_of((4,)))
    ids = {"positive_ids": np.array([4, 7, 2, -1]), "negative_ids": np.arange(K)}
    loss = partial(retrieval.sampled_softmax, queries)
    right, chosen = np.array([0, 1, K, -1]), np.tile(np.arange(N), (4, 1))
    chosen[1, 2] = chosen[3, 1] = 2**30
    with pytest.raises(ValueError, match=r"positives: expected indices below .* K = 6, got 6"):
        loss(right, rows)
    with pytest.raises(ValueError, match=r"chosen: expected indices below .* got 1073741824"):
        jax.jit(lambda rows: loss(right % K, rows, chosen=chosen))(rows)

    @jax.jit
    def traced(right, chosen):
        def total(rows, temperature):
            losses = loss(right, rows, chosen=chosen, temperature=temperature, **ids)
            return losses.sum(), losses

        return jax.grad(total, (0, 1), has_aux=True)(rows, jnp.float32(1))

    _, losses = traced(right, chosen)
    assert np.isnan(losses).tolist() == [False, True, True, False]
    assert losses[3] == 0
    right[2], chosen[1, 2] = 3, -1  # what is left is of padding
    spoilt, (right[3], chosen[3]) = traced(right, chosen), (0, 0)
    jax.tree.map(np.testing.assert_array_equal, spoilt, traced(right, chosen))
    assert np.isfinite(spoilt[0][0]).all()


@cache
def train(devices, mapped):
    """Return loss and table of a step over the events of histories: what is next in each?"""
    items, rng = 40, np.random.default_rng(3)
    table = TableConfig(items, D, name="item", combiner="sum")
    features = {"history": FeatureConfig(table, jagged=True), "item": FeatureConfig(table)}
    histories = [rng.integers(items, size=n) for n in (3, 1, 4, 0, 2, 5, 2, 3)]
    ids = {"history": tpu_embed.RaggedIds.from_lists(histories), "item": np.arange(items)}
    engine = EmbeddingEngine(features, optimizers.SGD(0.1), mesh=mesh(devices))
    state, batch = engine.init(jax.random.key(0)), engine.place(ids)
    events, splits = np.concatenate(histories), ids["history"].row_splits
    own, which = (
        tpu_embed.data.place_values(engine, batch, "history", values, splits).values
        for values in (events, rng.integers(items, size=(len(events), 3)))
    )

    def losses(history, rows, own, which):
        # The right item of an event is the next one of its history, if there is one.
        positives, follows = (jnp.roll(x, -1, -1) for x in (own, history.segment_ids))
        there = (follows == history.segment_ids) & history.valid
        there &= jnp.arange(there.shape[-1]) < there.shape[-1] - 1
        ids = {"positive_ids": jnp.where(there, positives, -1), "negative_ids": jnp.arange(items)}
        return retrieval.sampled_softmax(history.values, positives, rows, chosen=which, **ids)

    @jax.jit
    def step(state, batch, own, which):
        values, rebuild = tpu_embed.split_activations(engine.lookup(state, batch))

        def total(values):
            found = rebuild(values)
            loss = jax.vmap(losses, (0, None, 0, 0)) if mapped else losses
            return loss(found["history"], found["item"], own, which).sum()

        loss, gradients = jax.value_and_grad(total)(values)
        return loss, engine.update(state, batch, gradients)

    loss, state = step(state, batch, own, which)
    return float(loss), np.asarray(engine.tables(state)["item"])


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.quick(1)
def test_events_of_jagged_histories_on_eight_devices(mapped):
    """By `jax.vmap` over the replicas or without: the losses and gradients of one device."""
    (alone, table), (loss, table_of_eight) = train(1, True), train(8, mapped)
    assert alone > 5
    assert loss == pytest.approx(alone, rel=1e-5)
    np.testing.assert_allclose(table_of_eight, table, atol=1e-6)


def test_cosines_of_a_batch():
    """Also of `in_batch_softmax`, and of rows of their own for each query."""
    queries, rows = arrays_of((B,))[0], arrays_of((B,), seed=5)[0]
    own = np.stack([rows, rows[::-1]], axis=1)  # [B, 2, D]
    for loss, given in (
        (retrieval.in_batch_softmax, (queries, rows)),
        (retrieval.sampled_softmax, (queries, rows, own)),
    ):
        wanted = jax.jit(partial(loss, temperature=0.5))(*single(*map(unit, given)))
        found = jax.jit(partial(loss, score="cosine", temperature=0.5))(*single(*given))
        np.testing.assert_allclose(found, wanted, atol=BOUND)
        with pytest.raises(ValueError, match=r"score: expected 'dot' \| 'cosine', got"):
            loss(*given, score="angle")


Q, ROWS = np.ones((3, D), np.float32), np.ones((K, D), np.float32)
WHICH = np.zeros((3, N), int)


REFUSED = [
    (r"chosen: expected shape \[3, 5\], got \[2, 5\]", Q, ROWS, WHICH[:2]),
    ("chosen: expected shape", Q, ROWS, WHICH[:, 0]),
    ("chosen: expected integers", Q, ROWS, WHICH + 0.5),
    (r"shape \[K, 4\], got \[3, 6, 4\]", Q, np.stack([ROWS] * 3), WHICH),
    (r"positives: expected shape \[3\], got \[3, 5\]", WHICH, ROWS, None),
    ("positives: expected floats, got bool", Q > 0, ROWS, None),
]


@pytest.mark.parametrize(("words", "positives", "negatives", "chosen"), REFUSED)
def test_what_is_refused(words, positives, negatives, chosen):
    with pytest.raises((ValueError, TypeError), match=words):
        retrieval.sampled_softmax(Q, positives, negatives, chosen=chosen)

"""`TPUEmbedding` admits batches of keys by itself, in the order of its queue, pipelined or not."""

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import mesh
from living_cases import KEY, assert_same, configs, draw, engine, gradients, initial_row, whole
from oracle_vocabulary import VocabularyOracle

from tpu_embed import DynamicVocabulary, EmbeddingEngine, FeatureConfig, TableConfig, TPUEmbedding
from tpu_embed import optimizers as o
from tpu_embed.data import Prefetcher

STEPS = 7


def embedding(**options):
    return TPUEmbedding(configs(), o.Adam(0.125), mesh=mesh(2), seed=KEY, **options)


def step(made, gradient=0):
    """Dequeue a batch and update with gradients that are all one number; return its rows."""
    activations = jax.tree.map(np.asarray, made.dequeue())
    made.apply_gradients(jax.tree.map(lambda a: np.full(a.shape, gradient, a.dtype), activations))
    return activations


@functools.cache
def expected(ahead):
    """Return what a loop over an engine gives, with and without a batch of delay."""
    made = engine(lookahead=ahead)
    state, waiting, seen = made.init(jax.random.key(KEY)), [], []
    for number in range(STEPS + ahead):
        if number < STEPS:
            state, batch = made.admit(state, made.place(draw(number)))
            waiting.append((batch, made.lookup(state, batch)))
        if number >= ahead:
            batch, activations = waiting.pop(0)
            seen.append(jax.tree.map(np.asarray, activations))
            state = made.update_in_place(state, batch, gradients(activations, number - ahead))
    return whole(made, state), seen


@pytest.mark.parametrize("prefetched", [False, True])
@pytest.mark.parametrize("pipelined", [0, 1])
@pytest.mark.quick(1)
def test_a_queue_does_what_a_loop_does(pipelined, prefetched):
    made, seen = embedding(pipeline_execution_with_tensor_core=bool(pipelined)), []
    batches = (draw(number) for number in range(STEPS))
    batches = iter(Prefetcher(made.engine, batches, depth=2)) if prefetched else batches
    for _ in range(2):
        made.enqueue(next(batches))
    for number in range(STEPS):
        activations = made.dequeue()
        seen.append(jax.tree.map(np.asarray, activations))
        made.apply_gradients(gradients(activations, number))
        for batch in itertools.islice(batches, 1):
            made.enqueue(batch)
    tables, activations = expected(pipelined)
    jax.tree.map(np.testing.assert_array_equal, seen, activations)
    assert_same(whole(made.engine, made.state), tables)


def test_what_enqueue_refuses_leaves_the_maps_as_they_were():
    made = embedding()
    made.build({"bags": 8, "one": 4, "seen": 4, "user": 4})
    made.enqueue(draw(0))
    maps = made.engine.vocabularies
    keys = len(maps)
    with pytest.raises(ValueError, match="the size it was built with"):
        made.enqueue({**draw(1), "one": np.arange(16)})
    assert (maps.placed, len(maps)) == (1, keys)
    skipped, late = made.engine.place(draw(1)), made.engine.place(draw(2))
    with pytest.raises(ValueError, match="the batch of step 2, got that of step 3"):
        made.enqueue(late)
    made.enqueue(skipped)
    made.enqueue(late)
    with pytest.raises(ValueError, match="the batch of step 4, got that of step 2"):
        made.enqueue(skipped)
    assert made.waiting == 3


def test_threads_enqueue_in_the_order_in_which_they_place():
    made = embedding()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(made.enqueue, map(draw, range(4))))
    for _ in range(4):
        step(made)
    assert made.state.vocabulary["map_version"][0] == 4


def test_loading_keeps_the_maps_and_the_queue():
    made = embedding()
    for number in range(2):
        made.enqueue(draw(number))
    step(made)
    tables, slots = made.retrieve()
    made.load(tables, slots)
    step(made)
    assert made.engine.vocabularies.admitted == 2
    # Rows can be set by key: keys say which row each has.
    _, rows = made.engine.vocabularies.keys("items")
    made.load({"items": np.zeros_like(tables["items"])})
    made.state = made.engine.set_rows(made.state, "items", rows[:1], np.ones((1, 4)))
    table = np.asarray(made.engine.tables(made.state)["items"])
    assert np.flatnonzero(table.sum(axis=1)).tolist() == rows[:1].tolist()


def test_another_state_must_be_of_the_step_of_the_maps():
    made = embedding()
    first = jax.tree.map(jnp.copy, made.state)
    made.enqueue(draw(0))
    step(made)
    with pytest.raises(ValueError, match="the newest state, of step 1"):
        made.state = first
    ordinary = EmbeddingEngine({"u": configs()["user"]}, o.Adam(0.1), mesh=mesh(2))
    with pytest.raises(ValueError, match="state"):
        made.state = ordinary.init(jax.random.key(0))


CAPACITY = 6
SMALL = TableConfig(CAPACITY, 2, name="t", vocabulary=DynamicVocabulary())


def small(pipelined=False, **options):
    """Return an embedding of a few rows on one device, with plain SGD."""
    options |= {"mesh": mesh(1), "pipeline_execution_with_tensor_core": pipelined}
    return TPUEmbedding(FeatureConfig(SMALL), o.SGD(1.0), **options)


def enqueue(made, *batches, training=True):
    for keys in batches:
        made.enqueue(np.array(keys), training=training)


def first_rows(*keys, seed=0):
    return [initial_row(SMALL, key, seed=seed) for key in keys]


@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.quick(1)
def test_new_keys_after_an_invalid_state_are_drawn_with_its_random_key(readable):
    made = small()
    made.state = made.engine.init(jax.random.key(5))
    enqueue(made, [1, 2])
    step(made)
    lost = made.state.tables if readable else made.state
    jax.tree.map(lambda array: array.delete(), lost)
    made.load({"t": np.zeros((CAPACITY, 2), np.float32)})
    enqueue(made, [3, 4])
    # Otherwise only the seed of the embedding is known.
    np.testing.assert_array_equal(made.dequeue(), first_rows(3, 4, seed=5 if readable else 0))
    assert made.state.vocabulary["map_version"][0] == 2


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.quick(1)
def test_an_update_reaches_the_rows_of_its_own_keys_only(pipelined):
    """Batches of 4 keys in 6 rows: every row changes hands again and again, with updates due."""
    made = small(pipelined, seed=KEY)
    batches = np.random.default_rng(0).integers(0, 12, (40, 4))
    oracle = VocabularyOracle(CAPACITY, waiting=4 * CAPACITY, lookahead=int(pipelined))
    values, unseen = {}, 0
    enqueue(made, *batches[:3])
    for number, batch in enumerate(batches):
        rows, new, _ = oracle.take(batch.tolist())
        values |= {key: initial_row(SMALL, key) for key, _ in new}
        unseen += sum(rows[key] < 0 for key in batch.tolist())
        for key, row in zip(batch.tolist(), step(made, gradient=1), strict=True):
            assert row.any() == (rows[key] >= 0)
            if rows[key] >= 0:
                values[key] = values[key] - np.float32(1)
        enqueue(made, *batches[number + 3 : number + 4])
    assert oracle.counters["evicted"] > 20
    assert (unseen > 0) == pipelined  # rows of the batch before may not be taken then
    table = np.asarray(made.embedding_tables[SMALL])
    for key, row in zip(*made.engine.vocabularies.keys("t"), strict=True):
        np.testing.assert_allclose(table[row], values[int(key)], rtol=1e-6)  # sums of duplicates


def test_batches_in_the_queue_are_forgotten_when_the_maps_are_rewound():
    made = small(pipelined=True)
    enqueue(made, [1, 2], [3, 4], [5, 6])
    made.engine.vocabularies.rewind(made.state)  # the first batch is admitted: it was looked up
    with pytest.warns(UserWarning, match="got 2 from before, now forgotten"):
        enqueue(made, [7, 8])
    for _ in range(2):
        assert step(made).all()
    assert made.engine.vocabularies.keys("t")[0].tolist() == [1, 2, 7, 8]
    enqueue(made, [9, 9], [9, 8])
    made.engine.vocabularies.rewind(made.state)
    with pytest.warns(UserWarning, match="got 1 from before, now forgotten"):
        made.dequeue()


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_lookup_in_the_queue_is_lost_with_the_batches_before_it(pipelined):
    made = small(pipelined)
    maps = made.engine.vocabularies
    enqueue(made, [1, 2])
    enqueue(made, [2, 1], training=False)  # of step 1
    if pipelined:  # the first batch is admitted, and stays
        enqueue(made, [3, 4])
        enqueue(made, [3, 4], training=False)  # of step 2, which is undone
    maps.rewind(made.state)
    placed = made.engine.place(np.array([5, 6]))
    with pytest.warns(UserWarning, match="got 2 from before, now forgotten"):
        made.enqueue(placed)
    found = []
    while made.waiting:
        found.append(np.asarray(made.dequeue()))
        if made.dequeued is not None:
            made.apply_gradients(np.zeros((2, 2), np.float32))
    expected = [[1, 2], [2, 1], [5, 6]] if pipelined else [[5, 6]]
    np.testing.assert_array_equal(found, [first_rows(*keys) for keys in expected])
    assert maps.admitted == maps.placed == len(expected) - pipelined


def test_a_lookup_in_the_queue_is_lost_if_another_batch_is_admitted_in_place_of_its_own():
    made = small()
    enqueue(made, [1, 2])
    enqueue(made, [1, 2], training=False)  # of step 1, which is undone
    made.engine.vocabularies.rewind(made.state)
    state, _ = made.engine.admit(made.state, made.engine.place(np.array([5, 6])))
    with pytest.warns(UserWarning, match="got 2 from before, now forgotten"):
        made.state = state
    assert made.waiting == 0


def test_a_lookup_whose_rows_will_be_other_keys_is_refused_before_it_is_enqueued():
    made = small()
    for keys in ([1, 2, 3], [4, 5, 6]):
        enqueue(made, keys)
        step(made)
    place = made.engine.place
    early, late = (place(np.array([key] * 3), training=False) for key in (1, 4))
    enqueue(made, [7, 8, 9])  # in the place of 1 2 3
    with pytest.raises(ValueError, match="rows that may be other keys'"):
        made.enqueue(early, training=False)
    made.enqueue(late, training=False)
    step(made)
    np.testing.assert_array_equal(made.dequeue(), first_rows(4, 4, 4))


def test_a_batch_is_used_as_it_was_placed():
    made = small()
    place = made.engine.place
    with pytest.raises(ValueError, match="expected a batch to be admitted, got one placed with"):
        made.enqueue(place(np.array([1, 2]), training=False))
    made.enqueue(place(np.array([1, 2])), training=False)  # its keys are admitted all the same
    enqueue(made, [2, 3])
    rows = np.asarray(made.dequeue())
    np.testing.assert_array_equal(rows, first_rows(1, 2))
    with pytest.raises(RuntimeError, match="training=False"):
        made.apply_gradients(rows)
    step(made)
    assert made.engine.vocabularies.admitted == 2


def test_tables_are_loaded_where_the_maps_were():
    feature = FeatureConfig(TableConfig(50, 2, name="t", vocabulary=DynamicVocabulary()))
    one, two = (TPUEmbedding(feature, o.Adagrad(0.5), mesh=mesh(1)) for _ in range(2))
    for first in range(3):
        one.enqueue(np.arange(8) + first)
        one.apply_gradients(one.dequeue())
    tables, slots = one.retrieve()
    two.engine.vocabularies.load_state(one.engine.vocabularies.state())
    with pytest.raises(RuntimeError, match="the newest state of these maps"):
        two.load(tables)  # the slots would be those of rows that nobody has trained
    two.load(tables, slots)
    np.testing.assert_array_equal(two.retrieve()[0]["t"], tables["t"])

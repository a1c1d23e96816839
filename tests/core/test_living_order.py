"""Batches, states and maps that do not belong together are refused; thrown away ones undone."""

import copy
import dataclasses
import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import living_cases as cases
import numpy as np
import pytest
from living_cases import ONES, assert_same, ids, initial_row, maps_of, simple

import tpu_embed
from tpu_embed import FeatureConfig, RaggedIds, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.data import Prefetcher
from tpu_embed.vocabulary import DynamicVocabulary
from tpu_embed.vocabulary.timeline import FOREVER


def begun(*batches, **options):
    """Return an engine of `simple`, and its state after the admission of batches of these keys."""
    made, state = simple(**options)
    return made, admitted(made, state, *batches)


def admitted(made, state, *batches):
    for keys in batches:
        state, _ = made.admit(state, made.place(ids(*keys)))
    return state


def copied(state):
    return jax.tree.map(jnp.copy, state)


def test_a_batch_that_is_not_admitted_is_refused(refused):
    (other, _), (made, state) = simple(lookahead=1), simple(lookahead=1)
    step, lookup = jax.jit(lambda *args: other.update(*args, ONES)), jax.jit(other.lookup)
    batch = made.place(ids(5, 6))
    # In a jit while tracing: the loop does not begin.
    for call, *more in ((made.lookup,), (made.update, ONES), (step,), (lookup,)):
        refused("give every batch to admit first", call, state, batch, *more)
    state, batch = made.admit(state, batch)
    assert np.isfinite(lookup(state, batch)["x"]).all()
    # The program is traced with another engine, but with its own states and batches it is right.
    assert int(step(state, batch).counters["refused_batches"]) == 0


def test_batches_are_admitted_once_each_in_placing_order_to_the_newest_state(refused):
    made, state = simple()
    older = copied(state)
    first, second = made.place(ids(5, 6)), made.place(ids(6, 7))
    refused("got the one of step 2", made.admit, state, second)
    state, once = made.admit(state, first)
    refused(r"the batch of step 2, .*, got the one of step 1", made.admit, state, first)
    assert made.admit(state, once)[0] is state  # only looked at: it has been admitted
    state, _ = made.admit(state, second)
    assert state.vocabulary["map_version"][0] == 2
    with pytest.raises(ValueError, match="a state of step 0 while 2 was admitted before"):
        made.admit(older, made.place(ids(7, 8)))


def test_a_pipelined_batch_never_writes_into_another_keys_row(refused):
    """With lookahead 1, batch k is updated after batch k + 1 was admitted, and no later."""
    made, state = simple(capacity=4, lookahead=1)
    step, lookup = jax.jit(lambda *args: made.update(*args, ONES)), jax.jit(made.lookup)
    batches = []
    for keys in ((1, 2), (3, 4), (5, 6)):
        state, batch = made.admit(state, made.place(ids(*keys)))
        batches.append(batch)
    # The third batch had to take the rows of the first, whose update is too late now.
    assert made.vocabularies.keys("t")[0].tolist() == [5, 6, 3, 4]
    refused("rows that may be other keys'", made.update, state, batches[0], ONES)
    before = np.asarray(made.tables(state)["t"])
    late = step(state, batches[0])
    assert (int(late.step), int(late.counters["refused_batches"])) == (0, 1)
    np.testing.assert_array_equal(made.tables(late)["t"], before)
    np.testing.assert_array_equal(lookup(state, batches[0])["x"], np.full((2, 2), np.nan))
    in_time = made.update(state, batches[1], ONES)
    np.testing.assert_array_equal(made.tables(in_time)["t"] - before, [[0, 0]] * 2 + [[-1, -1]] * 2)


def test_a_lookup_sees_the_admitted_step_whatever_was_placed_ahead(refused):
    made, state = begun((1, 2), capacity=2)
    ahead = [made.place(ids(3, 1)), made.place(ids(4, 5))]
    batch = made.place(ids(1, 2, 3, 4, 5), training=False)
    known = [initial_row(made.structure.tables[0], key) for key in (1, 2)]
    np.testing.assert_array_equal(made.lookup(state, batch)["x"], [*known, *np.zeros((3, 2))])
    state, _ = made.admit(state, ahead[0])  # 2 goes, 3 comes
    for call in (made.lookup, made.admit):
        refused("place it again", call, state, batch)
    only_1 = made.place(ids(1, 1), training=False)
    state, _ = made.admit(state, ahead[1])
    refused("place it again", made.lookup, state, only_1)


def test_rewind_takes_the_newest_state_or_a_first_one(refused):
    made, first = simple()
    older = copied(first)
    admitted(made, first, (1, 2), (2, 3))
    steps = older.vocabulary["map_version"].at[0].set(1)
    old = dataclasses.replace(older, vocabulary={**older.vocabulary, "map_version": steps})
    refused("the newest state, of step 2", made.vocabularies.rewind, old)
    made.vocabularies.rewind(older)
    assert (len(made.vocabularies), made.vocabularies.placed) == (0, 0)
    _, batch = made.admit(older, made.place(ids(9, 9)))
    assert batch.valid_steps.tolist() == [1, 1, made.vocabularies.now[1]]
    assert made.vocabularies.now[1] != made.vocabularies.first_history


def test_a_batch_that_place_refuses_leaves_the_maps_as_they_were(refused):
    made, _ = simple(admit_after=2)
    spec = made.place(ids(7, 1)).spec
    before = maps_of(made)
    bag, no_weight = (RaggedIds(np.array(x), [0, 1, 2]) for x in ([7, 8], [np.nan, 1.0]))
    refused("finite", made.place, {"x": bag}, {"x": no_weight})
    refused("integer", made.place, {"x": np.array([1.5, 2])}, error=TypeError)
    refused("x is missing|y is not", made.place, {"y": np.array([1, 2])})
    refused("one spec per kind of batch", made.place, ids(7, 8, 9), None, spec)
    made.place(ids(1, 2), training=False)  # one that is only looked up teaches them nothing, too
    assert_same(maps_of(made), before)
    made.place(ids(7, 1))
    assert made.vocabularies.placed == 2
    made = cases.engine(4)
    refused("positive multiple of 4", made.place, {**cases.draw(0), "one": np.arange(6)})
    assert (len(made.vocabularies), made.vocabularies.placed) == (0, 0)


def test_threads_that_place_leave_a_map_that_some_order_gives():
    made, state = simple(capacity=64)
    with ThreadPoolExecutor(4) as threads:
        batches = [*threads.map(lambda key: made.place(ids(key, 99)), range(20))]
    for batch in sorted(batches, key=lambda batch: batch.keys.steps[0]):
        state, _ = made.admit(state, batch)
    assert state.vocabulary["map_version"][0] == 20
    assert len(made.vocabularies) == 21


def test_a_prefetcher_places_in_the_order_in_which_the_loop_asks():
    made, other = cases.engine(), cases.engine()
    state = made.init(jax.random.key(cases.KEY))
    with Prefetcher(made, map(cases.draw, range(6)), depth=3) as batches:
        for step, batch in enumerate(batches):
            looked = made.place(cases.draw(50), training=False)
            state, _ = cases.train_on(made, state, batch, step)
            assert looked.valid_steps[0] == step
    there, _ = cases.train(other, other.init(jax.random.key(cases.KEY)), 6)
    assert_same(cases.whole(made, state), cases.whole(other, there))


def test_nobody_waits_for_a_lookup_that_is_not_placed_yet():
    (made, state), more = simple(), threading.Event()

    def source():
        yield ids(1, 2)
        more.wait(60)

    with Prefetcher(made, source(), training=False) as looked_up, ThreadPoolExecutor(1) as thread:
        next(looked_up)
        batch = thread.submit(made.place, ids(1, 2)).result(timeout=20)
        more.set()
    made.admit(state, batch)


def test_a_prefetcher_that_is_closed_early_is_rewound():
    made, state = simple(capacity=8)
    with Prefetcher(made, (ids(n, n) for n in range(9)), depth=3) as batches:
        for batch in batches:
            state, batch = made.admit(state, batch)
            if batch.valid_steps[0] == 2:
                break
    assert made.vocabularies.placed > 2
    made.vocabularies.rewind(state)
    assert made.vocabularies.keys("t")[0].tolist() == [0, 1]
    made.admit(state, made.place(ids(7, 7)))


def test_engines_share_maps(refused):
    made, state = begun((1, 2))
    features, maps = {"y": FeatureConfig(made.structure.tables[0])}, made.vocabularies
    share = functools.partial(tpu_embed.EmbeddingEngine, features, o.SGD(1.0), vocabularies=maps)
    other = share(mesh=cases.mesh(1))
    looked = other.lookup(state, other.place({"y": np.array([2, 3])}, training=False))["y"]
    expected = initial_row(made.structure.tables[0], 2), [0, 0]
    np.testing.assert_array_equal(looked, expected)
    refused("maps of the engine's tables", cases.engine, vocabularies=maps, lookahead=None)
    refused("leave lookahead out", share, lookahead=1)


def test_what_knows_no_keys_is_refused_with_the_remedy(refused):
    made, state = simple()
    for call in (made.lookup, jax.jit(made.lookup), lambda *args: made.update(*args, ONES)):
        refused(r"batch = engine\.place\(features\)", call, state, ids(1, 2))
    refused("admit the batch first", jax.jit(made.admit), state, made.place(ids(1, 2)))
    refused("share the maps", copy.deepcopy, made, error=TypeError)
    assert copy.copy(made) is made
    refused("give what place returned", made.admit, state, ids(1, 2))
    ordinary = cases.engine(features={"user": cases.configs()["user"]})
    assert ordinary.vocabularies is None
    state = ordinary.init(jax.random.key(0))
    batch = ordinary.place({"user": cases.draw(0)["user"]})
    assert ordinary.admit(state, batch) == (state, batch)


def test_states_keep_their_kind_of_random_key():
    made, _ = simple()
    for key in (jax.random.PRNGKey(cases.KEY), jax.random.key(cases.KEY, impl="rbg")):
        state = made.init(key)
        state, batch = made.admit(state, made.place(ids(3, 4)))
        rows = made.lookup(state, batch)["x"]
        assert np.abs(rows).min() > 0
        if "threefry2x32" in state.vocabulary:
            np.testing.assert_array_equal(rows[0], initial_row(made.structure.tables[0], 3))
        made.vocabularies.rewind(made.init(key))


def test_initializers_that_look_at_row_numbers_are_refused(refused):
    for one in (tpu_embed.RowIdInitializer(), lambda key, shape, dtype, shard_info: 0.0):
        living = {"initializer": one, "vocabulary": DynamicVocabulary()}
        refused("must not depend on the row number", TableConfig, 4, 2, **living)
    refused("capacity", TableConfig, 1, 2, vocabulary=DynamicVocabulary(unseen="shared"))


# -- Batches that are thrown away, and maps that are loaded ----------------------------------------


@pytest.mark.parametrize("evict", ["lru", "none"])
def test_a_batch_that_was_thrown_away_reads_and_writes_nothing(evict, refused):
    made, state = simple(evict=evict, lookahead=1)
    lookup, step = jax.jit(made.lookup), jax.jit(lambda *args: made.update(*args, ONES))
    lost = made.place(ids(7, 7))
    made.vocabularies.rewind(state)
    for _ in range(2):
        state, batch = made.admit(state, made.place(ids(9, 9)))
        refused("expected an admitted batch", made.lookup, state, lost)
        refused("expected an admitted batch", made.update, state, lost, ONES)
        for call in (lookup, step, lookup.lower, step.lower):
            refused("outside of the jit; lower and", call, state, lost)
    assert np.abs(lookup(state, batch)["x"]).min() > 0


def test_maps_that_are_loaded_again_end_what_was_placed_before(refused):
    made, state = begun((1, 2))
    kept, at_1 = made.vocabularies.state(), copied(state)
    state, old = made.admit(state, made.place(ids(3, 4)))
    made.vocabularies.load_state(kept)
    state, new = made.admit(at_1, made.place(ids(5, 6)))
    step, history, _ = state.vocabulary["map_version"].tolist()
    assert (step, new.valid_steps.tolist()) == (2, [2, 2, history])
    assert history == made.vocabularies.now[1] != old.valid_steps[2]
    refused("placed since the maps were loaded", made.lookup, state, old)
    row = initial_row(made.structure.tables[0], 5)
    np.testing.assert_array_equal(made.lookup(state, new)["x"][0], row)


def test_a_lookup_that_a_state_from_before_a_load_renews_is_of_that_state(refused):
    made, first = simple(capacity=2)
    state = admitted(made, copied(first), (1, 2))
    looked = made.place(ids(1, 2), training=False)
    made.vocabularies.rewind(first)
    new, _ = made.admit(first, made.place(ids(3, 4)))
    state, fresh = made.admit(state, looked)
    made.lookup(state, fresh)
    refused("placed since the maps were loaded", made.lookup, new, fresh)


def test_a_lookup_that_is_placed_while_maps_are_loaded_is_refused(monkeypatch, refused):
    made, state = simple(capacity=2)
    kept, first = made.vocabularies.state(), copied(state)
    made.admit(state, made.place(ids(1, 2)))
    maps, loaded, found = made.vocabularies, threading.Event(), threading.Event()
    find_all = maps.find_all

    def find_slowly(*args):
        rows = find_all(*args)
        found.set()
        assert loaded.wait(60)
        return rows

    monkeypatch.setattr(maps, "find_all", find_slowly)
    with ThreadPoolExecutor(1) as thread:
        looked = thread.submit(made.place, ids(1, 2), training=False)
        assert found.wait(60)
        maps.load_state(kept)
        monkeypatch.undo()
        loaded.set()
    state, _ = made.admit(first, made.place(ids(3, 4)))  # step 1 again, of another history
    refused("placed since the maps were loaded", made.lookup, state, looked.result())


def test_a_batch_that_a_jit_returns_does_not_tell_of_the_one_it_was_traced_with(refused):
    """The structure of what a program returns is that of its first trace."""
    made, state = begun((1, 2), (3, 4), capacity=4)
    same = jax.jit(lambda batch: batch)
    same(made.place(ids(3, 4), training=False))
    looked = same(made.place(ids(1, 2), training=False))
    row = initial_row(made.structure.tables[0], 1)
    np.testing.assert_array_equal(made.lookup(state, looked)["x"][0], row)
    state, _ = made.admit(state, made.place(ids(5, 6)))  # in the place of 1 and 2
    refused("place it again", made.lookup, state, looked)
    ahead = [same(made.place(ids(*keys))) for keys in ((7, 8), (9, 10))]
    for batch in reversed(ahead):
        refused("place it again", made.admit, state, batch)


def test_a_first_state_forgets_all_keys_also_after_maps_of_step_0_were_loaded():
    made, state = simple()
    made.vocabularies.load_state(made.vocabularies.state()._replace(history=1))
    made.place(ids(1, 2))
    made.vocabularies.rewind(state)
    assert (made.vocabularies.placed, made.vocabularies.now) == (0, made.vocabularies.at(0))
    assert made.vocabularies.now[1] == made.vocabularies.first_history
    made.admit(state, made.place(ids(3, 4)))


def test_a_state_of_maps_that_is_refused_changes_nothing(refused):
    made, state = begun((5, 6))
    ahead = made.place(ids(6, 7))
    kept, before = made.vocabularies.state(), maps_of(made)
    wrong = kept.maps["t"]._replace(rows=kept.maps["t"].rows + 100)
    refused(r"MapState\.rows", made.vocabularies.load_state, kept._replace(maps={"t": wrong}))
    says = r"expected what state\(\) returned, with maps of"
    for other in (3, kept.maps, kept._replace(maps={}), kept._replace(maps={"u": kept.maps["t"]})):
        refused(says, made.vocabularies.load_state, other)
    assert_same(maps_of(made), before)
    made.vocabularies.rewind(copied(state))
    refused("placed since the maps were rewound", made.admit, state, ahead)
    made.admit(state, made.place(ids(6, 7)))


@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_a_lookup_has_the_rows_of_the_step_at_which_it_was_asked_for(evict):
    """Its thread may be slow: then training batches are admitted before it is placed."""
    made, state = begun((1, 2), capacity=2, evict=evict)
    ahead = [made.place(ids(*keys)) for keys in ((2, 3), (3, 4))]
    pins = [made.vocabularies.pin()]
    for placed in ahead:
        state, _ = made.admit(state, placed)
        pins.append(made.vocabularies.pin())
    # Of the keys 1, 2, 3, 4 at the steps 1, 2, 3: key 3 gets the row of 1, and key 4 that of 2.
    expected = [[0, 1, -1, -1], [-1, 1, 0, -1], [-1, -1, 0, 1]]
    for step, (pin, rows) in enumerate(zip(pins, expected, strict=True), start=1):
        batch = made.intake.place_ids(ids(1, 2, 3, 4), training=False, step=pin.step)
        assert batch.valid_steps.tolist() == [step, step, made.vocabularies.now[1]]
        assert batch.keys.tables["t"].rows[0].tolist() == rows
    del pin, pins
    state, _ = made.admit(state, made.place(ids(1, 1)))
    assert not made.vocabularies._timeline._past  # nothing is kept for what nobody waits for


def test_the_last_step_is_refused_before_a_map_moves(monkeypatch, refused):
    made, _ = simple(lookahead=1)
    before = maps_of(made)
    monkeypatch.setattr("tpu_embed.vocabulary.vocabularies.FOREVER", 2)
    refused("fewer than 2 training batches", made.place, ids(1, 2))
    assert_same(maps_of(made), before)
    assert made.vocabularies.steps(1, training=True)[:2] == (1, 2)
    assert np.iinfo(np.int32).max == FOREVER


def test_a_lookup_in_a_state_that_was_given_up_is_refused_if_its_rows_are_not_known(refused):
    made, state = begun((1, 2), capacity=2)
    kept, looked = made.vocabularies.state(), made.place(ids(1, 2), training=False)
    state, _ = made.admit(state, made.place(ids(3, 4)))  # in the place of 1 and 2
    made.vocabularies.load_state(kept)
    refused("rows that may be other keys'", made.lookup, state, looked)

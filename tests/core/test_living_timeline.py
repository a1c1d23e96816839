"""Which batches belong to which states when batches are thrown away and maps are loaded."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from living_cases import ONES, assert_same, ids, initial_row, maps_of, simple

from tpu_embed.vocabulary.timeline import FOREVER


def copied(state):
    return jax.tree.map(jnp.copy, state)


@pytest.mark.parametrize("evict", ["lru", "none"])
def test_a_batch_that_was_thrown_away_reads_and_writes_nothing(evict):
    made, state = simple(evict=evict, lookahead=1)
    lookup, step = jax.jit(made.lookup), jax.jit(lambda *args: made.update(*args, ONES))
    lost = made.place(ids(7, 7))
    made.vocabularies.rewind(state)
    for keys in ((9, 9), (9, 9)):
        state, batch = made.admit(state, made.place(ids(*keys)))
        for call in (made.lookup, lambda *args: made.update(*args, ONES)):
            with pytest.raises(ValueError, match="expected an admitted batch"):
                call(state, lost)
        for call in (lookup, step, lookup.lower, step.lower):
            with pytest.raises(ValueError, match="outside of the jit; lower and"):
                call(state, lost)
    assert np.abs(lookup(state, batch)["x"]).min() > 0


def test_maps_that_are_loaded_again_end_what_was_placed_before():
    made, state = simple()
    state, _ = made.admit(state, made.place(ids(1, 2)))
    kept, at_1 = made.vocabularies.state(), copied(state)
    state, old = made.admit(state, made.place(ids(3, 4)))
    made.vocabularies.load_state(kept)
    state, new = made.admit(at_1, made.place(ids(5, 6)))
    step, history, _ = state.vocabulary["map_version"].tolist()
    assert (step, new.valid_steps.tolist()) == (2, [2, 2, history])
    assert history == made.vocabularies.now[1] != old.valid_steps[2]
    with pytest.raises(ValueError, match="placed since the maps were loaded"):
        made.lookup(state, old)
    np.testing.assert_array_equal(
        made.lookup(state, new)["x"][0], initial_row(made.structure.tables[0], 5)
    )


def test_a_lookup_that_a_state_from_before_a_load_renews_is_of_that_state():
    made, state = simple(capacity=2)
    first = copied(state)
    state, _ = made.admit(state, made.place(ids(1, 2)))
    looked = made.place(ids(1, 2), training=False)
    made.vocabularies.rewind(first)
    new, _ = made.admit(first, made.place(ids(3, 4)))
    state, fresh = made.admit(state, looked)
    made.lookup(state, fresh)
    with pytest.raises(ValueError, match="placed since the maps were loaded"):
        made.lookup(new, fresh)


def test_a_lookup_that_is_placed_while_maps_are_loaded_is_refused(monkeypatch):
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
    batches = []
    thread = threading.Thread(target=lambda: batches.append(made.place(ids(1, 2), training=False)))
    thread.start()
    assert found.wait(60)
    maps.load_state(kept)
    monkeypatch.undo()
    loaded.set()
    thread.join()
    state, _ = made.admit(first, made.place(ids(3, 4)))  # step 1 again, of another history
    with pytest.raises(ValueError, match="placed since the maps were loaded"):
        made.lookup(state, batches[0])


def test_a_batch_that_a_jit_returns_does_not_tell_of_the_one_it_was_traced_with():
    """The structure of what a program returns is that of its first trace."""
    made, state = simple(capacity=4)
    same = jax.jit(lambda batch: batch)
    for keys in ((1, 2), (3, 4)):
        state, _ = made.admit(state, made.place(ids(*keys)))
    same(made.place(ids(3, 4), training=False))
    looked = same(made.place(ids(1, 2), training=False))
    np.testing.assert_array_equal(
        made.lookup(state, looked)["x"][0], initial_row(made.structure.tables[0], 1)
    )
    state, _ = made.admit(state, made.place(ids(5, 6)))  # in the place of 1 and 2
    with pytest.raises(ValueError, match="place it again"):
        made.lookup(state, looked)
    ahead = [same(made.place(ids(*keys))) for keys in ((7, 8), (9, 10))]
    for batch in reversed(ahead):
        with pytest.raises(ValueError, match="place it again"):
            made.admit(state, batch)


def test_a_first_state_forgets_all_keys_also_after_maps_of_step_0_were_loaded():
    made, state = simple()
    made.vocabularies.load_state(made.vocabularies.state()._replace(history=1))
    made.place(ids(1, 2))
    made.vocabularies.rewind(state)
    assert (made.vocabularies.placed, made.vocabularies.now) == (0, made.vocabularies.at(0))
    assert made.vocabularies.now[1] == made.vocabularies.first_history
    made.admit(state, made.place(ids(3, 4)))


def test_a_state_of_maps_that_is_refused_changes_nothing():
    made, state = simple()
    state, _ = made.admit(state, made.place(ids(5, 6)))
    ahead = made.place(ids(6, 7))
    kept, before = made.vocabularies.state(), maps_of(made)
    wrong = kept.maps["t"]._replace(rows=kept.maps["t"].rows + 100)
    with pytest.raises(ValueError, match=r"MapState\.rows"):
        made.vocabularies.load_state(kept._replace(maps={"t": wrong}))
    for other in (3, kept.maps, kept._replace(maps={}), kept._replace(maps={"u": kept.maps["t"]})):
        with pytest.raises(ValueError, match=r"expected what state\(\) returned, with maps of"):
            made.vocabularies.load_state(other)
    assert_same(maps_of(made), before)
    made.vocabularies.rewind(copied(state))
    with pytest.raises(ValueError, match="placed since the maps were rewound"):
        made.admit(state, ahead)
    made.admit(state, made.place(ids(6, 7)))


@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_a_lookup_has_the_rows_of_the_step_at_which_it_was_asked_for(evict):
    """Its thread may be slow: then training batches are admitted before it is placed."""
    made, state = simple(capacity=2, evict=evict)
    state, _ = made.admit(state, made.place(ids(1, 2)))
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


def test_the_last_step_is_refused_before_a_map_moves(monkeypatch):
    made, _ = simple(lookahead=1)
    before = maps_of(made)
    monkeypatch.setattr("tpu_embed.vocabulary.vocabularies.FOREVER", 2)
    with pytest.raises(ValueError, match="fewer than 2 training batches"):
        made.place(ids(1, 2))
    assert_same(maps_of(made), before)
    assert made.vocabularies.steps(1, training=True)[:2] == (1, 2)
    assert np.iinfo(np.int32).max == FOREVER

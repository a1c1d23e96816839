"""A batch with rows from home, for lookups: whatever is written since, it shows no old row."""

import copy
import pickle

import jax
import numpy as np
import pytest
from living_cases import ids, mesh, on_host, train_once

import tpu_embed
from tpu_embed import FeatureConfig, HostStorage, TableConfig, io
from tpu_embed import optimizers as o

SEVENS = np.full((2, 2), 7, np.float32)
AGAIN = "place it again"


def by_id(capacity=20):
    """Return an engine of a table of ids on the host, its state, and a call that sets two rows."""
    table = TableConfig(capacity, 2, name="t", storage=HostStorage(device_rows=4))
    made = tpu_embed.EmbeddingEngine({"x": FeatureConfig(table)}, o.Adagrad(0.5), mesh=mesh(1))
    return made, made.init(jax.random.key(7)), lambda s: made.set_rows(s, "t", [1, 2], SEVENS)


def by_key(call="set_rows"):
    """Return the same for keys; the rows of the keys 1 and 2 are at home."""
    made, state = on_host(capacity=6, device_rows=4, lookahead=1)
    if call == "set_rows":
        return made, state, lambda s: made.set_rows(s, "t", keys=[1, 2], values=SEVENS)
    return made, state, lambda s: made.load(s, "t", [SEVENS[:1], SEVENS[1:]], keys=[1, 2])


WRITES = {"by id": by_id, "by key": by_key, "load by key": lambda: by_key("load")}


def trained(make):
    """Return the same with the rows of 1 and 2 at home, and those of 3 to 6 on the devices."""
    made, state, write = make()
    for some in ((1, 2), (3, 4), (5, 6)):
        state = train_once(made, state, *some)
    return made, state, write


def assert_stale(made, state, batch):
    """Check that a batch is refused by every call, and inside a jit."""
    for call in (made.lookup, made.admit):
        with pytest.raises(ValueError, match=AGAIN):
            call(state, batch)
    assert np.isnan(jax.jit(made.lookup)(state, batch)["x"]).all()


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.quick(2)
def test_it_is_refused_once_rows_at_home_are_set(how, refused):
    made, state, write = trained(WRITES[how])
    batch, held = (made.place(ids(*some), training=False) for some in ((1, 2), (3, 4)))
    before = np.array(made.lookup(state, batch)["x"])
    np.testing.assert_array_equal(jax.jit(made.lookup)(state, batch)["x"], before)
    old, state = state, write(state)
    assert_stale(made, state, batch)
    again = made.place(ids(1, 2), training=False)
    for lookup in (made.lookup, jax.jit(made.lookup)):
        np.testing.assert_array_equal(lookup(state, again)["x"], SEVENS)
    # What the devices hold is read where it is; and rows that were never given are not mixed in.
    np.testing.assert_array_equal(made.lookup(state, held)["x"], made.lookup(old, held)["x"])
    refused(AGAIN if how == "by id" else "place it again|a step up to", made.lookup, old, again)
    assert np.isnan(jax.jit(made.lookup)(old, again)["x"]).all()
    state = train_once(made, state, 3, 4)  # a batch that brings nothing: the number stays
    fresh = made.place(ids(1, 2), training=False)
    np.testing.assert_array_equal(jax.jit(made.lookup)(state, fresh)["x"], SEVENS)


@pytest.mark.parametrize("how", [None, "accumulators", "another state", "rewind"])
@pytest.mark.quick(2)
def test_it_is_refused_by_any_state_with_other_rows_at_home(how):
    made, first, write = by_id()
    state = write(first)
    batch = made.place(ids(1, 2), training=False)
    np.testing.assert_array_equal(made.lookup(state, batch)["x"], SEVENS)
    if how == "rewind":
        train_once(made, state, 3, 4)
        state = made.init(jax.random.key(7))
        made.vocabularies.rewind(state)
        # And it is as if no row had ever been set.
        found = made.lookup(state, made.place(ids(1, 2), training=False))["x"]
        other, theirs, _ = by_id()
        np.testing.assert_array_equal(found, other.rows(theirs, "t", [1, 2]))
    elif how == "another state":
        state = made.init(jax.random.key(8))
    else:
        state = made.set_rows(state, "t", [9], SEVENS[:1], slot=how)
    assert_stale(made, state, batch)


@pytest.mark.parametrize("how", ["restore", "adopt"])
@pytest.mark.quick(1)
def test_it_is_refused_after_maps_are_replaced(how, tmp_path, refused):
    made, state, write = trained(by_id)
    state = write(state)
    batch = made.place(ids(1, 2), training=False)
    if how == "restore":
        io.save(tmp_path / "saved", made, state)
        state = io.restore(tmp_path / "saved", made).state
    else:
        other, theirs, _ = trained(by_id)
        state = made.adopt(theirs, other)
    refused("since the maps were loaded", made.lookup, state, batch)
    fresh = made.place(ids(1, 2), training=False)
    np.testing.assert_array_equal(made.lookup(state, fresh)["x"], made.rows(state, "t", [1, 2]))


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.quick(1)
def test_a_queue_forgets_it_with_a_warning(pipelined):
    table = TableConfig(20, 2, name="t", storage=HostStorage(device_rows=4))
    made = tpu_embed.TPUEmbedding({"x": FeatureConfig(table)}, o.SGD(0.5), pipelined, mesh=mesh(1))
    made.build(2)
    made.enqueue(ids(1, 2), training=False)
    state = made.engine.set_rows(made.state, "t", [1, 2], SEVENS)
    with pytest.warns(UserWarning, match="1 from before, now forgotten; enqueue their data again"):
        made.state = state
    assert not made.waiting
    made.enqueue(ids(1, 2), training=False)
    np.testing.assert_array_equal(made.dequeue()["x"], SEVENS)


def test_a_batch_that_was_admitted_before_rows_are_set_is_trained_on():
    made, state, write = trained(by_id)
    state, batch = made.admit(state, made.place(ids(1, 3)))
    state = write(state)
    np.testing.assert_array_equal(jax.jit(made.lookup)(state, batch)["x"][0], SEVENS[0])
    assert int(made.update(state, batch, made.lookup(state, batch)).step) == 4


def test_it_is_pickled_with_its_rows():
    made, state, write = trained(by_id)
    batch = made.place(ids(1, 3), training=False)
    expected = made.rows(state, "t", [1, 3])
    copies, new = [pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)], write(state)
    for one in copies:
        for lookup in (made.lookup, jax.jit(made.lookup)):
            np.testing.assert_array_equal(lookup(state, one)["x"], expected)
        assert_stale(made, new, one)


def test_one_that_was_placed_ahead_of_others_is_pickled_without_rows(refused):
    made, state, _ = trained(by_id)
    training = made.place(ids(7, 8))
    ahead = {"training": False, "step": made.vocabularies.placed}
    batch = made.intake.place_ids(ids(1, 2), **ahead)
    kept = pickle.loads(pickle.dumps(batch))
    state, _ = made.admit(state, training)
    np.testing.assert_array_equal(made.lookup(state, batch)["x"], made.rows(state, "t", [1, 2]))
    refused("expected a batch with its rows from home, got one that", made.lookup, state, kept)

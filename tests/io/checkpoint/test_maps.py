"""Maps in checkpoints: of the state's step, for any device count and any capacity."""

import dataclasses
import shutil
import time

import jax
import living_cases as living
import numpy as np
import pytest

import tpu_embed
from tpu_embed import DynamicVocabulary, FeatureConfig, TableConfig, io
from tpu_embed import optimizers as o
from tpu_embed.data import Prefetcher

BEFORE, AFTER = 6, 8


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a checkpoint written on 8 devices with batches placed ahead, and what comes then."""
    path = tmp_path_factory.mktemp("maps") / "step"
    made = living.engine(8)
    state = made.init(jax.random.key(living.KEY))
    with Prefetcher(
        made, (living.draw(step) for step in range(BEFORE + AFTER)), depth=3
    ) as batches:
        for step, batch in enumerate(batches):
            state, _ = living.train_on(made, state, batch, step)
            if step == BEFORE - 1:
                while made.vocabularies.placed == BEFORE:  # the thread places the next one
                    time.sleep(0.01)
                io.save(path, made, state, position=batches.get_state())
                at_save = living.whole(made, state)
    return path, at_save, living.whole(made, state)


def test_training_goes_on_with_the_same_bits_on_one_device(saved):
    path, at_save, at_end = saved
    made = living.engine(1)
    restored = io.restore(path, made)
    assert restored.position == {"batches": BEFORE}
    living.assert_same(living.whole(made, restored.state), at_save)
    state, _ = living.train(made, restored.state, AFTER, first=BEFORE)
    living.assert_same(living.whole(made, state), at_end)


@pytest.mark.whole
def test_a_save_on_8_devices_goes_on_for_50_steps_on_3(tmp_path):
    """Batches are placed ahead at the time of the save; 8 and 3 devices divide 24 sum blocks."""
    many, few = (living.engine(n, features=living.configs(100), sum_blocks=24) for n in (8, 3))
    state, _ = living.train(many, many.init(jax.random.key(living.KEY)), BEFORE, scale=3)
    ahead = [many.place(living.draw(BEFORE + n, scale=3)) for n in range(2)]
    io.save(tmp_path / "step", many, state)
    for step, batch in enumerate(ahead, BEFORE):
        state, _ = living.train_on(many, state, batch, step)
    state, _ = living.train(many, state, 48, first=BEFORE + 2, scale=3)
    restored = io.restore(tmp_path / "step", few).state
    there, _ = living.train(few, restored, 50, first=BEFORE, scale=3)
    living.assert_same(living.whole(few, there), living.whole(many, state))
    for counted in few.vocabularies.counters.values():  # keys came and went
        assert counted["admitted"] > counted["keys"] + 20


def test_batches_placed_before_a_restore_are_refused(saved):
    made = living.engine(2)
    early = made.place(living.draw(0))
    restored = io.restore(saved[0], made).state
    with pytest.raises(ValueError, match="admit each training batch once"):
        made.admit(restored, early)
    looked = made.place(living.draw(3), training=False)
    made.lookup(restored, looked)
    again = io.restore(saved[0], made).state
    for call, said in (
        (lambda: made.lookup(again, looked), "placed since the maps were loaded"),
        (lambda: made.vocabularies.rewind(restored), "or from before a load"),
        (lambda: io.save(saved[0].parent / "old", made, restored), "one from before they were"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    step = jax.jit(lambda state, batch: made.lookup(state, batch)["user"])
    assert np.isnan(step(again, looked)).all()


def test_a_state_that_was_given_up_is_not_saved(tmp_path):
    """The maps of its step may be those of batches that were placed since, of another history."""
    made = living.engine(2)
    state, _ = living.train(made, made.init(jax.random.key(living.KEY)), 1)
    kept = made.vocabularies.state()
    state, _ = living.train(made, state, 1, first=1)
    made.vocabularies.load_state(kept)
    made.place(living.draw(7))
    with pytest.raises(ValueError, match="a state of the maps' history"):
        io.save(tmp_path / "step", made, state)


@pytest.mark.whole
def test_an_embedding_forgets_what_was_enqueued_before_a_restore(saved):
    made = tpu_embed.TPUEmbedding(
        living.configs(), o.Adam(0.125), mesh=living.mesh(2), seed=living.KEY
    )
    for step in range(3):
        made.enqueue(living.draw(step))
    made.dequeue()
    restored = io.restore(saved[0], made.engine)
    with pytest.warns(UserWarning, match="got 2 from before, now forgotten"):
        made.state = restored.state
    assert (made.waiting, made.dequeued) == (0, None)
    for step in range(BEFORE, BEFORE + AFTER):
        made.enqueue(living.draw(step))
        made.apply_gradients(living.gradients(made.dequeue(), step))
    living.assert_same(living.whole(made.engine, made.state), saved[2])


@pytest.mark.parametrize("items", [21, 60])
@pytest.mark.quick(1)
def test_another_capacity_keeps_the_keys_with_the_best_scores(saved, items):
    path, at_save, _ = saved
    made = living.engine(4, features=living.configs(items))
    state = io.restore(path, made).state
    found = living.whole(made, state)
    old = {part: at_save[f"map items/{part}"] for part in ("keys", "rows", "last_seen")}
    order = np.lexsort([old["rows"], old["last_seen"]])[-items:]
    keys, rows = made.vocabularies.keys("items")
    assert set(keys.tolist()) == set(old["keys"][order].tolist())
    row_before = dict(zip(old["keys"].tolist(), old["rows"].tolist(), strict=True))
    before = [row_before[key] for key in keys.tolist()]
    for name in ("table items", "slot items/momenta", "slot items/velocities"):
        np.testing.assert_array_equal(found[name][rows], at_save[name][before])
    kept = [name for name in found if "tags" in name or "users" in name]
    living.assert_same(*({name: one[name] for name in kept} for one in (found, at_save)))
    living.train(made, state, 2, first=BEFORE)


@pytest.mark.parametrize(("more", "unseen"), [(5, "shared"), (0, "zero")])
def test_the_shared_row_stays_the_last_one_or_becomes_an_ordinary_one(saved, more, unseen):
    features = living.configs()
    table = features["one"].table
    rule = dataclasses.replace(table.vocabulary, unseen=unseen)
    table = dataclasses.replace(table, vocabulary_size=living.TAGS + more, vocabulary=rule)
    made = living.engine(2, features=features | {"one": FeatureConfig(table)})
    found, before = living.whole(made, io.restore(saved[0], made).state), saved[1]
    np.testing.assert_array_equal(found["map tags/keys"], before["map tags/keys"])
    rows, rows_before = found["map tags/rows"], before["map tags/rows"]
    if unseen == "shared":
        rows, rows_before = np.append(rows, -1), np.append(rows_before, -1)
    for name in ("table tags", "slot tags/accumulators"):
        np.testing.assert_array_equal(found[name][rows], before[name][rows_before])


@pytest.mark.parametrize("more", [0, 5])
def test_a_shared_row_that_nobody_has_trained_is_refused(saved, more):
    features = living.configs(34 + more, unseen="shared")
    with pytest.raises(ValueError, match="'items': unseen: expected 'shared', got 'zero'"):
        io.restore(saved[0], living.engine(1, features=features))


def test_new_keys_are_drawn_with_the_key_of_the_checkpoint(saved):
    made = living.engine(2)
    state = io.restore(saved[0], made).state
    state, batch = made.admit(state, made.place({**living.draw(0), "seen": np.full((8, 3), 10**6)}))
    rows = made.lookup(state, batch)["seen"]
    table = made.table_configs["items"]
    np.testing.assert_array_equal(rows[0, 0], living.initial_row(table, 10**6))


def test_a_table_lives_on_both_sides_or_on_none(saved, tmp_path):
    fixed = TableConfig(34, 4, name="items")
    features = {**living.configs(), "bags": FeatureConfig(fixed), "seen": FeatureConfig(fixed)}
    with pytest.raises(ValueError, match="'items': ids: expected row numbers, got keys"):
        io.restore(saved[0], living.engine(2, features=features))
    ordinary = living.engine(1, features={"bags": FeatureConfig(fixed)})
    io.save(tmp_path / "fixed", ordinary, ordinary.init(jax.random.key(0)))
    lone = living.engine(1, features={"bags": living.configs()["bags"]})
    with pytest.raises(ValueError, match="'items': ids: expected keys of a dynamic vocabulary"):
        io.restore(tmp_path / "fixed", lone)


@pytest.mark.whole
def test_a_new_living_table_begins_without_keys(saved, tmp_path):
    more = TableConfig(5, 4, name="more", vocabulary=DynamicVocabulary())
    made = living.engine(2, features={**living.configs(), "more": FeatureConfig(more)})
    state = io.restore(saved[0], made, key=jax.random.key(1)).state
    assert len(made.vocabularies.keys("more")[0]) == 0
    state, _ = made.admit(state, made.place({**living.draw(6), "more": np.arange(8)}))
    assert state.vocabulary["map_version"][:2].tolist() == list(made.vocabularies.now)
    assert made.vocabularies.admitted == BEFORE + 1
    left = living.engine(2, features={"user": living.configs()["user"]})
    io.restore(saved[0], left, leave_out=("items", "tags"))


@pytest.mark.parametrize("damage", ["array", "missing", "other"])
def test_a_damaged_map_is_refused_and_changes_nothing(saved, tmp_path, damage):
    path = shutil.copytree(saved[0], tmp_path / "copy") / "tables"
    chunk, file = path / "items" / "map" / "rows" / "c.0.0", path / "vocabularies.json"
    if damage == "array":
        chunk.write_bytes(chunk.read_bytes()[:-1] + b"\0")
    elif damage == "missing":
        file.unlink()
    else:
        file.write_text(file.read_text().replace('"step"', '"stop"'))
    made = living.engine(2)
    made.place(living.draw(0))
    before = made.vocabularies.counters
    with pytest.raises(ValueError, match=r"items|vocabularies\.json"):
        io.restore(tmp_path / "copy", made)
    assert made.vocabularies.counters == before

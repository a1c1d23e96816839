"""What is reported of tables with keys: late, ahead, by key; and what is refused.

Random runs, beside a server that follows them, are in `io/delta/test_living_deltas.py`.
"""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from living_cases import ids, simple, train_once

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, optimizers
from tpu_embed.io import TouchedRows, Version
from tpu_embed.touched import table_marks


def test_threads_record_while_batches_are_admitted():
    engine, state = simple(32)
    touched, recorded = TouchedRows(engine), []
    before = touched.version(state)
    with ThreadPoolExecutor() as pool:
        for step in range(1, 21):
            state = train_once(engine, state, step, step + 1)
            recorded.append(pool.submit(touched.record, ids(step, step + 1), step))
    assert not any(one.result() for one in recorded)  # it raises what a thread has
    assert touched.since(before)["t"].tolist() == list(range(1, 22))
    after = touched.version(state)
    assert after.step == 20
    assert not touched.since(after)["t"].size


def test_a_record_that_is_kept_knows_of_keys_that_were_recorded_before_they_had_rows():
    engine, state = simple(4)
    touched, kept = TouchedRows(engine), TouchedRows(engine)
    touched.record(ids(1, 2), 1)
    state, batch = engine.admit(state, engine.place(ids(1, 2)))
    version = touched.version(state)
    state = engine.update(state, batch, engine.lookup(state, batch))
    kept.load(touched.saved(state))
    for one in (touched, kept):
        assert one.since(version)["t"].tolist() == [1, 2]
        assert not one.since(one.version(state))["t"].size


def test_what_is_recorded_late_is_in_the_next_delta(one):
    """The version was made before anybody told of the rows, so it cannot have them."""
    _, _, touched, version = one
    assert version.step == 1
    touched.record_rows("t", None, 0, keys=[1])
    assert touched.since(version)["t"].tolist() == [1]
    touched.record(ids(2, 2), 1)
    assert touched.since(version)["t"].tolist() == [1, 2]


def test_a_batch_that_is_placed_ahead_takes_no_row_yet():
    """Its evictions may be undone, so keys that it would evict are reported if they changed."""
    engine, state = simple(2)
    touched, versions = TouchedRows(engine), []
    for step in (1, 2):
        state = train_once(engine, state, 1, 2)
        if step == 2:
            engine.place(ids(8, 9))
        touched.record(ids(1, 2), step)
        versions.append(touched.version(state))
    version = versions[0]
    assert touched.since(version)["t"].tolist() == [1, 2]
    engine.vocabularies.rewind(state)
    assert touched.since(version)["t"].tolist() == [1, 2]


def test_the_first_of_two_versions_of_a_step_counts():
    """A batch may be admitted ahead between them; whoever has the first one lacks its keys."""
    engine, state = simple(4, lookahead=1)
    touched = TouchedRows(engine)
    state, _ = engine.admit(state, engine.place(ids(1, 2)))
    first = touched.version(state)
    state, _ = engine.admit(state, engine.place(ids(3, 4)))
    second = touched.version(state)
    assert (first.step, first.keys, second.step, second.keys) == (0, 1, 0, 2)
    assert touched.since(0)["t"].tolist() == touched.since(first)["t"].tolist() == [3, 4]
    assert not touched.since(second)["t"].size


@pytest.fixture
def one():
    """Return an engine, its state, its record and the version at step 1."""
    engine, state = simple(2)
    touched = TouchedRows(engine)
    state = train_once(engine, state, 1, 2)
    touched.record(ids(1, 2), 1)
    return engine, state, touched, touched.version(state)


SINCE = [
    (lambda v: -1, "step: expected an integer >= 0, got -1"),
    (lambda v: True, "step: expected an integer >= 0, got True"),
    (lambda v: 1.0, "step: expected an integer >= 0, got 1.0"),
    (lambda v: tuple(v), "step: expected an integer >= 0"),
    (lambda v: 7, "or the step of one that this object has returned"),
    (lambda v: v._replace(keys=-1), "since: keys: expected an integer >= 0"),
    (lambda v: v._replace(step=0.5), "since: step: expected an integer"),
    (lambda v: Version("x", *v[1:]), "expected a version of run .*got Version"),
]


def test_what_is_no_version_is_refused(one):
    _, _, touched, version = one
    for since, text in SINCE:
        for ask in (touched.since, touched.changes):
            with pytest.raises(ValueError, match=text):
                ask(since(version))


KEYS = [
    ([0], [1], "keys: expected None beside rows"),
    (None, [1, 9], "expected keys with a row, got key 9"),
    (None, [1.0], "keys: expected integers or strings"),
    (None, np.array(1), "keys: expected keys of shape"),
    (None, ["a"], "expected keys with a row"),
]


def test_keys_that_were_not_set_are_refused(one):
    _, state, touched, version = one
    for rows, keys, text in KEYS:
        with pytest.raises((TypeError, ValueError), match=text):
            touched.record_rows("t", rows, 1, keys=keys)
    assert touched.version(state) == version


def test_keys_of_both_signs_are_recorded():
    engine, state = simple(3)
    touched = TouchedRows(engine)
    keys = np.array([2**64 - 1, 2**63, 5], np.uint64)
    state, batch = engine.admit(state, engine.place({"x": keys}))
    state = engine.update(state, batch, engine.lookup(state, batch))
    touched.record(batch, 1)
    version = touched.version(state)
    touched.record_rows("t", None, 1, keys=np.array([-1], np.int64))
    touched.record_rows("t", None, 1, keys=[2**63])
    touched.record_rows("t", None, 1, keys=[])
    assert touched.since(version)["t"].tolist() == [2**63, 2**64 - 1]
    assert touched.version(state).edits == 3
    users = FeatureConfig(TableConfig(4, 2, name="u"))
    other = TouchedRows(EmbeddingEngine(users, optimizers.SGD(1.0)))
    with pytest.raises(ValueError, match="keys: expected None: ids are row numbers"):
        other.record_rows("u", None, 0, keys=[])


@pytest.mark.parametrize("how", ["load", "rewind to the beginning"])
def test_a_record_from_before_maps_were_loaded_is_refused(one, how):
    engine, state, touched, version = one
    step, now = (1, state) if how == "load" else (0, engine.init(jax.random.key(7)))
    if how == "load":
        engine.vocabularies.load_state(engine.vocabularies.state())
    else:
        engine.vocabularies.rewind(now)
    calls = [lambda: touched.since(version), lambda: touched.changes(version), touched.never]
    calls += [lambda: touched.version(state), lambda: touched.saved(state)]
    text = "from before they were loaded; restore it .* make another TouchedRows.*full export"
    for call in calls:
        with pytest.raises(ValueError, match=text):
            call()
    again = TouchedRows(engine, step=step)
    assert again.version(now).keys == step
    assert again.never() == {"t": 2 * step}
    with pytest.raises(ValueError, match="since: expected a version of run"):
        again.since(version)


def test_more_lost_keys_than_rows_need_a_full_export(one, monkeypatch):
    engine, state, _, _ = one
    monkeypatch.setattr(table_marks, "_LEAST_LOST", 2)
    touched = TouchedRows(engine, step=1)
    versions = [touched.version(state)]
    for step in range(2, 7):
        state = train_once(engine, state, 2 * step, 2 * step + 1)
        touched.record(ids(2 * step, 2 * step + 1), step)
        versions.append(touched.version(state))
    assert touched.changes(versions[-2])["t"].lost.tolist() == [10, 11]
    text = r"expected a version of \d admitted batches or more, got one of 1: table 't' has lost"
    with pytest.raises(ValueError, match=text + ".* publish a full export, and deltas more often"):
        touched.since(versions[0])
    assert touched.never() == {"t": 0}

"""What is reported of tables with keys, beside copies of all their rows."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from facade_cases import mesh
from living_cases import ids, simple, train_once
from record_cases import NAMES, check, configs, draw, rows_by_key

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.io import TouchedRows, Version
from tpu_embed.touched import table_marks


class Run:
    """Batches that are placed ahead, admitted ahead, thrown away, and recorded in any way.

    Beside it a plain model: of each key, the last update that it was in while it had a row.
    """

    def __init__(self, seed):
        self.rng, self.placed, lookahead = np.random.default_rng(seed), 0, seed % 2
        options = {"mesh": mesh(1), "lookahead": lookahead}
        self.engine = tpu_embed.EmbeddingEngine(configs(), o.SGD(0.5), **options)
        self.state, self.queue, self.admitted = self.engine.init(jax.random.key(0)), [], []
        self.touched, self.late = TouchedRows(self.engine), []
        self.versions, self.last = [], {name: {} for name in NAMES}

    def place(self):
        """Place a batch; perhaps its features are recorded long before its update."""
        features = draw(self.rng, self.placed)
        is_recorded = self.rng.random() < 0.3
        step = int(self.state.step) + len(self.admitted) + len(self.queue) + 1
        if is_recorded:
            self.touched.record(features, step)
        self.queue.append((features, self.engine.place(features), is_recorded))
        self.placed += 1

    def throw_away(self):
        """Throw away what is placed; a step that is recorded cannot be recorded anew."""
        if not any(is_recorded for *_, is_recorded in self.queue):
            self.engine.vocabularies.rewind(self.state)
            self.placed -= len(self.queue)
            self.queue = []

    def admit(self):
        if len(self.admitted) > self.engine.vocabularies.lookahead:
            return
        if not self.queue:
            self.place()
        features, batch, is_recorded = self.queue.pop(0)
        step = int(self.state.step) + len(self.admitted) + 1
        given = (features, batch)[int(self.rng.integers(2))]
        if not is_recorded and self.rng.random() < 0.4:
            self.touched.record(given, step)
            is_recorded = True
        self.state, batch = self.engine.admit(self.state, batch)
        found = {name: self.engine.vocabularies.find(name, features[name]) for name in NAMES}
        self.admitted.append((batch, features, found, None if is_recorded else given))

    def train(self):
        if not self.admitted:
            self.admit()
        (batch, features, found, given), step = self.admitted.pop(0), int(self.state.step) + 1
        dims = {"items": 2, "tags": 2, "far": 3}
        gradients = {n: np.float32(self.rng.normal(size=(4, dim))) for n, dim in dims.items()}
        self.state = self.engine.update(self.state, batch, gradients)
        if given is not None:
            self.late.append((given, step))
        for name, rows in found.items():
            for key, row in zip(features[name].tolist(), rows, strict=True):
                if row >= 0 and key != -1:
                    self.last[name][key] = step

    def edit(self):
        name = NAMES[int(self.rng.integers(3))]
        keys, rows = self.engine.vocabularies.keys(name)
        if not rows.size or (name == "far" and self.queue):  # set_rows refuses batches placed ahead
            return
        at, step = int(self.rng.integers(rows.size)), int(self.state.step)
        values = self.rng.normal(size=(1, self.engine.table_configs[name].dim)).astype(np.float32)
        self.state = self.engine.set_rows(self.state, name, rows[[at]], values)
        by_row = self.rng.random() < 0.5
        which = {"rows": rows[[at]]} if by_row else {"rows": None, "keys": keys[[at]]}
        self.touched.record_rows(name, step=step, **which)

    def publish(self):
        for given, step in self.late:
            self.touched.record(given, step)
        self.late, now = [], rows_by_key(self.engine, self.state)
        for version, before in self.versions:
            check(self.touched, version, before, now)
            for name, reported in self.touched.since(version).items():
                changed = {key for key, step in self.last[name].items() if step > version.step}
                assert changed & set(now[name]) <= set(reported.tolist()), name
        version = self.touched.version(self.state)
        self.versions = [*self.versions[-4:], (version, now)]
        keyed = {name: len(set(now[name]) - {"shared"}) for name in NAMES}
        assert all(0 <= n <= keyed[name] for name, n in self.touched.never().items())

    def finish(self):
        """Train on all that is placed: then no mark is later than the last update."""
        while self.queue:
            self.train()
        while self.admitted:
            self.train()
        self.train()
        self.publish()
        assert not any(keys.size for keys in self.touched.since(self.versions[-1][0]).values())


ACTIONS = {"place": 15, "admit": 20, "throw_away": 5, "train": 25, "edit": 10, "publish": 25}


@pytest.mark.parametrize("seed", range(2), ids=["admitted in turn", "admitted ahead"])
def test_every_change_is_reported_however_it_is_recorded(seed):
    run = Run(seed)
    for action in run.rng.choice([*ACTIONS], 120, p=np.array([*ACTIONS.values()]) / 100):
        if action != "place" or len(run.queue) < 3:
            getattr(run, action)()
    run.finish()


def test_threads_record_while_batches_are_admitted():
    run = Run(5)
    run.train()
    run.publish()
    with ThreadPoolExecutor() as pool:
        recorded = []
        for _ in range(20):
            run.train()
            recorded += [pool.submit(run.touched.record, *late) for late in run.late]
            run.late = []
    assert not any(one.result() for one in recorded)  # it raises what a thread has
    run.publish()
    assert run.versions[-1][0].step == 21


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
    other = TouchedRows(tpu_embed.EmbeddingEngine(users, o.SGD(1.0)))
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

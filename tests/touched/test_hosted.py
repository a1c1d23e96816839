"""Which ids of tables on the host batches touched, whenever they are recorded."""

import jax
import numpy as np
import pytest
from living_cases import mesh

import tpu_embed
from tpu_embed import DynamicVocabulary, FeatureConfig, HostStorage, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.io import TouchedRows
from tpu_embed.touched.record import physical_rows, step_of
from tpu_embed.touched.table_marks import NEVER, HostedMarks

V = {"items": 40, "tags": 7}


def engine(devices):
    """Return an engine of two tables on the host in one stack, one with keys, and of another."""
    storage = HostStorage(device_rows=5)
    items = TableConfig(V["items"], 2, name="items", storage=storage)
    living = DynamicVocabulary(unseen="shared", ttl=4)
    tags = TableConfig(V["tags"], 2, name="tags", vocabulary=living, storage=storage)
    users = TableConfig(9, 2, name="users")
    features = jax.tree.map(FeatureConfig, {"item": items, "tag": tags, "user": users})
    return tpu_embed.EmbeddingEngine(features, o.SGD(1.0), mesh=mesh(devices), lookahead=0)


class Run:
    """Batches placed, recorded and admitted; and the ids that they touch, in dictionaries."""

    def __init__(self, devices, seed):
        self.engine, self.rng = engine(devices), np.random.default_rng(seed)
        self.maps, self.layout = self.engine.vocabularies, self.engine.layout
        self.state = self.engine.init(jax.random.key(0))
        for _ in range(3):
            self.admit(self.place()[0])
        self.marks = HostedMarks(self.layout, self.maps)
        self.maps.observers.add(self)
        self.last = {name: {} for name in V}
        self.waiting, self.newest = [], dict.fromkeys(V, NEVER)

    def place(self):
        """Return a placed batch, and by table the ids that it looks up."""
        item = np.resize(self.rng.integers(-1, V["items"], 2), 4)
        tag = np.where(self.rng.random(4) < 0.1, -1, self.rng.integers(0, 6, 4))
        tag = np.where(tag < 0, -1, tag + self.maps.placed // 3)
        features = {"item": item, "tag": tag, "user": np.arange(4)}
        batch = self.engine.place(features)
        asked = np.unique(tag[tag != -1]).astype(np.uint64)
        found = self.maps.find("tags", asked)
        tags = {V["tags"] - 1 if id_ < 0 else int(id_) for id_ in found}
        return batch, {"items": {*item.tolist()} - {-1}, "tags": tags}

    def admit(self, batch):
        self.state, _ = self.engine.admit(self.state, batch)

    def record(self, batch, ids, step):
        for stack, rows in zip(self.layout.stacks, physical_rows(batch, self.layout), strict=True):
            if stack.is_on_host:
                self.marks.touch(stack, rows, step_of(batch), step)
        if step_of(batch) > self.maps.admitted:
            self.waiting.append((step_of(batch), ids, step))
        else:
            self.mark(ids, step)

    def mark(self, ids, step):
        for name, some in ids.items():
            # A late mark gets the greatest step so far; see `IdMarks`.
            self.newest[name] = max(self.newest[name], step) if some else self.newest[name]
            self.last[name] |= dict.fromkeys(some, self.newest[name])

    def check(self):
        for name, last in self.last.items():
            for step in range(-1, max([*last.values(), 0]) + 1):
                expected = sorted(id_ for id_, at in last.items() if at > step)
                assert self.marks.marks[name].after(step).tolist() == expected, (name, step)

    # What the maps tell; see `vocabulary.table_maps.Observer`.

    def note_admitted(self, step, moves):
        self.marks.note(step, moves)
        for one in [one for one in self.waiting if one[0] == step]:
            self.mark(*one[1:])
        self.waiting = [one for one in self.waiting if one[0] != step]

    def note_undone(self, step):
        self.marks.undo(step)
        self.waiting = [one for one in self.waiting if one[0] <= step]


@pytest.mark.parametrize(("devices", "seed"), [(1, 0), (2, 1)])
@pytest.mark.quick(1)
def test_a_batch_touches_the_ids_that_it_looked_up(devices, seed):
    run, later = Run(devices, seed), []
    for update in range(1, 41):
        batch, ids = run.place()
        when = run.rng.integers(4)
        if when == 0:  # before it is admitted, and then it may be thrown away
            run.record(batch, ids, update)
            if run.rng.random() < 0.3:
                run.maps.rewind(run.state)
                run.check()
                continue
        run.admit(batch)
        if when == 1:
            run.record(batch, ids, update)
        elif when > 1:  # some batches later
            later.append((batch, ids, update))
        while later and run.rng.random() < 0.3:
            run.record(*later.pop(int(run.rng.integers(len(later)))))
        run.check()
    assert max(map(len, run.last.values())) > 15


def test_a_batch_admitted_long_ago_is_refused(monkeypatch):
    monkeypatch.setattr("tpu_embed.touched.table_marks._REMEMBERED", 4)
    run = Run(1, 2)
    batches = [run.place() for _ in range(7)]
    for batch, _ in batches:
        run.admit(batch)
    # 3 batches were admitted before recording began.
    text = "at most 4 admitted batches old, got one of step 5, 5 before the newest; record each"
    for n, said in enumerate(["record: expected", text]):
        with pytest.raises(ValueError, match=said):
            run.record(*batches[n], n + 1)
    for n in range(2, 7):
        run.record(*batches[n], n + 1)
    run.check()


def test_a_batch_that_stays_is_known_when_a_later_one_is_undone():
    run = Run(1, 4)
    (stays, ids), (goes, others) = run.place(), run.place()
    run.record(stays, ids, 1)
    run.record(goes, others, 2)
    run.maps.undo(run.maps.placed - 1)
    run.admit(stays)
    run.check()
    assert set(run.last["items"]) == ids["items"]


def test_a_record_forgets_a_batch_that_is_undone():
    made = engine(1)
    state, touched = made.init(jax.random.key(0)), TouchedRows(made)

    def place(*items):
        zeros = np.zeros(4, int)
        return made.place({"item": np.resize(items, 4), "tag": zeros, "user": zeros})

    versions = []
    for step, items in enumerate([(8, 9), (8,)], 1):
        touched.record(place(8, 9), step)  # it is thrown away
        made.vocabularies.rewind(state)
        state, batch = made.admit(state, place(*items))
        state = made.update(state, batch, made.lookup(state, batch))
        touched.record(batch, step)
        versions.append(touched.version(state))
    assert touched.changes(versions[0])["items"].rows.tolist() == [8]

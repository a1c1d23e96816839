"""Which ids of tables on the host batches touched, whenever they are recorded."""

import jax
import numpy as np
import pytest
from facade_cases import mesh

from tpu_embed import DynamicVocabulary, EmbeddingEngine, FeatureConfig, HostStorage, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.io import TouchedRows


def engine(devices):
    """Return an engine of two tables on the host in one stack, one with keys, and of another."""
    storage = HostStorage(device_rows=5)
    items = TableConfig(40, 2, name="items", storage=storage)
    living = DynamicVocabulary(unseen="shared", ttl=4)
    tags = TableConfig(7, 2, name="tags", vocabulary=living, storage=storage)
    users = TableConfig(9, 2, name="users")
    features = jax.tree.map(FeatureConfig, {"item": items, "tag": tags, "user": users})
    return EmbeddingEngine(features, o.SGD(1.0), mesh=mesh(devices))


class Run:
    """An engine whose batches are recorded, and the ids that these have looked up."""

    def __init__(self, devices=1, admitted=0):
        self.made, self.rng = engine(devices), np.random.default_rng(devices)
        self.state = self.made.init(jax.random.key(0))
        for _ in range(admitted):
            self.admit(self.place()[0])
        self.touched = TouchedRows(self.made, step=admitted)
        self.first, self.ids = self.touched.version(self.state), (set(), set())

    def place(self):
        """Return a placed batch, and what it looks up: items, and the keys of tags."""
        item = np.resize(self.rng.integers(-1, 40, 2), 4)
        tag = np.where(self.rng.random(4) < 0.1, -1, self.rng.integers(0, 3, 4))
        batch = self.made.place({"item": item, "tag": tag, "user": np.arange(4)})
        return batch, ({*item.tolist()} - {-1}, {*tag.tolist()} - {-1})

    def admit(self, batch):
        """Admit a batch, and train on it."""
        self.state, batch = self.made.admit(self.state, batch)
        self.state = self.made.update(self.state, batch, self.made.lookup(self.state, batch))

    def note(self, ids):
        self.ids = tuple(mine | some for mine, some in zip(self.ids, ids, strict=True))

    def check(self, *unrecorded):
        """Compare; ids of admitted batches may be known before these are recorded."""
        found, keys = self.touched.changes(self.first), self.made.vocabularies.keys("tags")[0]
        items, tags = set(found["items"].rows.tolist()), set(found["tags"].keys.tolist())
        all_items, all_tags = (
            set().union(*some) for some in zip(self.ids, *unrecorded, strict=True)
        )
        assert self.ids[0] <= items <= all_items
        assert self.ids[1] & set(keys.tolist()) <= tags <= all_tags


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.quick(1)
def test_a_batch_touches_the_ids_that_it_looked_up(devices):
    run, later = Run(devices), []
    for update in range(1, 31):
        (batch, ids), when = run.place(), run.rng.integers(4)
        if when == 0:  # before it is admitted, and then it may be thrown away
            run.touched.record(batch, update)
            if run.rng.random() < 0.5:
                run.made.vocabularies.rewind(run.state)
                (batch, ids), when = run.place(), 1
        run.admit(batch)
        if when > 1:  # some batches later
            later.append((batch, ids, update))
        else:
            run.note(ids)
        if when == 1:
            run.touched.record(batch, update)
        while later and run.rng.random() < 0.3:
            batch, ids, at = later.pop(int(run.rng.integers(len(later))))
            run.touched.record(batch, at)
            run.note(ids)
        run.check(*(ids for _, ids, _ in later))
    assert len(run.ids[0]) > 15


def test_a_batch_admitted_long_ago_is_refused(monkeypatch):
    monkeypatch.setattr("tpu_embed.touched.table_marks._REMEMBERED", 4)
    run, batches = Run(admitted=3), []
    for _ in range(7):
        batches.append(run.place())
        run.admit(batches[-1][0])
    text = "at most 4 admitted batches old, got one of step 5, 5 before the newest; record each"
    for n, (batch, ids) in enumerate(batches):
        if n < 2:
            with pytest.raises(ValueError, match=text if n else "record: expected"):
                run.touched.record(batch, 4 + n)
        else:
            run.touched.record(batch, 4 + n)
            run.note(ids)
    run.check(*(ids for _, ids in batches[:2]))


def test_a_batch_that_stays_is_known_when_a_later_one_is_undone():
    run = Run()
    (stays, ids), (goes, _) = run.place(), run.place()
    run.touched.record(stays, 1)
    run.touched.record(goes, 2)
    run.made.vocabularies.undo(run.made.vocabularies.placed - 1)
    run.admit(stays)
    run.note(ids)
    run.check()

"""Records of tables with keys, made in any way, beside copies of all rows and a plain model."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from living_cases import mesh
from record_cases import NAMES, check, configs, draw, rows_by_key

import tpu_embed
from tpu_embed import optimizers as o
from tpu_embed.io import TouchedRows


class Run:
    """Batches that are placed ahead, admitted ahead, thrown away, and recorded in any way.

    Beside it a plain model: of each key, the last update that it was in while it had a row.
    """

    def __init__(self, seed):
        self.rng, self.placed, lookahead = np.random.default_rng(seed), 0, seed % 2
        self.engine = tpu_embed.EmbeddingEngine(
            configs(), o.SGD(0.5), mesh=mesh(1), lookahead=lookahead
        )
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
        gradients = {n: self.rng.normal(size=(4, d)).astype(np.float32) for n, d in
                     zip(NAMES, (2, 2, 3), strict=True)}  # fmt: skip
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
        if self.rng.random() < 0.5:
            self.touched.record_rows(name, rows[[at]], step)
        else:
            self.touched.record_rows(name, None, step, keys=keys[[at]])

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
        for _ in range(20):
            run.train()
            for late in run.late:
                pool.submit(run.touched.record, *late)
            run.late = []
    run.publish()
    assert run.versions[-1][0].step == 21

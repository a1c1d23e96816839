"""Every loop of the guide, with a delta after every call: a server never has an old row."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from living_cases import mesh

import tpu_embed
from tpu_embed import DynamicVocabulary, FeatureConfig, HostStorage, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.data import Prefetcher
from tpu_embed.io import TouchedRows, export_delta
from tpu_embed.io.delta import delta_files

STEPS = 6
BRIEF, LATE = DynamicVocabulary(ttl=2), DynamicVocabulary(unseen="shared", admit_after=2)


def configs():
    """Return features of two living tables, of the same two on the host, and of two of ids."""
    home = {"storage": HostStorage(device_rows=9)}
    tables = [
        TableConfig(6, 2, name="brief", vocabulary=BRIEF),
        TableConfig(6, 2, name="brief home", vocabulary=BRIEF, **home),
        TableConfig(6, 2, name="late", vocabulary=LATE),
        TableConfig(6, 2, name="late home", vocabulary=LATE, **home),
        TableConfig(2**40, 2, name="ids home", **home),
        TableConfig(16, 2, name="ids"),
    ]
    return {table.name: FeatureConfig(table) for table in tables}


def draw(step):
    """Return keys, some of which are new in every batch, and some of which come back."""
    keys = np.random.default_rng(step).integers(0, 6, (6, 4)) + 2 * step % 11
    return dict(zip(configs(), keys, strict=True))


class Server:
    """What a server has that applies every delta, beside a trainer.

    Args:
      engine: the trainer's.
      root: a folder for deltas.
    """

    def __init__(self, engine, root):
        self.engine, self.root, self.numbers = engine, root, itertools.count()
        self.touched = TouchedRows(engine)
        self.version, self.rows = None, {name: {} for name in engine.table_configs}

    def record(self, features, step):
        self.touched.record(features, step)
        return features

    def follow(self, state):
        """Apply a delta, and compare every row with the trainer's, to the bit."""
        if self.version is None:
            self.version, self.rows = self.touched.version(state), self.live(state)
        path = self.root / f"{next(self.numbers)}"
        version = export_delta(path, self.engine, state, self.touched, self.version)
        for name, one in delta_files.read(path).tables.items():
            changed = one.arrays["ids" if one.unseen is None else "keys"]
            pairs = [*zip(changed, one.arrays["values"], strict=True)]
            pairs += [("shared", row) for row in one.arrays.get("shared", [])]
            self.rows[name] |= {key: row.tobytes() for key, row in pairs}
            for key in one.arrays.get("lost", []):
                self.rows[name].pop(key, None)
        self.version = version
        assert self.rows == self.live(state)

    def live(self, state):
        """Return the bits of all rows that the trainer has, by table, then by key or id."""
        found = {}
        for name, config in self.engine.table_configs.items():
            keys = rows = np.arange(16)  # all ids that batches have
            if config.vocabulary is not None:
                keys, rows = self.engine.vocabularies.keys(name)
                if config.vocabulary.unseen == "shared":
                    keys, rows = [*keys, "shared"], np.append(rows, config.vocabulary_size - 1)
            values = self.engine.rows(state, name, rows)
            found[name] = {key: row.tobytes() for key, row in zip(keys, values, strict=True)}
        return found


def gradients_of(activations, step):
    rng = np.random.default_rng([7, step])
    return jax.tree.map(lambda a: rng.normal(size=a.shape).astype(np.float32), activations)


def stateful(root, *, pipelined, ahead):
    """Train a `TPUEmbedding` with some batches enqueued, and recorded, before they are dequeued."""
    made = tpu_embed.TPUEmbedding(configs(), o.SGD(0.5), pipelined, mesh=mesh(1))
    made.build(4)
    server = Server(made.engine, root)
    server.follow(made.state)

    def enqueue(step):
        made.enqueue(draw(step))
        server.record(draw(step), step)
        server.follow(made.state)

    for step in range(1, 1 + ahead):
        enqueue(step)
    for step in range(1, STEPS + 1):
        enqueue(step + ahead)
        activations = made.dequeue()
        server.follow(made.state)
        made.apply_gradients(gradients_of(activations, step))
        server.follow(made.state)
    return made.engine


def functional(root, *, lookahead, placed_ahead=0):
    """Train by `place`, `admit` and `update`; batches are recorded when they are read."""
    engine = tpu_embed.EmbeddingEngine(configs(), o.SGD(0.5), mesh=mesh(1), lookahead=lookahead)
    state, server = engine.init(jax.random.key(0)), Server(engine, root)
    server.follow(state)
    read = (server.record(draw(step), step) for step in itertools.count(1))
    placed = map(engine.place, read)
    if placed_ahead:
        placed = iter(Prefetcher(engine, itertools.islice(read, STEPS), placed_ahead))
    admitted = []
    for step in range(1, STEPS + 1):
        while len(admitted) <= lookahead and (batch := next(placed, None)) is not None:
            server.follow(state)
            state, batch = engine.admit(state, batch)
            server.follow(state)
            admitted.append(batch)
        batch = admitted.pop(0)
        state = engine.update(state, batch, gradients_of(engine.lookup(state, batch), step))
        server.follow(state)
    return engine


def fitted(root):
    """Train by `fit`, which reads, and so records, ahead of its steps."""
    engine = tpu_embed.EmbeddingEngine(configs(), o.SGD(0.5), mesh=mesh(1))
    server = Server(engine, root)
    server.follow(engine.init(jax.random.key(0)))

    def loss(activations):
        return sum((jnp.sin(one) ** 2).sum() for one in activations.values())

    source = (server.record(draw(step), step) for step in range(1, STEPS + 1))
    report = {"report_every": 1, "callback": lambda report: server.follow(report.state)}
    tpu_embed.fit(engine, loss, source, **report, progress=False)
    return engine


LOOPS = {
    "stateful, enqueued ahead": lambda root: stateful(root, pipelined=False, ahead=3),
    "stateful": lambda root: stateful(root, pipelined=False, ahead=0),
    "pipelined": lambda root: stateful(root, pipelined=True, ahead=1),
    "functional": lambda root: functional(root, lookahead=0),
    "functional, admitted ahead": lambda root: functional(root, lookahead=1),
    "prefetched": lambda root: functional(root, lookahead=0, placed_ahead=2),
    "fit": fitted,
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.quick(4)
def test_a_server_that_follows_each_call_has_the_rows_of_the_trainer(loop, tmp_path):
    counters = LOOPS[loop](tmp_path).vocabularies.counters
    gone = {name: one["evicted"] + one["expired"] for name, one in counters.items()}
    assert min(one for name, one in gone.items() if name != "ids home") > 0, gone

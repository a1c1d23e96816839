"""A trainer with living tables and a server that follows it by deltas, at random."""

import functools
import itertools

import jax
import numpy as np
import pytest
from facade_cases import mesh

import tpu_embed
from tpu_embed import DynamicVocabulary, FeatureConfig, HostStorage, Jagged, TableConfig, io
from tpu_embed import optimizers as o

B = 8
KEYED = ("items", "more", "tags")


def configs(capacity=24, host=None):
    """Return features of three living tables, two of them in one stack with an ordinary one.

    Args:
      capacity: the rows of the table of items.
      host: the rows that the devices hold of it and of the tags; None: all.
    """
    storage, small = (host and HostStorage(device_rows=min(host, n)) for n in (capacity, 9))
    lru, lfu = DynamicVocabulary(ttl=3), DynamicVocabulary(evict="lfu")
    late = DynamicVocabulary(admit_after=2, unseen="shared")
    items = TableConfig(capacity, 4, name="items", vocabulary=lru, storage=storage)
    more = TableConfig(13, 4, name="more", combiner="sum", vocabulary=lfu)
    tags = TableConfig(9, 2, name="tags", vocabulary=late, storage=small, dtype="bfloat16")
    users = TableConfig(9, 4, name="users", combiner="sum")
    # A batch has up to nine of its ids; with a lookahead of 1, those of two batches have rows.
    far = TableConfig(2**40, 4, name="far", combiner="sum", storage=HostStorage(device_rows=18))
    extra = {} if host is None else {"far": FeatureConfig(far, on_bad_id="drop")}
    return extra | {
        "bags": FeatureConfig(items),
        "last": FeatureConfig(more, jagged=True, max_sequence_length=3),
        "seen": FeatureConfig(items, max_sequence_length=2),
        "tag": FeatureConfig(tags),
        "user": FeatureConfig(users),
    }


def keys_of(numbers):
    """Return keys of 64 bits, both signs, for small numbers; -1 stays padding."""
    keys = (numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
    return np.where(numbers < 0, -1, keys)


def draw(seed, step):
    """Return a batch in dense arrays, and its weights; keys drift with the step."""
    rng = np.random.default_rng([seed, step])

    def keys(shape, spread):
        numbers = rng.integers(0, spread, shape) + step // 2
        return keys_of(np.where(rng.random(shape) < 0.2, -1, numbers))

    last = keys((B, 3), 9)
    last[:, 1:][last[:, :1].repeat(2, 1) == -1] = -1  # jagged rows end with padding
    batch = {
        "bags": keys((B, 3), 16),
        "last": np.where(np.cumsum(last == -1, axis=1) > 0, -1, last),
        "seen": keys((B, 2), 16),
        "tag": keys((B,), 9),
        "user": rng.integers(0, 9, (B, 1)),
        "far": rng.integers(-2, 9, (B, 2)) * (2**36 + 7) + step // 2,
    }
    weights = dict.fromkeys(batch) | {"bags": rng.choice([0.5, 1, 2], (B, 3)).astype(np.float32)}
    return batch, weights


class World:
    """A trainer and a server.

    Args:
      root: a folder for files.
      seed: of everything.
      devices: of the first trainer.
      host: as for `configs`.
      lookahead: of the engines.
    """

    def __init__(self, root, seed, devices, host, lookahead):
        self.root, self.seed, self.host, self.lookahead = root, seed, host, lookahead
        self.keyed = KEYED if host is None else (*KEYED, "far")
        self.rng, self.names = np.random.default_rng(seed), itertools.count()
        self.placed, self.saves, self.served = 0, [], []
        self._start(devices, capacity=24)
        self.state = self.engine.init(jax.random.key(seed))
        for _ in range(2):
            self.train()
        self.model = self.export()

    def _start(self, devices, capacity):
        self.configs, self.capacity = configs(capacity, self.host), capacity
        options = {"mesh": mesh(devices), "lookahead": self.lookahead}
        self.engine = tpu_embed.EmbeddingEngine(self.configs, o.Adagrad(0.25), **options)
        self.touched, self.ahead = io.TouchedRows(self.engine), []

    def _start_elsewhere(self):
        """Make an engine of other devices and perhaps another capacity."""
        capacity = int(self.rng.choice([self.capacity, 15, 30]))
        self._start(int(self.rng.choice([1, 2, 8])), capacity)

    def draw(self, step):
        """Return a batch and its weights."""
        return ({name: one[name] for name in self.configs} for one in draw(self.seed, step))

    def path(self, what):
        return self.root / f"{what}-{next(self.names)}"

    # -- the trainer ---------------------------------------------------------------------------

    def train(self):
        """Train one step; with a lookahead, of the batch that was admitted before."""
        while len(self.ahead) <= self.lookahead:
            features, weights = self.draw(self.placed)
            batch = self.engine.place(features, weights)
            if self.rng.random() < 0.2:  # it is thrown away
                self.engine.vocabularies.rewind(self.state)
                batch = self.engine.place(features, weights)
            self.placed += 1
            which = self.rng.integers(5)
            if which == 4:  # before its keys have rows
                self.touched.record(features, int(self.state.step) + len(self.ahead) + 1)
            self.state, admitted = self.engine.admit(self.state, batch)
            self.ahead.append((features, batch, admitted, which))
        features, batch, admitted, which = self.ahead.pop(0)
        step = int(self.state.step) + 1
        if which == 0:
            self.touched.record(batch, step)
        shapes = jax.eval_shape(self.engine.lookup, self.state, admitted)
        rng = np.random.default_rng([self.seed, step])
        gradients = jax.tree.map(lambda a: rng.normal(size=a.shape).astype(a.dtype), shapes)
        self.state = self.engine.update_in_place(self.state, admitted, gradients)
        if 0 < which < 4:
            self.touched.record(features if which == 1 else admitted, step)

    def keys(self, name):
        """Return the keys of a table and their rows, or the ids of the far table twice."""
        if name == "far":
            ids = self.engine.touched(name)
            return ids.view(np.uint64), ids
        return self.engine.vocabularies.keys(name)

    def edit(self):
        """Set the rows of some keys."""
        name = self.keyed[self.rng.integers(len(self.keyed))]
        keys, rows = self.keys(name)
        if not keys.size:
            return
        at = np.unique(self.rng.integers(0, keys.size, 2))
        dim = self.engine.table_configs[name].dim
        values = self.rng.normal(size=(at.size, dim)).astype(np.float32)
        self.state = self.engine.set_rows(self.state, name, rows[at], values)
        step = int(self.state.step)
        if name == "far" or self.rng.random() < 0.5:
            self.touched.record_rows(name, rows[at], step)
        else:
            self.touched.record_rows(name, None, step, keys=keys[at])

    def save(self):
        """Save, and remember what the server had; batches that are admitted ahead are lost."""
        path = self.path("save")
        io.save(path, self.engine, self.state, position=self.placed, touched=self.touched)
        self.saves.append((path, [*self.served], self.capacity))

    def kill(self):
        """Go on from the last save, with other devices and perhaps another capacity."""
        if not self.saves:
            return
        path, served, self.capacity = self.saves[-1]
        self._start_elsewhere()
        restored = io.restore(path, self.engine, touched=self.touched)
        self.state, self.placed = restored.state, restored.position
        if not self.touched.lineage.has(self.model.version):
            model, self.served = io.load_model(self.root / "model-0"), [*served]
            for one in served:  # what it was at the time of the save
                model = model.apply(one)
            delta = self.path("delta")
            io.export_delta(delta, self.engine, self.state, self.touched, model.version)
            _refused(self.model, delta)
            self.model = model

    def move(self):
        """Go on in an engine of other devices and perhaps another capacity, without a file."""
        engine, state, saved = self.engine, self.state, self.touched.saved(self.state)
        self._start_elsewhere()
        self.state = self.engine.adopt(state, engine)
        self.touched.load(saved)

    # -- the server ----------------------------------------------------------------------------

    def tables(self):
        """Return what the tables are served from."""
        found = {}
        for name, config in self.engine.table_configs.items():
            rows = functools.partial(self.engine.rows, self.state, name)
            found[name] = rows if config.storage else rows(np.arange(config.vocabulary_size))
        far = {"far": io.host_table(self.engine, self.state, "far")} if "far" in found else {}
        return found | far

    def export(self):
        """Return a served model of all that there is now."""
        (features, weights), path = self.draw(0), self.path("model")
        options = {"weights": weights, "version": self.touched.version(self.state)}
        options["vocabularies"] = self.engine.vocabularies
        io.export_model(path, lambda a: a, self.tables(), self.configs, features, **options)
        return io.load_model(path)

    def follow(self):
        """Export a delta, and let the server apply it."""
        path, before = self.path("delta"), self.model
        version = io.export_delta(path, self.engine, self.state, self.touched, self.model.version)
        if version == before.version:
            return _refused(before, path)
        in_place = self.rng.random() < 0.5
        self.model = before.apply_in_place(path) if in_place else before.apply(path)
        self.served.append(path)
        assert self.model.version == version
        _refused(self.model, path)
        return self.check()

    def check(self):
        """Compare the server's keys, rows and answers with the trainer's."""
        for name in self.keyed:
            keys, rows = self.keys(name)
            order = np.argsort(keys)
            served, at = self.model.keys(name)
            np.testing.assert_array_equal(served, keys[order])
            if keys.size:
                live = self.engine.rows(self.state, name, rows[order])
                here = np.asarray(self.model.tables[name]["values"])[at]
                assert here.tobytes() == live.tobytes(), name
        features, weights = self.draw(self.placed + 1)
        given, maps = (self.tables(), features, self.configs, weights), self.engine.vocabularies
        expected = io.serving_lookup(*given, vocabularies=maps)
        same(self.model(features, weights=weights), expected)


def same(one, other):
    """Compare two answers to the bit; a `Jagged` may have room behind its rows."""

    def bits(found):
        parts = found.to_list() if isinstance(found, Jagged) else [np.asarray(found)]
        return [(part.shape, part.tobytes()) for part in parts]

    assert one.keys() == other.keys()
    for name in one:
        assert bits(one[name]) == bits(other[name]), name


def _refused(model, path):
    with pytest.raises(ValueError):
        model.apply(path)

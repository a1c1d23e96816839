"""Random runs of an engine with tables on the host beside one whose tables are on the devices."""

import collections
import dataclasses

import jax
import numpy as np
import pytest
from facade_cases import mesh

import tpu_embed
from tpu_embed import FeatureConfig, HostStorage, Jagged, RaggedIds, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.core.state import rule_slots

RATES = {"SGD": 0.5, "Adagrad": 0.3, "Adam": 0.1, "FTRL": 0.2, "RowWiseAdagrad": 0.3}
RULES = {name: getattr(o, name)(rate) for name, rate in RATES.items()}
ITEMS, TAGS, BATCH = 150, 90, 8


def declared(rule, storage=None, *, dim=4, living=None, **options):
    """Return features of two tables that share a stack, and of one that is on the devices.

    Args:
      rule: their optimizer.
      storage: of the two tables; None: they are on the devices, too.
      dim: D.
      living: of the second table, if its ids are keys: its vocabulary, how many keys have a row,
        and how many of these the devices hold; or None.
      options: of the two tables.
    """
    vocabulary, size, rows = living or (None, TAGS, 0)
    of_tags = storage and dataclasses.replace(storage, device_rows=rows or storage.device_rows)
    options |= {"optimizer": rule, "initializer": jax.nn.initializers.normal(0.3)}
    items = TableConfig(ITEMS, dim, name="items", storage=storage, **options)
    options |= {"storage": of_tags, "vocabulary": vocabulary, "combiner": "sum"}
    tags = TableConfig(size, dim, name="tags", **options)
    users = TableConfig(9, dim, name="users", optimizer=o.SGD(0.5))
    return {
        "bags": FeatureConfig(items, on_bad_id="drop"),
        "seen": FeatureConfig(items, max_sequence_length=2, on_bad_id="clip"),
        "jagged": FeatureConfig(tags, jagged=True),
        "user": FeatureConfig(users),
    }


def draw_batch(rng, size=BATCH, tags=TAGS):
    """Return features and weights, with padding, bad ids and empty bags among them.

    Args:
      rng: draws them.
      size: of the batch.
      tags: how many ids or keys of the second table there are.
    """

    def ids(shape, rows):
        # Some ids come again and again, others hardly ever.
        often = rng.random(shape) < 0.5
        return np.where(often, rng.integers(0, 12, shape), rng.integers(0, rows, shape))

    bags, seen = ids((size, 3), ITEMS), ids((size, 3), ITEMS)
    bags[rng.random(bags.shape) < 0.2] = -1
    bags[rng.random(bags.shape) < 0.05] = ITEMS + 3
    seen[rng.random(seen.shape) < 0.05] = -7
    splits = np.concatenate([[0], np.cumsum(rng.integers(0, 4, size))])
    jagged = RaggedIds(ids(int(splits[-1]), tags), splits)
    features = {"bags": bags, "seen": seen, "jagged": jagged, "user": rng.integers(0, 9, size)}
    if rng.random() >= 0.5:
        return features, None
    return features, {**dict.fromkeys(features), "bags": np.float32(rng.random(bags.shape))}


def rows_of(activation):
    """Return an activation; of a `Jagged` its rows, whatever room there is behind them."""
    jagged = isinstance(activation, Jagged)
    return np.concatenate(activation.to_list()) if jagged else np.asarray(activation)


def gradients_of(activations, seed):
    """Return gradients that do not depend on the room behind the rows of a `Jagged`."""
    rng, made = np.random.default_rng(seed), {}
    for name, one in sorted(activations.items()):
        made[name] = drawn = rng.normal(size=rows_of(one).shape).astype(np.float32)
        if isinstance(one, Jagged):
            made[name] = np.zeros(one.values.shape, np.float32)
            here = np.arange(one.values.shape[1]) < np.asarray(one.row_splits)[:, -1:]
            made[name][here] = drawn
    return made


class TwoRuns:
    """The same run in two engines: whatever they return must be equal, bit for bit.

    A subclass has `draw`, which returns the arguments of `place`.

    Args:
      engines: the two.
      seed: of the run.
    """

    def __init__(self, engines, seed):
        self.engines, self.rng = [*engines], np.random.default_rng(seed)
        self.states = [engine.init(jax.random.key(seed)) for engine in engines]
        self.placed, self.admitted = collections.deque(), collections.deque()
        self.counts = collections.Counter()

    @property
    def both(self):
        """The engines with their states."""
        return [*zip(self.engines, self.states, strict=True)]

    def place(self):
        given = self.draw()
        self.placed.append([engine.place(*given) for engine in self.engines])
        for one in self.placed[-1][0].keys.incoming.values():
            self.counts["late rows"] += int((one.awaited > 0).sum())

    def admit(self):
        if len(self.admitted) > self.engines[0].vocabularies.lookahead:
            self.update()
        if self.placed:
            pairs = zip(self.both, self.placed.popleft(), strict=True)
            admitted = [engine.admit(state, batch) for (engine, state), batch in pairs]
            self.states, batches = map(list, zip(*admitted, strict=True))
            self.admitted.append(batches)

    def update(self):
        if not self.admitted:
            return
        batches = self.admitted.popleft()
        found, seed = self.compare(batches), int(self.rng.integers(2**31))
        self.states = [
            engine.update_in_place(state, batch, gradients_of(activations, seed))
            for (engine, state), batch, activations in zip(self.both, batches, found, strict=True)
        ]
        self.counts["updates"] += 1

    def compare(self, batches):
        pairs = zip(self.both, batches, strict=True)
        found, expected = (engine.lookup(state, batch) for (engine, state), batch in pairs)
        for name, one in expected.items():
            np.testing.assert_array_equal(rows_of(found[name]), rows_of(one))
        return found, expected

    def rewind(self):
        for engine, state in self.both:
            if engine.vocabularies is not None:
                engine.vocabularies.rewind(state)
        self.placed.clear()

    def finish(self):
        while self.placed or self.admitted:
            self.admit()
            self.update()


class TwoEngines(TwoRuns):
    """A run with tables on the host, and beside it one whose tables are on the devices."""

    def __init__(self, hosted, resident, seed):
        super().__init__((hosted, resident), seed)
        self.kept, self.lives = [], resident.vocabularies is not None
        self.tags = 2 * TAGS if self.lives else TAGS

    @property
    def hosted(self):
        return self.engines[0]

    def draw(self):
        return draw_batch(self.rng, tags=self.tags)

    def place_too_much(self):
        maps = self.hosted.vocabularies
        before = maps.placed, maps.counters
        if self.hosted.table_configs["items"].device_rows >= 120:
            return
        features, _ = draw_batch(self.rng)
        features["bags"] = np.arange(BATCH * 15).reshape(BATCH, 15)
        with pytest.raises(ValueError):
            self.hosted.place(features)
        assert before == (maps.placed, maps.counters)

    def evaluate(self):
        given = draw_batch(self.rng, BATCH * int(self.rng.integers(1, 3)), self.tags)
        batches = [engine.place(*given, training=False) for engine in self.engines]
        self.compare(batches)
        self.counts["visits"] += batches[0].visit_rows > 0
        self.kept = [*self.kept[-2:], batches]

    def evaluate_again(self):
        for batches in self.kept:
            try:
                self.hosted.lookup(self.states[0], batches[0])
            except ValueError as error:
                assert "again" in str(error)  # noqa: PT017
                self.counts["refused"] += 1
            else:
                self.compare(batches)
                self.counts["looked up again"] += 1

    def rows_of(self, name):
        """Return the rows of a table that somebody can look up."""
        if name == "tags" and self.lives:
            one, other = (engine.vocabularies for engine in self.engines)
            jax.tree.map(np.testing.assert_array_equal, one.keys(name), other.keys(name))
            assert one.admitted_counters[name] == other.admitted_counters[name]
            return one.keys(name)[1]
        return np.arange({"items": ITEMS, "tags": TAGS}[name])

    def parts(self, name):
        """Return None, for the values of a table, and the names of its slots by row."""
        shapes = rule_slots(self.hosted.layout.table(name)[0])
        return [None, *sorted(n for n, one in shapes.items() if one.per_row)]

    def read_rows(self, *given, **options):
        """Return what both engines have as rows, which is the same."""
        one, other = (engine.rows(state, *given, **options) for engine, state in self.both)
        np.testing.assert_array_equal(one, other)
        return one

    def read(self):
        for name in ("items", "tags"):
            ids = self.rng.permutation(self.rows_of(name))[:40]
            for slot in self.parts(name):
                self.read_rows(name, ids, slot=slot)

    def set_rows(self):
        if self.placed:
            return
        name = ("items", "tags")[self.rng.integers(2)]
        slot = self.rng.choice(np.array(self.parts(name), object))
        ids = self.rng.permutation(self.rows_of(name))[:6]
        shape = self.read_rows(name, ids, slot=slot).shape
        values = np.float32(self.rng.random(shape))
        self.states = [e.set_rows(state, name, ids, values, slot=slot) for e, state in self.both]

    def set_rows_by_key(self):
        """Give keys of the living table rows and values; both engines do, or both refuse."""
        if self.placed or not self.lives:
            return
        while self.admitted:
            self.update()
        keys = self.rng.permutation(self.tags)[: self.rng.integers(1, 25)]
        slot = self.rng.choice(np.array(self.parts("tags"), object))
        width = self.hosted.rows(self.states[0], "tags", [0], slot=slot).shape[1:]
        values = np.float32(self.rng.random((keys.size, *width)))
        said, new = [], []
        for made, state in self.both:
            try:
                new.append(made.set_rows(state, "tags", keys=keys, values=values, slot=slot))
            except ValueError as error:
                said.append(str(error))
        assert (len(said), len(set(said))) in ((0, 0), (2, 1))
        self.counts["keys refused" if said else "keys set"] += 1
        if new:
            self.states = new
            found = self.read_rows("tags", keys=keys, slot=slot)
            np.testing.assert_array_equal(found, values.astype(found.dtype))

    def run(self, steps):
        """Take random steps, then finish what waits and compare every row."""
        ways = [self.place] * 4 + [self.admit] * 4 + [self.update] * 3
        ways += [self.evaluate, self.evaluate_again, self.rewind, self.place_too_much, self.read]
        ways += [self.set_rows] + [self.set_rows_by_key] * 2 * self.lives
        for _ in range(steps):
            if len(self.placed) > 3:
                self.admit()
            ways[self.rng.integers(len(ways))]()
        self.finish()
        self.read()
        if self.lives:
            self.counts |= self.hosted.vocabularies.counters["tags"]
        return self.counts


def engines(devices, rule, evict="lru", lookahead=1, rows=90, groups=None, exchange=None, **rest):
    """Return an engine with tables on the host, and one with the same tables on the devices."""
    shared = {"mesh": mesh(devices), "lookahead": lookahead, "exchange_dtype": exchange}
    return [
        tpu_embed.EmbeddingEngine(declared(RULES[rule], storage, **rest), **shared)
        for storage in (HostStorage(device_rows=rows, evict=evict, groups=groups), None)
    ]

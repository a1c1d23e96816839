"""Random runs of an engine with tables on the host beside one whose tables are on the devices."""

import collections
import contextlib
import dataclasses

import jax
import numpy as np

import tpu_embed
from tpu_embed import FeatureConfig, Jagged, RaggedIds, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.core.state import rule_slots
from tpu_embed.storage import HostStorage

RULES = {
    "SGD": o.SGD(0.5),
    "Adagrad": o.Adagrad(0.3),
    "Adam": o.Adam(0.1),
    "FTRL": o.FTRL(0.2),
    "RowWiseAdagrad": o.RowWiseAdagrad(0.3),
}
ITEMS, TAGS, BATCH = 150, 90, 8


def declared(rule, storage=None, *, dtype="float32", dim=4, living=None, rounding="nearest"):
    """Return features of two tables that share a stack, and of one that is on the devices.

    Args:
      rule: their optimizer.
      storage: of the two tables; None: they are on the devices, too.
      dtype: of their rows.
      dim: D.
      living: of the second table, if its ids are keys: its vocabulary, how many keys have a row,
        and how many of these the devices hold; or None.
      rounding: of the two tables.
    """
    vocabulary, size, rows = living or (None, TAGS, 0)
    of_tags = storage and dataclasses.replace(storage, device_rows=rows or storage.device_rows)
    drawn = jax.nn.initializers.normal(0.3)
    made = {"storage": storage, "optimizer": rule, "dtype": dtype, "initializer": drawn}
    made["rounding"] = rounding
    items = TableConfig(ITEMS, dim, name="items", **made)
    of_keys = {**made, "storage": of_tags, "vocabulary": vocabulary}
    tags = TableConfig(size, dim, name="tags", combiner="sum", **of_keys)
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

    bags = ids((size, 3), ITEMS)
    bags[rng.random(bags.shape) < 0.2] = -1
    bags[rng.random(bags.shape) < 0.05] = ITEMS + 3
    seen = ids((size, 3), ITEMS)
    seen[rng.random(seen.shape) < 0.05] = -7
    lengths = rng.integers(0, 4, size)
    values = ids(int(lengths.sum()), tags)
    features = {
        "bags": bags,
        "seen": seen,
        "jagged": RaggedIds(values, np.concatenate([[0], np.cumsum(lengths)])),
        "user": rng.integers(0, 9, size),
    }
    weights = None
    if rng.random() < 0.5:
        weights = {**dict.fromkeys(features), "bags": rng.random(bags.shape).astype(np.float32)}
    return features, weights


def rows_of(activation):
    """Return an activation; of a `Jagged` its rows, whatever room there is behind them."""
    if not isinstance(activation, Jagged):
        return np.asarray(activation)
    parts = zip(np.asarray(activation.values), np.asarray(activation.row_splits), strict=True)
    return np.concatenate([values[: splits[-1]] for values, splits in parts])


def gradients_of(activations, seed):
    """Return gradients that do not depend on the room behind the rows of a `Jagged`."""
    rng, made = np.random.default_rng(seed), {}
    for name, one in sorted(activations.items()):
        drawn = rng.normal(size=rows_of(one).shape).astype(np.float32)
        made[name] = drawn
        if isinstance(one, Jagged):
            made[name] = np.zeros(one.values.shape, np.float32)
            first = 0
            for part, splits in zip(made[name], np.asarray(one.row_splits), strict=True):
                part[: splits[-1]] = drawn[first : first + splits[-1]]
                first += splits[-1]
    return made


@dataclasses.dataclass
class Ahead:
    """A training batch that waits: for being admitted, or for its update."""

    hosted: object
    resident: object
    gradients: int


class TwoEngines:
    """The same run on both engines: whatever they return must be equal, bit for bit.

    Args:
      hosted: the engine with tables on the host.
      resident: the engine whose tables are on the devices.
      seed: of the run.
    """

    def __init__(self, hosted, resident, seed):
        self.hosted, self.resident = hosted, resident
        self.rng = np.random.default_rng(seed)
        key = jax.random.key(seed)
        self.states = [hosted.init(key), resident.init(key)]
        self.placed, self.admitted = collections.deque(), collections.deque()
        self.kept = []
        self.counts = collections.Counter()
        self.lives = resident.vocabularies is not None
        self.tags = 2 * TAGS if self.lives else TAGS

    def place(self):
        given = draw_batch(self.rng, tags=self.tags)
        hosted = self.hosted.place(*given)
        late = sum(int((one.awaited > 0).sum()) for one in hosted.keys.incoming.values())
        self.counts["late rows"] += late
        self.placed.append(Ahead(hosted, self.resident.place(*given), len(self.placed)))

    def place_too_much(self):
        maps = self.hosted.vocabularies
        before = maps.placed, maps.counters
        if self.hosted.table_configs["items"].device_rows >= 120:
            return
        features, _ = draw_batch(self.rng)
        features["bags"] = np.arange(BATCH * 15).reshape(BATCH, 15)
        with contextlib.suppress(ValueError):
            self.hosted.place(features)
            raise AssertionError("it has more rows than the devices have room for")
        assert before == (maps.placed, maps.counters)

    def admit(self):
        if len(self.admitted) > self.hosted.vocabularies.lookahead:
            self.update()
        if self.placed:
            one = self.placed.popleft()
            self.states[0], one.hosted = self.hosted.admit(self.states[0], one.hosted)
            self.states[1], one.resident = self.resident.admit(self.states[1], one.resident)
            self.admitted.append(one)

    def update(self):
        if not self.admitted:
            return
        one = self.admitted.popleft()
        found = self.compare(one.hosted, one.resident)
        seed = int(self.rng.integers(2**31))
        gradients = [gradients_of(activations, seed) for activations in found]
        pair = self.hosted, self.resident
        batches = one.hosted, one.resident
        self.states = [
            engine.update_in_place(*some)
            for engine, *some in zip(pair, self.states, batches, gradients, strict=True)
        ]
        self.counts["updates"] += 1

    def compare(self, hosted, resident):
        found = self.hosted.lookup(self.states[0], hosted)
        expected = self.resident.lookup(self.states[1], resident)
        for name in expected:
            one, other = (rows_of(some[name]) for some in (found, expected))
            np.testing.assert_array_equal(one, other)
        return found, expected

    def evaluate(self):
        given = draw_batch(self.rng, BATCH * int(self.rng.integers(1, 3)), self.tags)
        pair = self.hosted, self.resident
        batches = [engine.place(*given, training=False) for engine in pair]
        self.compare(*batches)
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
                self.compare(*batches)
                self.counts["looked up again"] += 1

    def rewind(self):
        self.hosted.vocabularies.rewind(self.states[0])
        if self.lives:
            self.resident.vocabularies.rewind(self.states[1])
        self.placed.clear()

    def rows_of(self, name):
        """Return the rows of a table that somebody can look up."""
        if name == "tags" and self.lives:
            pair = self.hosted, self.resident
            (keys, rows), others = (engine.vocabularies.keys(name) for engine in pair)
            np.testing.assert_array_equal(keys, others[0])
            np.testing.assert_array_equal(rows, others[1])
            counts = [engine.vocabularies.admitted_counters[name] for engine in pair]
            assert counts[0] == counts[1]
            return rows
        return np.arange({"items": ITEMS, "tags": TAGS}[name])

    def read(self):
        for name in ("items", "tags"):
            ids = self.rng.permutation(self.rows_of(name))[:40]
            shapes = rule_slots(self.hosted.layout.table(name)[0])
            for slot in (None, *(n for n, one in shapes.items() if one.per_row)):
                pair = zip((self.hosted, self.resident), self.states, strict=True)
                one, other = (e.rows(state, name, ids, slot=slot) for e, state in pair)
                np.testing.assert_array_equal(one, other)

    def set_rows(self):
        if self.placed:
            return
        name = ("items", "tags")[self.rng.integers(2)]
        shapes = rule_slots(self.hosted.layout.table(name)[0])
        every = [None, *sorted(n for n, one in shapes.items() if one.per_row)]
        slot = every[self.rng.integers(len(every))]
        ids = self.rng.permutation(self.rows_of(name))[:6]
        shape = self.hosted.rows(self.states[0], name, ids, slot=slot).shape
        values = self.rng.random(shape).astype(np.float32)
        pair = zip((self.hosted, self.resident), self.states, strict=True)
        self.states = [e.set_rows(state, name, ids, values, slot=slot) for e, state in pair]

    def set_rows_by_key(self):
        """Give keys of the living table rows and values; both engines do, or both refuse."""
        if self.placed or not self.lives:
            return
        while self.admitted:
            self.update()
        keys = self.rng.permutation(self.tags)[: self.rng.integers(1, 25)]
        shapes = rule_slots(self.hosted.layout.table("tags")[0])
        every = [None, *sorted(n for n, one in shapes.items() if one.per_row)]
        slot = every[self.rng.integers(len(every))]
        width = self.hosted.rows(self.states[0], "tags", [0], slot=slot).shape[1:]
        values = self.rng.random((keys.size, *width)).astype(np.float32)
        pair = zip((self.hosted, self.resident), self.states, strict=True)
        said, new = [], []
        for made, state in pair:
            try:
                new.append(made.set_rows(state, "tags", keys=keys, values=values, slot=slot))
            except ValueError as error:
                said.append(str(error))
        assert len(said) in (0, 2)
        assert len(set(said)) < 2
        self.counts["keys refused" if said else "keys set"] += 1
        if new:
            self.states = new
            pair = zip((self.hosted, self.resident), self.states, strict=True)
            one, other = (e.rows(state, "tags", keys=keys, slot=slot) for e, state in pair)
            np.testing.assert_array_equal(one, values.astype(one.dtype))
            np.testing.assert_array_equal(one, other)

    def run(self, steps):
        """Take random steps, then finish what waits and compare every row."""
        ways = [self.place] * 4 + [self.admit] * 4 + [self.update] * 3
        ways += [self.evaluate, self.evaluate_again, self.rewind, self.place_too_much, self.read]
        ways += [self.set_rows] + [self.set_rows_by_key] * 2 * self.lives
        for _ in range(steps):
            if len(self.placed) > 3:
                self.admit()
            ways[self.rng.integers(len(ways))]()
        while self.placed or self.admitted:
            self.admit()
            self.update()
        self.read()
        if self.lives:
            self.counts |= self.hosted.vocabularies.counters["tags"]
        return self.counts


def engines(
    devices, rule, evict="lru", lookahead=1, rows=90, groups=None, exchange=None, **options
):
    """Return an engine with tables on the host, and one with the same tables on the devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("d",))
    storage = HostStorage(device_rows=rows, evict=evict, groups=groups)
    on_host, resident = (declared(RULES[rule], one, **options) for one in (storage, None))
    shared = {"mesh": mesh, "lookahead": lookahead, "exchange_dtype": exchange}
    hosted = tpu_embed.EmbeddingEngine(on_host, **shared)
    return hosted, tpu_embed.EmbeddingEngine(resident, **shared)

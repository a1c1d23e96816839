"""Rows by key beside a plain model: dictionaries of values, and a map in plain Python.

The random test places batches, admits and updates them, throws them away, and gives keys rows in
between. A model knows the row of every key, its values and its accumulators; engines on 1 and on 8
devices must agree with it about every key, after every call.

    BY_KEY_SEEDS=0:100 python -m pytest tests/core/test_rows_by_key.py -k many
"""

import collections
import copy
import functools
import os

import jax
import numpy as np
import pytest
from living_cases import KEY, initial_row, mesh
from oracle_vocabulary import VocabularyOracle

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.vocabulary import DynamicVocabulary, KeyScores

CASES = {
    "one device": (1, {"admit_after": 2, "evict": "lfu"}, 0),
    "eight devices": (8, {"admit_after": 3, "ttl": 4}, 1),
    "nobody is evicted": (1, {"evict": "none", "ttl": 6, "unseen": "shared"}, 2),
}
MANY = range(*map(int, os.environ.get("BY_KEY_SEEDS", "10:16").split(":")))
CAPACITY, BATCH, SPREAD, RATE = 11, 8, 24, 0.5
START = np.float32(0.1)  # of Adagrad's accumulators


@functools.cache
def engine_of(case):
    """Return an engine of a living table, and of one that shares its stack and has no keys."""
    devices, options, lookahead = CASES[case]
    table = TableConfig(CAPACITY, 2, name="t", vocabulary=DynamicVocabulary(**options))
    users = TableConfig(5, 2, name="users")
    features = {"x": FeatureConfig(table), "user": FeatureConfig(users)}
    options = {"mesh": mesh(devices), "lookahead": lookahead}
    return tpu_embed.EmbeddingEngine(features, o.Adagrad(RATE), **options)


class Model:
    """An engine, and what plain Python expects of it."""

    def __init__(self, case, seed):
        self.rng, self.engine = np.random.default_rng(seed), engine_of(case)
        _, options, self.lookahead = CASES[case]
        options = {"waiting": 4 * CAPACITY, "lookahead": self.lookahead} | options
        rows = CAPACITY - (options.pop("unseen", None) == "shared")
        self.state = self.engine.init(jax.random.key(KEY))
        self.engine.vocabularies.rewind(self.state)
        # After the admitted step, and after each that was placed since.
        self.oracles = [VocabularyOracle(rows, **options)]
        self.values, self.sums = {}, {}  # by key
        self.placed, self.admitted = collections.deque(), collections.deque()
        self.counts = collections.Counter()

    def place(self):
        if len(self.placed) > 2:
            return
        keys = self.rng.integers(0, SPREAD, BATCH)
        batch = self.engine.place({"x": keys, "user": keys % 5})
        self.oracles.append(copy.deepcopy(self.oracles[-1]))
        new = self.oracles[-1].take(keys.tolist())[1]
        self.placed.append((batch, keys.tolist(), [key for key, _ in new]))

    def admit(self):
        if self.placed:
            self.make_way()
            batch, keys, new = self.placed.popleft()
            self.state, batch = self.engine.admit(self.state, batch)
            before = self.oracles.pop(0)
            self.begin(new)
            counts = collections.Counter(key for key in keys if key in self.oracles[0].row_of)
            self.admitted.append((self.oracles[0].step, batch, counts))
            self.check_last(before, new)

    def make_way(self):
        """Apply the updates that are due before one more step; later, rows may be others'."""
        last = self.oracles[0].step + 1 - self.lookahead
        while self.admitted and self.admitted[0][0] < last:
            self.update()

    def begin(self, new):
        """Give new keys fresh rows; forget those that have none any more."""
        table = self.engine.table_configs["t"]
        for key in new:
            self.values[key] = initial_row(table, key)
            self.sums[key] = np.full(2, START)
        for key in set(self.values) - set(self.oracles[0].row_of):
            del self.values[key], self.sums[key]

    def update(self):
        if not self.admitted:
            return
        step, batch, counts = self.admitted.popleft()
        self.counts["late update"] += self.oracles[0].step > step
        activations = self.engine.lookup(self.state, batch)
        gradients = jax.tree.map(lambda a: np.ones(a.shape, np.float32), activations)
        self.state = self.engine.update(self.state, batch, gradients)
        for key, count in counts.items():
            self.sums[key] = self.sums[key] + np.float32(count * count)
            self.values[key] = self.values[key] - RATE * count / np.sqrt(self.sums[key])

    def rewind(self):
        self.engine.vocabularies.rewind(self.state)
        self.placed.clear()
        del self.oracles[1:]

    def set_rows(self):
        keys = self.rng.permutation(SPREAD)[: self.rng.integers(1, 8)]
        slot = "accumulators" if self.rng.random() < 0.3 else None
        values = self.rng.integers(1, 100, (keys.size, 2)).astype(np.float32)
        call = self.engine.set_rows if self.rng.random() < 0.7 else self.load
        self.make_way()
        given = functools.partial(call, self.state, "t", values=values, keys=keys, slot=slot)
        if self.placed:
            self.refused(given, "no batch placed ahead")
            return
        after = copy.deepcopy(self.oracles[0])
        rows, new, _ = after.take(keys.tolist(), at_once=True)
        if -1 in rows.values():
            enough = list(rows.values()).count(-1)
            self.refused(given, f"at most {keys.size - enough} of these keys")
            return
        before, self.oracles = self.oracles[0], [after]
        old = self.state.tables, self.state.slots
        held = jax.tree.map(np.array, old)
        self.state = given()
        jax.tree.map(np.testing.assert_array_equal, old, held)
        self.begin([key for key, _ in new])
        for key, row in zip(keys.tolist(), values, strict=True):
            (self.values if slot is None else self.sums)[key] = row
        evicted = self.check_last(before, [key for key, _ in new])
        known = keys.size - len(new)
        self.counts.update({"set": 1, "new": len(new), "known": known, "evicting": evicted})

    def load(self, state, name, values, keys, slot):
        cut = len(keys) // 2
        return self.engine.load(state, name, [values[:cut], values[cut:]], keys=keys, slot=slot)

    def refused(self, call, said):
        maps = self.engine.vocabularies
        before = maps.placed, maps.admitted, maps.counters
        with pytest.raises(ValueError, match=said):
            call()
        assert (maps.placed, maps.admitted, maps.counters) == before
        self.counts[said.split()[1]] += 1

    def check_last(self, before, new):
        """Compare which keys came and went with the map; return how many were evicted."""
        last, now = self.engine.vocabularies.last["t"], self.oracles[0]
        gone = [key for key in before.row_of if key not in now.row_of]
        assert (last.step, last.admitted.tolist()) == (now.step, new)
        assert sorted([*last.evicted.tolist(), *last.expired.tolist()]) == sorted(gone)
        assert all(before.last[before.row_of[k]] < now.step - 1 for k in last.expired.tolist())
        counts = {"expired": last.expired.size, "evicted": last.evicted.size, "unseen": last.unseen}
        assert counts == {n: now.counters[n] - before.counters[n] for n in counts}
        return last.evicted.size

    def check(self):
        """Compare every key of the state with the model."""
        maps, oracle = self.engine.vocabularies, self.oracles[0]
        expected, scores = oracle.state(), maps.scores("t")
        for field in KeyScores._fields[:-1]:
            assert getattr(scores, field).tolist() == expected[field], field
        assert scores.ages.tolist() == [oracle.step - last for last in expected["last_seen"]]
        keys = np.array(expected["keys"], np.int64)
        assert maps.rows_of("t", keys).tolist() == expected["rows"]
        # What the compiled rule does to a value may round otherwise than NumPy.
        values = self.engine.rows(self.state, "t", keys=keys)
        np.testing.assert_allclose(values, [*map(self.values.get, keys)] or values, rtol=1e-5)
        sums = self.engine.rows(self.state, "t", keys=keys, slot="accumulators")
        np.testing.assert_array_equal(sums, [*map(self.sums.get, keys)] or sums)
        unknown = [key for key in range(SPREAD) if key not in oracle.row_of]
        if unknown:
            with pytest.raises(ValueError, match=f"got {unknown[0]} "):
                self.engine.rows(self.state, "t", keys=[*keys.tolist(), *unknown])

    def run(self, operations):
        ways = [self.place] * 5 + [self.admit] * 6 + [self.update] * 3 + [self.set_rows] * 6
        ways += [self.rewind]
        for _ in range(operations):
            ways[self.rng.integers(len(ways))]()
            self.check()
        return self.counts


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick(1)
def test_rows_by_key_beside_a_model(case):
    counts = Model(case, seed=4).run(60)
    wanted = ["set", "new", "known", "batch", *(["late update"] if CASES[case][2] else [])]
    wanted += ["evicting"] if case != "nobody is evicted" else ["most"]
    assert min(counts[name] for name in wanted) > 0, counts


@pytest.mark.whole
@pytest.mark.parametrize("seed", MANY)
def test_many(seed):
    Model([*CASES][seed % 3], seed).run(80)

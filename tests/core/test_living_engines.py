"""Several engines with dynamic vocabularies: states and batches of one are not taken for another's.

The random test does what people do, and what they do by mistake: two engines with maps of their
own and a third that shares those of the first; states and batches go to any of them, in a jit and
outside. A model knows the value of every key in every state. A lookup or update is right by the
model, or it is refused: an error, or in a jit NaN and a step that is skipped and counted.

    LIVING_SEEDS=0:300 python -m pytest tests/core/test_living_engines.py -k many
"""

import collections
import functools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from living_cases import KEY, ONES, ids, initial_row, mesh, simple

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig, io
from tpu_embed import optimizers as o
from tpu_embed.data import Prefetcher
from tpu_embed.vocabulary import DynamicVocabulary

FEW = range(4)
MANY = range(*map(int, os.environ.get("LIVING_SEEDS", "4:20").split(":")))
CAPACITY, OPERATIONS = 4, 25
REFUSED = "admit|placed since the maps|of other maps|place it again"


@functools.cache
def engines(evict):
    """Return two engines and one that shares the maps of the first, each with jitted programs."""
    found = []
    for shares in (None, None, 0):
        table = TableConfig(CAPACITY, 2, name="t", vocabulary=DynamicVocabulary(evict=evict))
        maps = None if shares is None else found[shares][0].vocabularies
        options = {"mesh": mesh(1), "vocabularies": maps}
        made = tpu_embed.EmbeddingEngine({"x": FeatureConfig(table)}, o.SGD(1.0), **options)
        step = functools.partial(lambda made, *args: made.update(*args, ONES), made)
        found.append((made, jax.jit(made.lookup), jax.jit(step)))
    return found


Known = collections.namedtuple("Known", ["state", "values"])
"""A state, and the values of its keys."""
Placed = collections.namedtuple("Placed", ["batch", "keys", "seen"])
"""A batch, its two keys, and the keys that had a row."""


def expected(placed, values):
    return [values[k] if k in placed.seen else np.zeros(2, np.float32) for k in placed.keys]


class World:
    """Engines, what was made by them, and the newest state of each of the two maps."""

    def __init__(self, seed, evict):
        self.rng, self.engines = np.random.default_rng(seed), engines(evict)
        self.table = self.engines[0][0].structure.tables[0]
        self.states, self.batches, self.newest = [], [], {}
        for which in (0, 1):
            self.begin(which)

    def begin(self, which):
        """Forget all keys of the maps of engine `which`."""
        made = self.engines[which][0]
        state = made.init(jax.random.key(KEY))
        made.vocabularies.rewind(state)
        self.newest[which] = Known(state, {})

    def pick(self, some):
        return some[self.rng.integers(len(some))]

    def train(self):
        which = int(self.rng.integers(3))
        maps = which % 2  # the third engine has the maps of the first
        made, keys = self.engines[which][0], tuple(self.rng.integers(1, 9, 2).tolist())
        state, values = self.newest[maps]
        placed = made.place(ids(*keys))
        taken = placed.keys.taken["t"]
        values = {k: v for k, v in values.items() if k not in taken.evicted_keys.tolist()}
        values |= {k: initial_row(self.table, k) for k in taken.new_keys.tolist()}
        if self.rng.integers(3) == 0:
            with pytest.raises(ValueError, match="admit first"):
                self.pick([made.lookup, self.engines[which][1]])(state, placed)
        state, batch = made.admit(jax.tree.map(jnp.copy, state), placed)
        self.batches.append(Placed(batch, keys, set(values)))
        stepped = {k: values[k] - np.float32(keys.count(k)) for k in values}
        self.newest[maps] = Known(made.update(state, batch, ONES), stepped)
        self.states += [Known(state, values), self.newest[maps]]

    def look(self):
        """Place a batch that is only looked up; its engine's newest state has its rows."""
        which = int(self.rng.integers(3))
        made, keys = self.engines[which][0], tuple(self.rng.integers(1, 9, 2).tolist())
        known = self.newest[which % 2]
        placed = Placed(made.place(ids(*keys), training=False), keys, set(known.values))
        self.batches.append(placed)
        for lookup in self.engines[which][:2]:
            found = getattr(lookup, "lookup", lookup)(known.state, placed.batch)["x"]
            np.testing.assert_array_equal(found, expected(placed, known.values))

    def mix(self):
        """Look up and update any batch in any state, with any engine."""
        if not self.batches or not self.states:
            return
        made, lookup, step = self.pick(self.engines)
        known, placed = self.pick(self.states), self.pick(self.batches)
        try:
            found = made.lookup(known.state, placed.batch)["x"]
        except ValueError as error:
            if not re.search(REFUSED, str(error)):
                raise
        else:
            self.right(found, known, placed)
        found = np.asarray(lookup(known.state, placed.batch)["x"])
        if not np.isnan(found).all():
            self.right(found, known, placed)
        if placed.batch.spec.routed == "update":
            new = step(known.state, placed.batch)
            if np.isnan(found).all():
                refused = [int(s.counters["refused_batches"]) for s in (known.state, new)]
                assert refused[1] == refused[0] + 1
                jax.tree.map(np.testing.assert_array_equal, new.tables, known.state.tables)

    def right(self, found, known, placed):
        assert placed.seen & set(placed.keys) <= set(known.values)
        np.testing.assert_array_equal(found, expected(placed, known.values))

    def copy_maps(self):
        """Let the second engine go on from the state of the first."""
        first, second = self.engines[0][0], self.engines[1][0]
        second.vocabularies.load_state(first.vocabularies.state())
        self.newest[1] = Known(jax.tree.map(jnp.copy, self.newest[0].state), self.newest[0].values)

    def run(self):
        ways = [self.train] * 7 + [self.look] * 3 + [self.mix] * 8
        ways += [self.copy_maps, lambda: self.begin(int(self.rng.integers(2)))]
        for _ in range(OPERATIONS):
            self.pick(ways)()


@pytest.mark.parametrize("seed", FEW)
@pytest.mark.quick(1)
def test_whatever_goes_to_whichever_engine(seed):
    World(seed, ("lru", "none")[seed % 2]).run()


@pytest.mark.whole
@pytest.mark.parametrize("seed", MANY)
def test_many(seed):
    World(seed, ("lru", "none", "lfu")[seed % 3]).run()


@pytest.mark.parametrize("evict", ["lru", "none"])
@pytest.mark.quick(1)
def test_another_engines_state_and_batch_are_refused(evict, refused):
    made, state = simple(evict=evict)
    state, batch = made.admit(state, made.place(ids(5, 6)))
    other, there = simple(evict=evict)
    own = other.place(ids(5, 6), training=False)
    for call in (other.lookup, lambda *args: other.update(*args, ONES)):
        refused(r"vocabularies=other\.vocabularies", call, state, own)
    assert np.isnan(jax.jit(other.lookup)(state, own)["x"]).all()
    there, theirs = other.admit(there, other.place(ids(8, 9)))
    refused(r"vocabularies=other\.vocabularies", other.lookup, there, batch)
    late = jax.jit(lambda *args: other.update(*args, ONES))(there, batch)
    assert (int(late.step), int(late.counters["refused_batches"])) == (0, 1)
    np.testing.assert_array_equal(other.tables(late)["t"], other.tables(there)["t"])
    for maps in (other.vocabularies.rewind, lambda state: io.save("unused", other, state)):
        refused(r"vocabularies=other\.vocabularies", maps, state)
    refused(r"vocabularies=other\.vocabularies", other.admit, state, other.place(ids(1, 2)))
    assert not np.isnan(other.lookup(there, theirs)["x"]).any()


def test_engines_restored_from_one_checkpoint_are_two(tmp_path, refused):
    made, state = simple()
    state, _ = made.admit(state, made.place(ids(5, 6)))
    io.save(tmp_path / "saved", made, state)
    restored = []
    for _ in range(2):
        engine, _ = simple()
        found = io.restore(tmp_path / "saved", engine).state
        restored.append((engine, *engine.admit(found, engine.place(ids(7, len(restored))))))
    (first, state, batch), (second, there, _) = restored
    refused("share their maps", second.lookup, there, batch)
    refused("share their maps", second.lookup, state, second.place(ids(5, 6), training=False))
    first.lookup(state, batch)


@pytest.mark.whole
def test_a_stateful_api_takes_neither_state_nor_batch_of_another(refused):
    feature = FeatureConfig(TableConfig(3, 2, name="t", vocabulary=DynamicVocabulary()))
    one, other = (tpu_embed.TPUEmbedding(feature, o.SGD(1.0), mesh=mesh(1)) for _ in range(2))
    for embedding, keys in ((one, [1, 2]), (other, [3, 4])):
        embedding.enqueue(np.array(keys))
        embedding.apply_gradients(np.ones((2, 2), np.float32) + 0 * embedding.dequeue())
    with pytest.raises(ValueError, match=r"vocabularies=other\.vocabularies"):
        one.state = other.state
    looked = other.engine.place(np.array([3, 4]), training=False)
    refused(r"vocabularies=other\.vocabularies", one.enqueue, looked, training=False)


def test_an_evaluation_batch_stays_valid_in_a_jit_while_no_row_is_taken(refused):
    made, state = simple(capacity=8)
    lookup = jax.jit(made.lookup)
    state, _ = made.admit(state, made.place(ids(1, 2)))
    validation = made.place(ids(1, 2), training=False)
    before = np.asarray(lookup(state, validation)["x"])
    for keys in ((3, 4), (5, 6)):
        state, batch = made.admit(state, made.place(ids(*keys)))
        state = made.update(state, batch, ONES)
        np.testing.assert_array_equal(lookup(state, validation)["x"], before)
    for keys in ((7, 8), (9, 3)):  # key 9 takes the row of key 1
        state, _ = made.admit(state, made.place(ids(*keys)))
    assert np.isnan(lookup(state, validation)["x"]).all()
    refused("place it again", made.admit, state, validation)
    # Row by row it is found that nobody has taken the rows of 3 and 4; stamped so, it is fine.
    kept = made.place(ids(3, 4), training=False)
    state, _ = made.admit(state, made.place(ids(10, 3)))
    assert np.isnan(lookup(state, kept)["x"]).all()
    for _ in range(2):
        _, fresh = made.admit(state, kept)
        np.testing.assert_array_equal(lookup(state, fresh)["x"], made.lookup(state, kept)["x"])


def test_a_large_lookahead_is_refused(refused):
    refused(r"lookahead: expected at most 65536, got 1099511627776", simple, lookahead=2**40)


def test_two_prefetchers_of_one_engine_cannot_take_turns(refused):
    made, state = simple(capacity=8)
    one, two = ([ids(k, k + 1) for k in range(3)] for _ in range(2))
    with Prefetcher(made, one) as first, Prefetcher(made, two) as second:
        state, _ = made.admit(state, next(first))
        refused("two Prefetchers of one engine place ahead", made.admit, state, next(second))

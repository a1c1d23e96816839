"""A state of one engine becomes a state of another: every row and key keeps its bits."""

import dataclasses
import functools
import itertools
import threading

import jax
import numpy as np
import optax
import pytest
from adopt_cases import contents, draw, engine, map_contents, scramble
from facade_cases import mesh

import tpu_embed
from tpu_embed import DynamicVocabulary, FeatureConfig, HostStorage, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.storage import HostRows
from tpu_embed.vocabulary import COUNTERS

EVERY = ("items", "clicks", "tags", "words")
KINDS = {
    "one device": {"capacity": 16},
    "alone": {"devices": 8, "stack_tables": False, "capacity": 16},
    "alone again": {"devices": 8, "stack_tables": False, "capacity": 16, "words": 9},
    "on the host": {"devices": 8, "placement": "div", "on_host": EVERY, "capacity": 24},
    "small, keys on the host": {"placement": "div", "on_host": ("items", "words"), "capacity": 9},
    "replicated": {"devices": 8, "placement": "replicated", "capacity": 24, "words": 40},
    "rows on the host": {"devices": 2, "on_host": ("clicks", "tags"), "capacity": 40},
}


@functools.cache
def source_of(kind):
    """Return an engine of a kind, and a state with keys and random numbers."""
    made = engine(**KINDS[kind])
    state, rng = made.init(jax.random.key(5)), np.random.default_rng(len(kind))
    for _ in range(4):
        state, _ = made.admit(state, made.place(draw(rng)))
    return made, scramble(made, state, len(kind))


@functools.cache
def target_of(kind):
    """Return an engine of a kind that takes the states of others."""
    return engine(**KINDS[kind])


ORDERED_PAIRS = [*itertools.product(KINDS, reversed(KINDS))]


def best(held, rows, room, *, frequent):
    """Return the keys with the best scores, by sorting; of equals those in the higher rows."""

    def score(key):
        last, batches = held["keys"][key]
        return batches if frequent else 0, last, rows[key]

    return set(sorted(held["keys"], key=score)[-room:])


@pytest.mark.parametrize(("source", "target"), ORDERED_PAIRS)
@pytest.mark.quick(1)
def test_every_engine_takes_the_state_of_every_other(source, target):
    (other, theirs), mine = source_of(source), target_of(target)
    expected, maps = contents(other, theirs), map_contents(other)
    stay = {}
    for name, frequent in (("items", False), ("words", True)):
        rows = dict(zip(*(x.tolist() for x in other.vocabularies.keys(name)), strict=True))
        room = mine.vocabularies.capacity(name) - (name == "words")
        stay[name] = best(maps[name], rows, room, frequent=frequent)
    state = mine.adopt(theirs, other)
    assert contents(mine, state) == {
        (name, slot, row): bits
        for (name, slot, row), bits in expected.items()
        if name not in stay or row in stay[name] | {None, "shared"}
    }
    for name, found in map_contents(mine).items():
        scores = {key: one for key, one in maps[name]["keys"].items() if key in stay[name]}
        counters = dict(zip(COUNTERS, maps[name]["counters"], strict=True))
        counters["evicted"] += len(maps[name]["keys"]) - len(scores)
        assert found == maps[name] | {"keys": scores, "counters": [*counters.values()]}
    assert int(state.step) == int(theirs.step)
    assert random_key_of(state) == random_key_of(theirs)
    # Nothing of the other engine has changed.
    assert contents(other, theirs) == expected
    assert map_contents(other) == maps


def random_key_of(state):
    return [(n, x.tolist()) for n, x in state.vocabulary.items() if n != "map_version"]


def tiny(size=8, dim=2, rule=None, name="t", **options):
    """Return an engine of one table on one device."""
    features = {"x": FeatureConfig(TableConfig(size, dim, name=name, **options))}
    return tpu_embed.EmbeddingEngine(features, rule or o.Adam(0.1), mesh=mesh(1))


def started(made):
    """Return a state of an engine; with keys, if its ids are keys."""
    state = made.init(jax.random.key(0))
    return state if made.vocabularies is None else admitted(made, state, 0, 6)


def admitted(made, state, first, size=8):
    """Return a state after the admission of a batch of `size` ids or keys."""
    batch = made.place({"x": np.arange(first, first + size)[:, None]})
    return made.admit(state, batch)[0]


SHARED = DynamicVocabulary(unseen="shared")
DIFFERENT = {
    "rows": ({}, {"size": 9}, r"table 't': vocabulary size: expected 8, got 9; only living"),
    "dim": ({}, {"dim": 3}, r"table 't': dim: expected 2, got 3; declare both"),
    "dtype": ({}, {"dtype": "bfloat16"}, r"table 't': dtype: expected float32, got bfloat16"),
    "name": ({}, {"name": "u"}, r"adopt: expected tables \['t'\], got \['u'\]"),
    "class": ({}, {"rule": o.Yogi(0.1)}, r"table 't': optimizer: expected Adam, got Yogi"),
    "no optimizer": ({"trainable": False}, {}, r"table 't': optimizer: expected None, got Adam"),
    "slots": ({"rule": optax.sgd(1)}, {"rule": optax.sgd(1, 0.9)}, "table 't': slots: expected"),
    "keys": ({"vocabulary": DynamicVocabulary()}, {}, "table 't': ids: expected keys"),
    "unseen": ({"vocabulary": SHARED}, {"vocabulary": DynamicVocabulary()}, "table 't': unseen:"),
}


@pytest.mark.parametrize("case", DIFFERENT)
@pytest.mark.quick(1)
def test_other_tables_are_refused_and_nothing_changes(case, refused):
    ours, theirs, error = DIFFERENT[case]
    mine, other = tiny(**ours), tiny(**theirs)
    here, there, maps = started(mine), started(other), mine.vocabularies
    before = maps and (maps.now, maps.counters)
    refused(error, mine.adopt, there, other)
    assert before == (maps and (maps.now, maps.counters))
    mine.lookup(here, mine.place({"x": np.arange(8)[:, None]}, training=False))


def test_what_is_no_newest_state_of_the_other_engine_is_refused(refused):
    mine, other = (tiny(vocabulary=DynamicVocabulary()) for _ in range(2))
    first = other.init(jax.random.key(0))
    refused(r"other: expected an EmbeddingEngine, got dict", mine.adopt, first, {}, error=TypeError)
    state, _ = other.admit(jax.tree.map(jax.numpy.copy, first), other.place({"x": [1, 2]}))
    refused(r"state: expected the newest state, of step 1", mine.adopt, first, other)
    refused(r"state: expected the newest state", mine.adopt, state, mine)
    inside = jax.jit(lambda state: mine.adopt(state, other))
    refused(r"adopt: expected a call outside a jit", inside, state)
    strange = started(tiny(9, vocabulary=DynamicVocabulary()))
    refused(r"state: expected stacks", mine.adopt, strange, other)
    ahead = other.place({"x": [3, 4]})
    refused(r"other engine: expected no batch placed ahead, got 1;", mine.adopt, state, other)
    assert (mine.vocabularies.admitted, len(mine.vocabularies)) == (0, 0)
    donated, (state, _) = state, other.admit(state, ahead)
    refused(r"state: stack .* donated", mine.adopt, donated, other)


def test_batches_from_before_are_refused_by_engines_of_one_layout(refused):
    mine, other = (tiny(vocabulary=DynamicVocabulary(), rule=o.SGD(1.0)) for _ in range(2))
    state, kept = other.admit(other.init(jax.random.key(0)), other.place({"x": [1, 2]}))
    looked = other.place({"x": [1, 2]}, training=False)
    own = [mine.place({"x": [1, 2]}) for _ in range(2)]
    new = mine.adopt(state, other)
    for batch in (kept, looked):
        refused("placed since the maps were loaded", mine.lookup, new, batch)
        assert np.isnan(jax.jit(mine.lookup)(new, batch)["x"]).all()
    refused(r"the batch of step 2, .* got the one of step 1", mine.admit, new, own[0])
    for batch in (own[1], other.place({"x": [3, 4]})):
        refused("placed since the maps were rewound or loaded", mine.admit, new, batch)
    refused("share their maps", mine.lookup, state, mine.place({"x": [1, 2]}, training=False))
    looked = mine.place({"x": [1, 2]}, training=False)
    mine.lookup(new, looked)
    other.vocabularies.rewind(state)
    new = mine.adopt(state, other)
    refused("placed since the maps were loaded", mine.lookup, new, looked)
    new, batch = mine.admit(new, mine.place({"x": [1, 5]}))
    found = np.asarray(mine.lookup(new, batch)["x"])
    np.testing.assert_array_equal(found[:1], other.lookup(state, kept)["x"][:1])


def test_engines_that_share_maps_and_an_engine_itself():
    one = tiny(vocabulary=DynamicVocabulary())
    state = started(one)
    table = TableConfig(8, 2, name="t", vocabulary=DynamicVocabulary())
    features = {"x": FeatureConfig(table), "y": FeatureConfig(table)}
    other = tpu_embed.EmbeddingEngine(features, o.Adam(0.1), vocabularies=one.vocabularies)
    keys, tables = one.vocabularies.keys("t")[0].tolist(), np.asarray(one.tables(state)["t"])
    for made, source in ((other, one), (other, other), (one, other)):
        state = made.adopt(state, source)
        np.testing.assert_array_equal(made.tables(state)["t"][:6], tables[:6])
        assert made.vocabularies.keys("t")[0].tolist() == keys
        assert state.counters["bad_ids"].shape == (len(made.layout.features),)


def test_counters_are_those_of_the_same_features():
    feature = FeatureConfig(TableConfig(8, 2, name="t"))
    one, other = (
        tpu_embed.EmbeddingEngine(dict.fromkeys(names, feature), o.SGD(1.0), on_bad_gradient="skip")
        for names in ("abc", "cxa")
    )
    state = one.init(jax.random.key(0))
    counted = {"bad_ids": np.arange(3), "bad_gradients": np.arange(3) + 5, "overflows": np.int32(9)}
    counters = other.adopt(dataclasses.replace(state, counters=counted), one).counters
    found = {name: np.asarray(count).tolist() for name, count in counters.items()}
    assert found == {"bad_ids": [0, 2, 0], "bad_gradients": [5, 7, 0], "overflows": 9}


@pytest.mark.parametrize("devices", [slice(1, 2), slice(0, 2)])
@pytest.mark.whole
def test_what_a_stack_shares_comes_along_to_other_devices(devices):
    tables = [TableConfig(9, 2, name=name) for name in "ab"]
    features = {table.name: FeatureConfig(table) for table in tables}

    def make(chosen, stacked):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[chosen]), ("d",))
        options = {"mesh": mesh, "stack_tables": stacked}
        return tpu_embed.EmbeddingEngine(features, optax.adam(0.1), **options)

    made = make(slice(1), True)
    state, ids = made.init(jax.random.key(0)), dict.fromkeys("ab", np.arange(8))
    ones = dict.fromkeys("ab", np.ones((8, 2), np.float32))
    for _ in range(3):
        state = made.update_in_place(state, made.place(ids), ones)
    expected = jax.tree.map(np.asarray, (made.tables(state), made.slots(state)))
    assert any(np.ndim(slot) == 0 and slot == 3 for slot in jax.tree.leaves(expected))
    for chosen, stacked in ((devices, True), (devices, False), (slice(1), False), (devices, True)):
        other, made = made, make(chosen, stacked)
        state = made.adopt(state, other)
        assert jax.tree.leaves(state)[0].devices() == {*jax.devices()[chosen]}
        arrays = made.tables(state), made.slots(state)
        jax.tree.map(np.testing.assert_array_equal, arrays, expected)


def assert_same_rows(*pair):
    for slot in (None, "momenta", "velocities"):
        rows = [made.rows(state, "t", np.arange(200), slot=slot) for made, state in pair]
        np.testing.assert_array_equal(*rows)


@pytest.mark.parametrize("target", ["devices", "host"])
def test_rows_go_in_blocks(target, monkeypatch):
    # Two numbers, and two in each of two slots.
    monkeypatch.setattr("tpu_embed.core.rows.devices.BLOCK", 64 * 24)
    other, storage = tiny(200), HostStorage(device_rows=8)
    mine = tiny(200, placement="div", **({} if target == "devices" else {"storage": storage}))
    state = started(other)
    sizes, read = [], other.stored_rows
    monkeypatch.setattr(other, "stored_rows", lambda *a: sizes.append(len(a[-1])) or read(*a))
    new = mine.adopt(state, other)
    assert sizes == [64, 64, 64, 8]
    assert_same_rows((mine, new), (other, state))


def test_rows_on_their_way_home_are_waited_for(monkeypatch):
    drawn = {"initializer": jax.nn.initializers.normal(0.3)}
    other, mine = tiny(200, storage=HostStorage(device_rows=8), **drawn), tiny(200, **drawn)
    state, write, go_on = other.init(jax.random.key(0)), HostRows.write, threading.Event()

    def late(*args):
        go_on.wait(60)
        write(*args)

    ones = {"x": np.ones((8, 2), np.float32)}
    monkeypatch.setattr(HostRows, "write", late)
    for first in (0, 100):
        state, batch = other.admit(state, other.place({"x": first + np.arange(8)[:, None]}))
        state = other.update_in_place(state, batch, ones)
    threading.Timer(0.3, go_on.set).start()
    new = mine.adopt(state, other)
    assert go_on.is_set()
    assert_same_rows((mine, new), (other, state))


def test_rows_that_were_lost_are_an_error_and_rows_without_room_change_nothing(
    monkeypatch, refused
):
    other, mine = (tiny(200, storage=HostStorage(device_rows=8)) for _ in range(2))
    own = started(mine)
    state = other.init(jax.random.key(0))

    def full(*_):
        raise OSError(28, "No space left on device")

    state = admitted(other, admitted(other, state, 0), 100)
    other.storage.flush()
    with monkeypatch.context() as patched:
        patched.setattr(HostRows, "write", full)
        refused("No space left", mine.adopt, state, other, error=OSError)
        mine.vocabularies.check_newest(own)
        state = admitted(other, state, 0)
        with pytest.raises(RuntimeError, match=r"HostStorage: expected rows of \['t'\] written"):
            mine.adopt(state, other)
    mine.lookup(own, mine.place({"x": np.arange(8)[:, None]}, training=False))

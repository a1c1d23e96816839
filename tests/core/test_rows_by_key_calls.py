"""What `rows`, `set_rows` and `load` take by key, what they refuse, and nothing changes."""

import re
import threading
from concurrent import futures

import jax
import numpy as np
import pandas as pd
import pytest
from living_cases import KEY, ONES, ids, mesh, on_host, simple, train_once, whole

import tpu_embed
from tpu_embed import FeatureConfig, HostStorage, TableConfig, hash_ids
from tpu_embed import optimizers as o
from tpu_embed.storage import HostRows
from tpu_embed.vocabulary import DynamicVocabulary

VECTORS = np.arange(1.0, 9).reshape(4, 2)


def set_ones(made, state, *keys):
    return made.set_rows(state, "t", keys=[*keys], values=np.ones((len(keys), 2)))


# -- Keys as features take them --------------------------------------------------------------------


KEYS = {
    "list": ["red", "green", "blue", ""],
    "NumPy": np.array(["red", "green", "blue", ""]),
    "bytes": np.array([b"red", b"green", b"blue", b"x"], object),
    "unsigned": np.array([2**63, 5, 2**64 - 1, 0], np.uint64),
    "signed": np.array([-(2**63), 5, -1, 0]),
    "large": [3, 2**63 + 1, 4, 5],
    "int8": np.array([-1, 1, 2, 3], np.int8),
    "pandas": pd.Series(["red", "green", "blue", "white"], index=[5, 6, 7, 8]),
}


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.quick(2)
def test_keys_are_those_of_the_features(kind):
    keys, (made, state) = KEYS[kind], simple(capacity=5, admit_after=3)
    state = made.set_rows(state, "t", keys=keys, values=VECTORS)
    np.testing.assert_array_equal(made.rows(state, "t", keys=keys), VECTORS)
    assert made.vocabularies.find("t", keys).tolist() == [0, 1, 2, 3]
    column = np.asarray(keys, np.uint64 if kind == "large" else None)
    if column.dtype.kind in "USO":
        column = hash_ids(keys, None)
    # A signed -1 is padding in a dense feature, but not in a bag.
    bags = tpu_embed.RaggedIds(column, np.arange(5))
    found = made.lookup(state, made.place({"x": bags}, training=False))
    np.testing.assert_array_equal(found["x"], VECTORS)


BAD_KEYS = [
    ([1.5, 2], TypeError, "expected integers or strings, got float64"),
    ([True, False], TypeError, "expected integers or strings, got bool"),
    ([1, "a"], TypeError, "got objects of int, str"),
    ([2**64, 1], TypeError, "integers of at most 64 bits"),
    ([[1, 2]], ValueError, r"keys of shape \(n,\), got int64 of shape \(1, 2\)"),
    ([1, None], ValueError, "a key at every place, got a missing one at 1"),
    ([7, 5, 7], ValueError, "each key once, got the keys at 0 and 2 are the same"),
    (np.array([-1, 2**63 - 1, -1]), ValueError, "each key once"),
]


@pytest.mark.parametrize(("keys", "error", "said"), BAD_KEYS)
def test_bad_keys_are_refused(keys, error, said):
    made, state = simple(capacity=4)
    with pytest.raises(error, match=rf"table 't': keys: .*{said}"):
        made.set_rows(state, "t", keys=keys, values=np.ones((len(keys), 2)))
    assert made.vocabularies.placed == 0


# -- What is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [simple, on_host], ids=["on the devices", "on the host"])
@pytest.mark.quick(1)
def test_a_refused_call_changes_nothing(make, refused):
    made, state = make(6, evict="none")
    state = train_once(made, state, 1, 2)
    before, map_before = made.rows(state, "t", keys=[1, 2]), made.vocabularies.scores("t")

    def unchanged(said, name="t", **given):
        given = {"keys": [1, 9], "values": np.ones((2, 2))} | given
        refused(said, made.set_rows, state, name, **given)
        np.testing.assert_array_equal(made.rows(state, "t", keys=[1, 2]), before)
        jax.tree.map(np.testing.assert_array_equal, made.vocabularies.scores("t"), map_before)

    unchanged("either rows or keys, got both", error=TypeError, rows=[0, 1])
    unchanged("either rows or keys, got neither", error=TypeError, keys=None)
    unchanged(r"shape \(2, 2\), got \(3, 2\)", values=np.ones((3, 2)))
    unchanged("real numbers", values=np.full((2, 2), "a"))
    unchanged("slot: expected one of", slot="momentum")
    unchanged("other", name="other")
    many = "at most 6 of these keys at a time: 2 have a row, and 4 can get one, got 7; give fewer"
    unchanged(many, keys=range(1, 8), values=np.ones((7, 2)))
    made.place(ids(1, 2))
    refused("set_rows: .*no batch placed ahead, got 1; admit them", set_ones, made, state, 9)
    made.vocabularies.rewind(state)
    newest = set_ones(made, state, 9)
    refused("the newest state", set_ones, made, state, 8)
    refused("the newest state", made.rows, state, "t", keys=[9])
    found = made.rows(newest, "t", keys=[1, 2, 9])
    np.testing.assert_array_equal(found, [*before, [1, 1]])


def test_calls_inside_a_jit_or_without_values_are_refused(refused):
    made, state = simple()
    refused("set_rows: expected values", made.set_rows, state, "t", keys=[1], error=TypeError)
    state = set_ones(made, state, 1)
    read = jax.jit(lambda state: made.rows(state, "t", keys=[1]))
    refused("rows: expected a call outside a jit", read, state)
    write = jax.jit(lambda state: set_ones(made, state, 1))
    refused("set_rows: expected a call outside a jit", write, state)
    assert made.vocabularies.placed == 1


@pytest.mark.parametrize("storage", [None, HostStorage(device_rows=8)])
def test_tables_of_row_numbers_have_no_keys(storage, refused):
    table = TableConfig(9, 2, name="t", storage=storage)
    made = tpu_embed.EmbeddingEngine({"x": FeatureConfig(table)}, o.SGD(1.0), mesh=mesh(1))
    state = made.init(jax.random.key(KEY))
    says = "keys of table 't': .*vocabulary=DynamicVocab"
    refused(says, made.rows, state, "t", keys=[1])
    refused(says, set_ones, made, state, 1)
    refused(says, made.load, state, "t", [np.ones((1, 2))], keys=[1])
    refused("either ids or keys, got neither", made.rows, state, "t", error=TypeError)


def test_keys_without_a_row_are_named(refused):
    made, state = simple(unseen="shared")
    state = made.set_rows(state, "t", keys=["red"], values=np.ones((1, 2)))
    said = "got 'green' and 2 more without one; engine.vocabularies.find tells"
    refused(re.escape(said), made.rows, state, "t", keys=["red", "green", "blue", "white"])
    assert made.vocabularies.find("t", ["red", "green"]).tolist() == [0, -1]
    with pytest.raises(ValueError, match="expected one of \\['t'\\], with a dynamic vocabulary"):
        made.vocabularies.find("u", ["red"])


# -- One step of the maps --------------------------------------------------------------------------


def test_a_new_keys_slots_are_fresh_and_a_known_ones_stay():
    table = TableConfig(4, 2, name="t", vocabulary=DynamicVocabulary())
    users = TableConfig(4, 2, name="users")  # of the same stack
    features = [FeatureConfig(table), FeatureConfig(users)]
    made = tpu_embed.EmbeddingEngine(features, o.Adam(0.5), mesh=mesh(1))
    state, batch = made.admit(made.init(jax.random.key(KEY)), made.place([[1, 2]] * 2))
    state = made.update(state, batch, [ONES["x"]] * 2)
    before = whole(made, state)
    state = made.set_rows(state, "t", keys=[2, 3], values=VECTORS[:2])
    for name in ("momenta", "velocities"):
        rows = made.rows(state, "t", keys=[1, 2, 3], slot=name)
        np.testing.assert_array_equal(rows[:2], before[f"slot t/{name}"][:2])
        assert rows.any(axis=1).tolist() == [True, True, False]
    np.testing.assert_array_equal(whole(made, state)["table users"], before["table users"])
    state = made.set_rows(state, "t", keys=[1], values=VECTORS[:1], slot="momenta")
    assert made.rows(state, "t", keys=[1], slot="momenta").tolist() == VECTORS[:1].tolist()


def test_a_state_and_batches_from_before_are_treated_as_after_any_other_step(refused):
    made, state = simple(capacity=3, lookahead=1)
    state, batch = made.admit(state, made.place(ids(1, 2)))
    looked, kept = (made.place(ids(*keys), training=False) for keys in ((1, 1), (2, 3)))
    before = jax.tree.map(np.array, state.tables)
    after = set_ones(made, state, 4)
    jax.tree.map(np.testing.assert_array_equal, state.tables, before)
    after = made.update(after, batch, ONES)  # one step later, as lookahead allows
    after = set_ones(made, after, 5)  # takes the row of key 1
    assert made.vocabularies.last["t"].evicted.tolist() == [1]
    refused("place it again", made.lookup, after, looked)
    refused("place it again", made.update, after, batch, ONES)
    assert np.isnan(jax.jit(made.lookup)(after, looked)["x"]).all()
    assert np.isfinite(made.lookup(after, kept)["x"]).all()


def test_it_waits_for_a_batch_that_is_being_placed(monkeypatch, refused):
    made, state = simple()
    begun, place = threading.Event(), made.intake.place_now

    def slowly(*given):
        begun.set()
        assert not futures.wait([call], timeout=0.2).done
        return place(*given)

    monkeypatch.setattr(made.intake, "place_now", slowly)
    with futures.ThreadPoolExecutor(1) as thread:
        call = thread.submit(lambda: begun.wait(60) and set_ones(made, state, 1))
        made.place(ids(1, 2))
    refused("no batch placed ahead, got 1", call.result)


# -- Other calls -----------------------------------------------------------------------------------


def test_load_takes_blocks_of_the_rows_of_keys(refused):
    made, state = simple(capacity=6)
    state = made.set_rows(state, "t", keys=[9], values=np.full((1, 2), 7.0))
    blocks = (VECTORS[first : first + 3] for first in (0, 3))
    state = made.load(state, "t", blocks, keys=["a", "b", "c", "d"])
    np.testing.assert_array_equal(made.rows(state, "t", keys=["d", "a"]), VECTORS[[3, 0]])
    assert made.rows(state, "t", keys=[9]).tolist() == [[7, 7]]
    for blocks, said in (
        ([VECTORS], r"values: expected shape \(3, 2\), got \(4, 2\)"),
        ([VECTORS, np.ones((1, 3))], r"blocks of rows of one shape, got \[\(4, 2\), \(1, 3\)\]"),
        ([], r"shape \(3, 2\), got \(0,\)"),
    ):
        refused(said, made.load, state, "t", blocks, keys=["e", "f", "g"])
    assert len(made.vocabularies) == 5


def test_the_stateful_api_takes_the_state(recwarn, refused):
    table = TableConfig(5, 2, name="t", vocabulary=DynamicVocabulary(admit_after=2))
    embedding = tpu_embed.TPUEmbedding(FeatureConfig(table), o.SGD(1.0), mesh=mesh(1))
    embedding.build(2)
    given = embedding.engine.set_rows
    embedding.state = given(embedding.state, "t", keys=[1, 2], values=VECTORS[:2])
    embedding.enqueue(np.array([1, 9]))
    refused("no batch placed ahead", given, embedding.state, "t", keys=[1], values=VECTORS[:1])
    np.testing.assert_array_equal(embedding.dequeue(), [[1, 2], [0, 0]])
    embedding.apply_gradients(ONES["x"])
    embedding.enqueue(np.array([2, 1]), training=False)
    embedding.state = given(embedding.state, "t", keys=[2, 3], values=VECTORS[2:])
    np.testing.assert_array_equal(embedding.dequeue(), [[5, 6], [0, 1]])
    assert not recwarn.list


def test_engines_that_share_maps_share_rows_by_key(refused):
    made, state = simple()
    features, maps = {"x": FeatureConfig(made.table_configs["t"])}, made.vocabularies
    other = tpu_embed.EmbeddingEngine(features, o.SGD(1.0), mesh=mesh(1), vocabularies=maps)
    state = set_ones(made, state, 1)
    state = other.set_rows(state, "t", keys=[2], values=np.full((1, 2), 2.0))
    assert made.rows(state, "t", keys=[2, 1]).tolist() == [[2, 2], [1, 1]]
    strange, there = simple()
    refused("the newest state", set_ones, strange, state, 1)
    set_ones(strange, there, 1)


# -- Tables on the host: on the devices, at home, and on their way there --------------------------


@pytest.mark.parametrize("at_home", [False, True])
def test_an_evaluation_batch_does_not_show_a_key_that_has_lost_its_row(at_home, refused):
    made, state = on_host(capacity=3 if at_home else 2)
    state = train_once(made, state, 1, 2)
    if at_home:
        state = train_once(made, state, 3, 3)
    gone = made.vocabularies.find("t", [1])
    looked, kept = (made.place(ids(*keys), training=False) for keys in ((1, 2), (2, 2)))
    state = set_ones(made, state, 9)  # takes the row of key 1
    assert made.vocabularies.find("t", [1, 9]).tolist() == [-1, gone[0]]
    refused("place it again", made.lookup, state, looked)
    if not at_home:  # else the row of key 2 may have been written since
        found = made.lookup(state, kept)["x"][0]
        np.testing.assert_array_equal(found, made.rows(state, "t", keys=[2])[0])
    found = made.lookup(state, made.place(ids(9, 2), training=False))["x"]
    np.testing.assert_array_equal(found[0], [1, 1])


def test_a_row_on_its_way_home_does_not_come_after_the_one_that_is_set(monkeypatch):
    made, state = on_host(capacity=4)
    state = set_ones(made, state, 7, 8)  # compiles what it needs
    state = train_once(made, state, 1, 2)
    made.storage.flush()
    here, go, write = threading.current_thread(), threading.Event(), HostRows.write

    def late(*args):
        if threading.current_thread() is not here:
            assert go.wait(60)
        write(*args)

    monkeypatch.setattr(HostRows, "write", late)
    state = train_once(made, state, 3, 4)  # sends 1 and 2 home; 7 and 8 are forgotten
    later = threading.Timer(0.5, go.set)
    later.start()
    state = set_ones(made, state, 9, 10)  # in place of 1 and 2
    later.join()
    made.storage.flush()
    assert made.vocabularies.last["t"].evicted.tolist() == [1, 2]
    np.testing.assert_array_equal(made.rows(state, "t", keys=[9, 10]), np.ones((2, 2)))


def test_a_full_disk_undoes_the_step(monkeypatch, refused):
    made, state = on_host(capacity=2)
    state = train_once(made, state, 1, 2)
    before, placed = made.rows(state, "t", keys=[1, 2]), made.vocabularies.placed

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(HostRows, "write", full)
        refused("No space", set_ones, made, state, 2, 7, error=OSError)
    assert made.vocabularies.placed == made.vocabularies.admitted == placed
    np.testing.assert_array_equal(made.rows(state, "t", keys=[1, 2]), before)
    state = set_ones(made, state, 2, 7)
    assert made.vocabularies.last["t"].evicted.tolist() == [1]

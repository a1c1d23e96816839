"""Checkpoints of tables on the host: touched rows by id, of one step, restored anywhere."""

import functools
import os
import time

import jax
import numpy as np
import pytest
from facade_cases import mesh
from host_table_cases import ITEMS, RULES, TAGS, TwoEngines, declared, draw_batch, engines

import tpu_embed
from tpu_embed import DynamicVocabulary, FeatureConfig, HostStorage, TableConfig, io
from tpu_embed import optimizers as o
from tpu_embed.core.state import slot_shapes
from tpu_embed.io.checkpoint.host_rows import described_by
from tpu_embed.storage import HostRows

SHARED = DynamicVocabulary(ttl=3, unseen="shared")
NORMAL = jax.nn.initializers.normal()
assert_equal = functools.partial(jax.tree.map, np.testing.assert_array_equal)


def every_row(engine, state):
    """Return all rows and slots of the two tables, wherever they are; or those of all keys."""
    found = []
    for name, rows in (("items", np.arange(ITEMS)), ("tags", np.arange(TAGS))):
        if engine.layout.table(name)[1].key_rules is not None:
            keys, rows = engine.vocabularies.keys(name)
            order = np.argsort(keys)
            found.append(keys[order])
            rows = rows[order]
        shapes = slot_shapes(engine.layout.table(name)[0])
        for slot in (None, *(n for n, one in shapes.items() if one.per_row)):
            found.append(engine.rows(state, name, rows, slot=slot))
    return found


@pytest.fixture
def two_batches():
    """Return an engine, and its state after two batches that fill its rows on the devices twice."""
    engine = small()
    return engine, train(engine, engine.init(jax.random.key(0)), np.arange(16), np.arange(16, 32))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("rule", "devices", "restored_on", "options"),
    [
        ("Adagrad", 1, 8, {"rows": 100}),
        ("Adam", 2, 1, {"rows": 72, "lookahead": 0, "dtype": "bfloat16"}),
        ("FTRL", 1, 2, {"rows": 100, "living": (SHARED, 80, 50)}),
    ],
)
@pytest.mark.quick(1)
def test_a_run_that_is_saved_and_restored_at_random_goes_on_with_its_bits(
    rule, devices, restored_on, options, tmp_path
):
    """Every restore is into another engine: other devices, `device_rows`, on the host or not."""
    run = TwoEngines(*engines(devices, rule, **options), seed=4)
    made, linked = {what: options[what] for what in ("dtype", "living") if what in options}, 0
    resident = tpu_embed.EmbeddingEngine(declared(RULES[rule], None, **made), mesh=mesh(2))
    for number in range(4):
        run.run(30)
        path = tmp_path / f"{number}"
        io.save(path, run.hosted, run.states[0], position=number)
        linked += sum(file.stat().st_nlink > 1 for file in path.rglob("c.*"))
        expected = every_row(*run.both[1])
        assert_equal(every_row(run.hosted, run.states[0]), expected)
        assert_equal(every_row(resident, io.restore(path, resident).state), expected)
        if number % 2:
            # The restored engine takes the place of the one that was saved.
            last = run.hosted
            storage = {1: {"device_rows": 110}, 3: {"device_rows": 96, "evict": "lfu"}}[number]
            again = declared(RULES[rule], HostStorage(**storage, path=tmp_path), **made)
            where = {"mesh": mesh(restored_on), "lookahead": last.vocabularies.lookahead}
            run.engines[0] = tpu_embed.EmbeddingEngine(again, **where)
            restored = io.restore(path, run.hosted)
            assert restored.position == number
            run.states[0], run.kept = restored.state, []
            np.testing.assert_array_equal(last.touched("items"), run.hosted.touched("items"))
    assert linked > 0
    # The files of the last one are whole without the others.
    for number in range(3):
        os.rename(tmp_path / f"{number}", tmp_path / f"gone {number}")
    assert_equal(every_row(resident, io.restore(tmp_path / "3", resident).state), expected)
    assert run.counts["updates"] > 15


def test_tables_on_the_devices_move_to_the_host_with_a_checkpoint(tmp_path):
    hosted, resident = engines(2, "FTRL", rows=120, lookahead=0)
    state = resident.init(jax.random.key(5))
    batch = resident.place(draw_batch(np.random.default_rng(0))[0])
    state = resident.update(state, batch, resident.lookup(state, batch))
    io.save(tmp_path / "whole", resident, state)
    restored = io.restore(tmp_path / "whole", hosted).state
    assert_equal(every_row(hosted, restored), every_row(resident, state))
    assert hosted.touched("items").size == ITEMS


EVERY = np.arange(200)


def small(rows=16, size=200, optimizer=None, lookahead=None, dtype="float32", **options):
    storage = HostStorage(device_rows=rows, **options)
    table = TableConfig(size, 4, NORMAL, name="items", storage=storage, dtype=dtype)
    optimizer = optimizer or o.Adagrad(0.5)
    return tpu_embed.EmbeddingEngine(FeatureConfig(table), optimizer, lookahead=lookahead)


def train(engine, state, *batches):
    for ids in batches:
        batch = engine.place(np.asarray(ids).reshape(8, -1))
        state, batch = engine.admit(state, batch)
        state = engine.update_in_place(state, batch, engine.lookup(state, batch))
    return state


def test_a_save_in_the_background_has_the_rows_of_its_step(tmp_path, monkeypatch):
    """Rows that go home while it is written are saved as they were."""
    engine, rng = small(), np.random.default_rng(0)
    state, expected = engine.init(jax.random.key(0)), {}
    state = train(engine, state, *rng.integers(0, 200, (20, 16)))
    monkeypatch.setattr("tpu_embed.io.checkpoint.row_files.BLOCK", 7 * 32)  # 7 rows a block
    with io.CheckpointManager(tmp_path, engine, keep=None) as manager:
        for step in range(4):
            expected[step] = engine.rows(state, "items", EVERY)
            manager.save(step, state)
            state = train(engine, state, *rng.integers(0, 200, (6, 16)))
    for step, rows in expected.items():
        other = small(rows=24)
        found = io.restore(tmp_path / f"{step}", other).state
        np.testing.assert_array_equal(other.rows(found, "items", EVERY), rows)


@pytest.mark.whole
def test_a_lacking_slot_is_made_with_the_key(tmp_path):
    engine = small(optimizer=o.SGD(0.5))
    state = train(engine, engine.init(jax.random.key(0)), np.arange(16), np.arange(16, 32))
    io.save(tmp_path / "sgd", engine, state)
    other = small(optimizer=o.Adagrad(0.5, initial_accumulator_value=0.25))
    with pytest.raises(ValueError, match=r"slot 'accumulators'.*key="):
        io.restore(tmp_path / "sgd", other)
    found = io.restore(tmp_path / "sgd", other, key=jax.random.key(1)).state
    ids = np.arange(40)
    np.testing.assert_array_equal(other.rows(found, "items", ids), engine.rows(state, "items", ids))
    assert (other.rows(found, "items", ids, slot="accumulators") == 0.25).all()
    # A table that grows keeps its rows, and draws the new ones as it did the others.
    larger = small(size=300, optimizer=o.SGD(0.5))
    with pytest.raises(ValueError, match="key="):
        io.restore(tmp_path / "sgd", larger)
    grown = io.restore(tmp_path / "sgd", larger, key=jax.random.key(1)).state
    assert_equal(larger.rows(grown, "items", ids), engine.rows(state, "items", ids))


@pytest.mark.whole
def test_a_table_comes_to_the_devices_beside_new_tables(tmp_path, two_batches):
    """Its first values are those of the key that it had; what is new has the other key."""
    engine, state = two_batches
    io.save(tmp_path / "one", engine, state)
    key, ids = jax.random.key(7), np.arange(60)
    tables = [
        TableConfig(200, 4, NORMAL, name="items"),
        TableConfig(60, 4, NORMAL, name="new"),
        TableConfig(60, 4, name="far", storage=HostStorage(device_rows=16)),
    ]
    features = {table.name: FeatureConfig(table) for table in tables}
    other = tpu_embed.EmbeddingEngine(features, o.Adagrad(0.5))
    with pytest.raises(ValueError, match="key="):
        io.restore(tmp_path / "one", other)
    made = other.init(key)
    expected = other.rows(made, "new", ids)
    assert np.unique(expected).size > 100  # it is drawn
    found = io.restore(tmp_path / "one", other, key=key).state
    np.testing.assert_array_equal(other.rows(found, "items", ids), engine.rows(state, "items", ids))
    np.testing.assert_array_equal(other.rows(found, "new", ids), expected)


def test_files_have_at_most_twice_the_rows(tmp_path):
    engine = small()
    state, kept = engine.init(jax.random.key(0)), []
    for number in range(6):
        state = train(engine, state, np.arange(16), np.arange(16, 32))
        io.save(tmp_path / f"{number}", engine, state)
        found = described_by(tmp_path / f"{number}" / "tables", None, 0)["items"]["segments"]
        kept.append(sum(one["rows"] for one in found))
    assert max(kept) == 64
    assert kept.count(32) > 1  # some saves write all rows anew


def check_saved(path, engine, state, **options):
    """Save, and check every row of an engine that restores it; return that one and its state."""
    io.save(path, engine, state)
    other = small(rows=24, **options)
    found = io.restore(path, other).state
    for slot in (None, "accumulators"):
        rows = [e.rows(s, "items", EVERY, slot=slot) for e, s in ((other, found), (engine, state))]
        np.testing.assert_array_equal(*rows)
    return other, found


def test_a_batch_that_is_updated_after_a_save_is_in_the_next_one(tmp_path):
    engine = small(rows=32, lookahead=1)
    state = engine.init(jax.random.key(0))
    batches = [engine.place(np.arange(first, first + 8).reshape(8, 1)) for first in (0, 8)]
    for i, batch in enumerate(batches):
        state, batches[i] = engine.admit(state, batch)
    check_saved(tmp_path / "0", engine, state)
    for batch in batches:
        state = engine.update_in_place(state, batch, engine.lookup(state, batch))
    check_saved(tmp_path / "1", engine, state)


def test_a_save_waits_for_rows_on_their_way_home(tmp_path, monkeypatch, request):
    write = HostRows.write

    def late(*args):
        time.sleep(0.2)
        write(*args)

    monkeypatch.setattr(HostRows, "write", late)
    check_saved(tmp_path / "0", *request.getfixturevalue("two_batches"))


@pytest.mark.whole
def test_a_run_does_not_go_on_from_rows_of_another_dtype(tmp_path, two_batches):
    io.save(tmp_path / "0", *two_batches)
    rounded = small(dtype="bfloat16")
    found = io.restore(tmp_path / "0", rounded, convert=True).state
    other, found = check_saved(tmp_path / "1", rounded, found, dtype="bfloat16")
    # The same dtype again: now a save goes on.
    found = train(other, found, np.arange(8))
    check_saved(tmp_path / "2", other, found, dtype="bfloat16")
    described = described_by(tmp_path / "2" / "tables", None, 0)["items"]["segments"]
    assert [one["rows"] for one in described] == [32, 8]


def test_an_old_state_and_damaged_files_are_refused(tmp_path):
    engine = small()
    old = engine.init(jax.random.key(0))
    state = train(engine, engine.init(jax.random.key(0)), np.arange(16), np.arange(16, 32))
    with pytest.raises(ValueError, match="the newest state"):
        io.save(tmp_path / "old", engine, old)
    assert not (tmp_path / "old").exists()
    io.save(tmp_path / "new", engine, state)
    file = next((tmp_path / "new").rglob("*-home/rows/c.0.0.0"))
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    before = engine.touched("items")
    with pytest.raises(ValueError, match=r"rows at home.*files as they were written"):
        io.restore(tmp_path / "new", engine)
    np.testing.assert_array_equal(engine.touched("items"), before)  # nothing has changed
    file.unlink()
    with pytest.raises(FileNotFoundError, match="rows at home"):
        io.restore(tmp_path / "new", engine)


def living(size, rows=None):
    """Return an engine of one living table, on the host if it has `rows` on the devices."""
    options = {"vocabulary": DynamicVocabulary(unseen="shared", admit_after=2)}
    options["storage"] = rows and HostStorage(device_rows=rows)
    table = TableConfig(size, 4, NORMAL, name="tags", **options)
    return tpu_embed.EmbeddingEngine(FeatureConfig(table), o.Adagrad(0.5), mesh=mesh(1))


@pytest.mark.whole
def test_a_living_vocabulary_on_the_host_is_restored_to_another_capacity(tmp_path):
    """The same keys stay, with their rows, as of one whose rows are on the devices."""
    key, rng = jax.random.key(0), np.random.default_rng(0)
    batches = [rng.integers(0, 70, (8, 2)) for _ in range(14)]
    made = [living(40, 20), living(40)]
    states = [train(one, one.init(key), *batches[:8]) for one in made]
    for kind, one, state in zip(("host", "devices"), made, states, strict=True):
        io.save(tmp_path / kind, one, state)
    for size in (16, 90):
        found = []
        for kind, other in (
            ("host", living(size, 17)),
            ("host", living(size)),
            ("devices", living(size, 30)),
            ("devices", living(size)),
        ):
            state = io.restore(tmp_path / kind, other).state
            again, some = living(size, 25), []
            for more in ((), batches[8:]):
                state = train(other, state, *more)
                path = tmp_path / f"again {size} {len(found)} {len(more)}"
                io.save(path, other, state)
                some += by_key(again, io.restore(path, again).state)
            found.append(some)
        for some in found[:3]:
            assert_equal(some, found[3])


def by_key(engine, state):
    """Return the keys of a table in order, and their rows and slots; and the shared row."""
    keys, rows = engine.vocabularies.keys("tags")
    last = engine.table_configs["tags"].vocabulary_size - 1
    rows = np.append(rows[np.argsort(keys)], last)
    slots = (engine.rows(state, "tags", rows, slot=slot) for slot in (None, "accumulators"))
    return [np.sort(keys), *slots]

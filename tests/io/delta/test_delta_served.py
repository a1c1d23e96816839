"""Served models take deltas, in order and whole; anything else is refused."""

from __future__ import annotations

import dataclasses
import pickle
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest
from delta_cases import V, copied, make_engine, published, rewritten
from kernel_cases import assert_same_bits

from tpu_embed import FeatureConfig, TableConfig, io
from tpu_embed import optimizers as o
from tpu_embed.io.delta import delta_files
from tpu_embed.io.serving import served_tables

REQUEST = {
    name: np.random.default_rng(0).integers(-1, size, (4, 3))
    for name, size in {"item": V, "day.of/week": 7, "fixed": 9}.items()
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Return an export of three tables, one quantized, two deltas, and the tables after these."""
    root = tmp_path_factory.mktemp("served")
    engine = make_engine(o.Adagrad(0.1), 2, "mod", "bfloat16")
    configs = engine.table_configs
    features = {name: FeatureConfig(config, on_bad_id="clip") for name, config in configs.items()}
    tables, version, state, deltas = published(root, engine)
    tables["item"] = io.quantize_rows(tables["item"])
    io.export_model(root / "m", lambda a: a, tables, features, REQUEST, version=version)
    live = copied(engine, state)
    return SimpleNamespace(features=features, root=root / "m", deltas=deltas, live=live)


def files_of(root):
    return {f: f.read_bytes() for f in root.rglob("*") if f.is_file()}


# -- servers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["apply", "apply_in_place"])
@pytest.mark.quick(1)
def test_a_served_model_looks_up_the_live_tables(served, way):
    before, model = files_of(served.root), io.load_model(served.root)
    first, loaded = model(REQUEST), model
    for path in served.deltas:
        model = getattr(model, way)(path)
    live = served.live | {"item": io.quantize_rows(served.live["item"])}
    assert_same_bits(model(REQUEST), io.serving_lookup(live, REQUEST, served.features))
    whole = {part: getattr(live["item"], part) for part in ("values", "scale", "offset")}
    assert_same_bits(model.tables["item"], whole)
    assert model.version.step == 4
    assert model.tables["fixed"] is loaded.tables["fixed"]
    assert files_of(served.root) == before
    assert_same_bits(io.load_model(served.root)(REQUEST), first)
    if way == "apply":  # it goes on serving while another is made of it
        assert_same_bits(loaded(REQUEST), first)
        assert loaded.version.step == 0
        assert model.apply(served.deltas[0]) is model  # it has that already


def test_a_model_whose_tables_were_taken_says_so(served):
    model = io.load_model(served.root).apply(served.deltas[0])
    model.apply_in_place(served.deltas[1])
    for call in (lambda: model(REQUEST), lambda: model.apply(served.deltas[1])):
        with pytest.raises(ValueError, match="apply_in_place has taken; use the model that it"):
            call()


def test_in_place_is_in_the_same_memory(served):
    loaded = io.load_model(served.root)
    once = loaded.apply_in_place(served.deltas[0])
    assert not loaded.tables["item"]["values"].is_deleted()  # memory of the file: never written
    old = once.tables["item"]["values"]
    place = old.unsafe_buffer_pointer()
    twice = once.apply_in_place(served.deltas[1])
    assert old.is_deleted()
    assert twice.tables["item"]["values"].unsafe_buffer_pointer() == place


@pytest.mark.whole
def test_a_retry_of_an_older_delta_of_the_same_step_changes_nothing(tmp_path):
    engine = make_engine(o.SGD(0.1), 2)
    state, touched = engine.init(jax.random.key(0)), io.TouchedRows(engine)
    state = rewritten(engine, state, touched, 1)
    tables, version = copied(engine, state), touched.version(state)  # a full export
    features = {n: FeatureConfig(c, on_bad_id="clip") for n, c in engine.table_configs.items()}
    io.export_model(tmp_path / "m", lambda a: a, tables, features, REQUEST, version=version)
    model, since = io.load_model(tmp_path / "m"), version.step
    for name in "ab":
        state = engine.set_rows(state, "item", [3], np.full((1, 5), ord(name)))
        touched.record_rows("item", [3], 1)
        last = io.export_delta(tmp_path / name, engine, state, touched, since=since)
    for name in "aba":
        version = io.apply_delta(tables, tmp_path / name, version)
        model = model.apply(tmp_path / name)
    assert version == model.version == last
    assert_same_bits(tables, engine.tables(state))
    assert_same_bits(model.tables["item"]["values"], engine.tables(state)["item"])


def no_room_for_items(array, *written, set_rows=served_tables.set_rows):
    if len(array) == V:
        raise MemoryError("no room for items")
    return set_rows(array, *written)


@pytest.mark.parametrize(
    ("own", "name", "value", "error", "text"),
    [
        ({"day.of/week"}, "INT32_ROWS", V - 1, ValueError, "at most 60 rows while x64 is off"),
        ({"day.of/week", "item"}, "INT32_ROWS", V - 1, ValueError, "at most 60 rows while x64"),
        ({"day.of/week"}, "set_rows", no_room_for_items, MemoryError, "no room for items"),
    ],
)
def test_a_table_that_cannot_be_written_leaves_the_others_in_place(
    own, name, value, error, text, served
):
    model = io.load_model(served.root).apply_in_place(served.deltas[0])
    assert next(iter(model.metadata["tables"])) == "day.of/week"
    model, before = dataclasses.replace(model, _own=frozenset(own)), model(REQUEST)
    with mock.patch.object(served_tables, name, value), pytest.raises(error, match=text):
        model.apply_in_place(served.deltas[1])
    assert_same_bits(model(REQUEST), before)


def test_arrays_may_be_bits_or_quantized(served):
    model = io.load_model(served.root)
    tables = {
        "item": io.QuantizedTable(**jax.tree.map(np.array, model.tables["item"])),
        "day.of/week": np.array(model.tables["day.of/week"]["values"]),
    }
    version = model.version
    for path in served.deltas:
        version = io.apply_delta(tables, path, version)
    assert_same_bits(tables["item"], io.quantize_rows(served.live["item"]))
    assert_same_bits(tables["day.of/week"], served.live["day.of/week"].view(np.uint16))


# -- refusals -------------------------------------------------------------------------------------


def test_tables_of_another_form_are_refused(served, tmp_path):
    version = io.load_model(served.root).version
    day = served.live["day.of/week"]
    read_only = day.copy()
    read_only.flags.writeable = False
    for given, text in [
        ({"days": day}, r"tables: expected tables among .* got \['days'\]"),
        ({"item": day}, r"'item': values: .* uint16 of shape \(61, 5\), got bfloat16 of shape \(7"),
        ({"day.of/week": day.astype(np.float32)}, "got float32"),
        ({"day.of/week": jax.numpy.asarray(day)}, "expected a writable NumPy array"),
        ({"day.of/week": read_only}, "got a read-only one; np.array copies"),
    ]:
        with pytest.raises(ValueError, match=text):
            io.apply_delta(given, served.deltas[0], version)
    for path, given, text in (
        (served.deltas[1], version, r"since: expected at most 0, .* got 2; apply the deltas"),
        (served.deltas[0], io.Version("other", 0), "run: expected run 'other', .*; training"),
    ):
        with pytest.raises(ValueError, match=text):
            io.apply_delta({"day.of/week": day.copy()}, path, given)
    table = TableConfig(8, 5, name="day.of/week", dtype="bfloat16")
    grown = np.zeros((8, 5), jax.numpy.bfloat16)
    one = FeatureConfig(table)
    ids = np.zeros(8, np.int32)
    io.export_model(tmp_path / "m", lambda a: a, {table: grown}, one, ids, version=version)
    text = r"table 'day.of/week': expected bfloat16 \[8, 5\], got bfloat16 \[7, 5\]; publish a full"
    with pytest.raises(ValueError, match=text):
        io.load_model(tmp_path / "m").apply(served.deltas[0])


def test_an_export_is_whole_or_refused(tmp_path):
    engine = make_engine(o.SGD(0.1), 1)
    state, touched = engine.init(jax.random.key(0)), io.TouchedRows(engine)
    state = rewritten(engine, state, touched, 1)

    def export(name="d", since=0, record=touched, state=state):
        io.export_delta(tmp_path / name, engine, state, record, since=since)

    for options, said in (
        ({"since": 2}, "since: expected at most 1, the state's step, got 2"),
        ({"record": io.TouchedRows(engine)}, "every update from 1 to 1 recorded, got none"),
        ({"record": io.TouchedRows(engine, step=1)}, "a step from 1 on, where recording began"),
        ({"record": io.TouchedRows(make_engine(None, 1))}, "expected the record of this engine"),
        ({"state": None}, "state: expected a TableState"),
    ):
        with pytest.raises(ValueError, match=said):
            export(**options)
    export()
    with pytest.raises(FileExistsError, match="d: expected nothing, got a file"):
        export()
    full = mock.patch("numpy.save", side_effect=OSError("disk full"))
    with full, pytest.raises(OSError, match="disk full"):
        export("e")
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_a_model_is_no_delta_and_a_delta_no_model(served):
    with pytest.raises(ValueError, match=r"metadata.json: kind: expected 'delta', got 'model'"):
        delta_files.read(served.root)
    with pytest.raises(ValueError, match=r"metadata.json: kind: expected 'model', got 'delta'"):
        io.load_model(served.deltas[0])


def test_a_row_that_cannot_be_quantized_is_refused_before_anything_is_set(tmp_path):
    engine = make_engine(o.SGD(0.1), 1)
    state, touched = engine.init(jax.random.key(0)), io.TouchedRows(engine)
    small = {"item": io.quantize_rows(copied(engine, state)["item"])}
    before = pickle.dumps(small)
    state = engine.set_rows(state, "item", [3], np.full((1, 5), np.nan))
    touched.record_rows("item", [3], 0)
    version = io.export_delta(tmp_path / "d", engine, state, touched, since=0)
    with pytest.raises(ValueError, match="quantize_rows: row 0: expected finite numbers"):
        io.apply_delta(small, tmp_path / "d", version)
    assert pickle.dumps(small) == before


def test_rows_that_int32_cannot_number_are_refused():
    table = jax.ShapeDtypeStruct((2**31, 4), np.float32)
    with pytest.raises(ValueError, match=r"at most 2147483647 rows while x64 is off, got 21474836"):
        served_tables.set_rows(table, np.array([2**31 - 1]), np.zeros((1, 4), np.float32))

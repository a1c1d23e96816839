"""A full export with all deltas gives the live tables, bit for bit, or raises an error."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
import pairs
import pytest
from jax.sharding import AxisType
from kernel_cases import assert_same_bits

from tpu_embed import (
    BatchSpec,
    EmbeddingEngine,
    FeatureConfig,
    RaggedIds,
    RowIdInitializer,
    SparseIds,
    TableConfig,
)
from tpu_embed import optimizers as o
from tpu_embed.core.layout import resolve
from tpu_embed.io import (
    QuantizedTable,
    TouchedRows,
    Version,
    apply_delta,
    export_delta,
    export_model,
    load_model,
    quantize_rows,
    serving_lookup,
)
from tpu_embed.io.delta import delta_files, row_blocks

ROOT = Path(__file__).resolve().parents[3]
BATCH, V = 16, 61


def mesh(devices):
    return jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("d",))


def make_engine(optimizer, devices=8, placement="mod", dtype="float32", dim=5):
    """Return an engine of two stacked tables, one of whose rows are few, and one that is fixed."""
    kind = {"dtype": dtype, "placement": placement, "initializer": RowIdInitializer()}
    item = TableConfig(V, dim, name="item", combiner="sum", **kind)
    day = TableConfig(7, dim, name="day.of/week", **kind)
    fixed = TableConfig(9, 3, RowIdInitializer(), name="fixed", trainable=False)
    features = {
        "item": FeatureConfig(item, on_bad_id="drop"),
        "seen": FeatureConfig(item, max_sequence_length=2, on_bad_id="clip"),
        "tags": FeatureConfig(day),
        "fixed": FeatureConfig(fixed),
    }
    return EmbeddingEngine(features, optimizer, mesh=mesh(devices))


def draw(step):
    rng = np.random.default_rng(step)
    seen = [rng.integers(0, V + 9, rng.integers(0, 4)).tolist() for _ in range(BATCH)]
    tags = [rng.integers(0, 7, rng.integers(0, 3)).tolist() for _ in range(BATCH)]
    return {
        "item": rng.integers(-9, 30, (BATCH, 2)),
        "seen": RaggedIds.from_lists(seen),
        "tags": SparseIds.from_lists(tags, weights=[[0.5] * len(bag) for bag in tags]),
        "fixed": rng.integers(0, 9, BATCH),
    }


def trained(engine, state, touched, steps):
    """Return the state after some updates, recorded as batches and as features."""
    spec = BatchSpec.union(*(engine.place(draw(step)).spec for step in range(1, 5)))
    for _ in range(steps):
        step = int(state.step) + 1
        batch = engine.place(draw(step), spec=spec)
        touched.record(batch if step % 2 else draw(step), step)
        shapes = jax.eval_shape(engine.lookup, state, batch)
        rng = np.random.default_rng(step)
        gradients = jax.tree.map(lambda a, r=rng: r.normal(size=a.shape).astype(a.dtype), shapes)
        state = engine.update_in_place(state, batch, gradients)
    return state


def rewritten(engine, state, touched, steps):
    """Return the state with other rows where updates would have changed them: few programs."""
    for step in range(int(state.step) + 1, int(state.step) + steps + 1):
        touched.record(draw(step), step)
        rng, tables = np.random.default_rng(step), copied(engine, state)
        for name, ids in touched.since(step - 1).items():
            if ids.size:
                tables[name][ids] = rng.normal(size=(ids.size, tables[name].shape[1]))
                state = engine.load(state, name, [tables[name]])
    return dataclasses.replace(state, step=jax.numpy.int32(state.step + steps))


def copied(engine, state):
    """Return the tables as writable NumPy arrays."""
    return {name: np.array(table) for name, table in engine.tables(state).items()}


def published(tmp_path, engine, change=rewritten, *, deltas=2, steps=2):
    """Return tables as they were, their version, the live state, and the deltas in between."""
    state, touched = engine.init(jax.random.key(0)), TouchedRows(engine)
    tables, version = copied(engine, state), touched.version(state)
    paths, last = [], version
    for n in range(deltas):
        state = change(engine, state, touched, steps)
        paths.append(tmp_path / f"delta-{n}")
        last = export_delta(paths[-1], engine, state, touched, since=last.step)
    return tables, version, state, paths


RULES = {
    "SGD": o.SGD(0.1),
    "Adagrad": o.Adagrad(0.1),
    "RowWiseAdagrad": o.RowWiseAdagrad(0.1),
    "Momentum": o.Momentum(0.1),
    "Adam": o.Adam(0.1),
    "Adam, every row": o.Adam(0.1, lazy_adam=False),
    "FTRL": o.FTRL(0.1, l1_regularization_strength=0.1),
    "Lion": o.Lion(0.01, weight_decay_factor=0.1),
    "optax": optax.adamw(0.1),
}
CASES = pairs.all_pairs(
    rule=list(RULES),
    devices=[1, 2, 8],
    placement=["mod", "div", "replicated"],
    dtype=["float32", "bfloat16"],
)
IN_CI = (5, 10, 16, 21)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            c, id="-".join(map(str, c.values())), marks=() if i in IN_CI else pytest.mark.whole
        )
        for i, c in enumerate(CASES)
    ],
)
def test_deltas_give_the_live_tables(case, tmp_path):
    engine = make_engine(RULES[case["rule"]], case["devices"], case["placement"], case["dtype"])
    tables, version, state, paths = published(tmp_path, engine, trained)
    for path in paths:
        version = apply_delta(tables, path, version)
    assert version.step == 4
    assert_same_bits(tables, engine.tables(state))
    rows = delta_files.read(paths[0]).tables
    assert rows["fixed"].ids.size == 0
    every = case["rule"] == "Adam, every row"
    assert (rows["item"].ids.size == V) is every


@pytest.mark.parametrize(
    ("packing", "dim", "dtype", "placement", "devices"),
    [
        pytest.param("words", 5, "float32", "div", 8, marks=pytest.mark.whole),
        ("words", 33, "bfloat16", "mod", 2),
        ("lanes", 16, "float32", "mod", 8),
        pytest.param("lanes", 7, "bfloat16", "replicated", 2, marks=pytest.mark.whole),
        pytest.param("lanes", 200, "float32", "div", 2, marks=pytest.mark.whole),
    ],
)
def test_packed_rows_are_read(packing, dim, dtype, placement, devices, tmp_path, monkeypatch):
    monkeypatch.setattr(resolve, "packing_of", lambda device: packing)
    engine = make_engine(o.Adagrad(0.1), devices, placement, dtype, dim)
    assert {stack.packing for stack in engine.layout.stacks} == {packing}
    tables, version, state, paths = published(tmp_path, engine, deltas=1, steps=1)
    apply_delta(tables, paths[0], version)
    assert_same_bits(tables, engine.tables(state))


def test_every_bit_pattern_travels(tmp_path):
    engine = make_engine(o.SGD(0.1), 8)
    state, touched = engine.init(jax.random.key(0)), TouchedRows(engine)
    tables, version = copied(engine, state), touched.version(state)
    odd = np.array([-0.0, np.inf, np.nan, 1e-40, -3e38], np.float32)
    state = engine.set_rows(state, "item", [60, 3], np.stack([odd, -odd]))
    state = engine.set_rows(state, "fixed", [8], np.ones((1, 3)))
    touched.record_rows("item", [60, 3], 0)
    touched.record_rows("fixed", [8], 0)
    edited = version._replace(edits=2)
    assert export_delta(tmp_path / "d", engine, state, touched, since=0) == edited
    assert apply_delta(tables, tmp_path / "d", version) == edited
    for name, table in engine.tables(state).items():
        np.testing.assert_array_equal(tables[name].view(np.uint32), np.asarray(table).view("u4"))


@pytest.mark.parametrize(
    "kind", [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.whole)]
)
def test_a_grid_of_devices_publishes_too(kind, tmp_path):
    kinds = {"axis_types": (kind, kind), "devices": jax.devices()}
    grid = jax.make_mesh((2, 4), ("x", "y"), **kinds)
    row_id = RowIdInitializer()
    tables = [
        TableConfig(V, 3, row_id, name="item", shard_axes="y"),
        TableConfig(V, 3, row_id, name="user", placement="div", shard_axes="x"),
        TableConfig(V, 3, row_id, name="all", dtype="bfloat16"),
    ]
    features = {table.name: FeatureConfig(table) for table in tables}
    engine = EmbeddingEngine(features, o.SGD(0.5), mesh=grid, batch_axes="x")
    state, touched = engine.init(jax.random.key(0)), TouchedRows(engine)
    arrays, version = copied(engine, state), touched.version(state)
    ids = {name: np.random.default_rng(1).integers(-1, V, (BATCH, 2)) for name in features}
    batch = engine.place(ids)
    touched.record(batch, 1)
    shapes = jax.eval_shape(engine.lookup, state, batch)
    ones = jax.tree.map(lambda a: np.ones(a.shape, a.dtype), shapes)
    state = engine.update(state, batch, ones)
    export_delta(tmp_path / "d", engine, state, touched, since=0)
    apply_delta(arrays, tmp_path / "d", version)
    assert_same_bits(arrays, engine.tables(state))
    wanted = {name: np.unique(given[given >= 0]).tolist() for name, given in ids.items()}
    assert {n: t.ids.tolist() for n, t in delta_files.read(tmp_path / "d").tables.items()} == wanted


def test_numbers_of_64_bits_travel(tmp_path):
    with jax.enable_x64(True):
        engine = make_engine(o.Adagrad(0.1), 2, "mod", "float64")
        tables, version, state, paths = published(tmp_path, engine, deltas=1, steps=1)
        assert tables["item"].dtype == np.float64
        apply_delta(tables, paths[0], version)
        assert_same_bits(tables, engine.tables(state))


def test_blocks_join_where_they_must(tmp_path, monkeypatch):
    monkeypatch.setattr("tpu_embed.io.delta.row_blocks._NUMBERS", 1)
    table = TableConfig(1000, 4, RowIdInitializer(), name="item")
    engine = EmbeddingEngine({"x": FeatureConfig(table)}, o.SGD(1.0), mesh=mesh(8))
    state, touched = engine.init(jax.random.key(0)), TouchedRows(engine)
    tables, version = copied(engine, state), touched.version(state)
    model = tmp_path / "m"
    export_model(model, lambda a: a, tables, {"x": FeatureConfig(table)}, IDS, version=version)
    ids = {"x": np.random.default_rng(0).permutation(1000)[:200]}
    touched.record(ids, 1)
    state = engine.update(state, ids, jax.tree.map(lambda a: a + 1, engine.lookup(state, ids)))
    export_delta(tmp_path / "d", engine, state, touched, since=0)
    apply_delta(tables, tmp_path / "d", version)
    assert_same_bits(tables, engine.tables(state))
    served = load_model(model).apply(tmp_path / "d")
    assert_same_bits(served.tables["item"]["values"], engine.tables(state)["item"])


IDS = {"x": np.zeros(8, np.int32)}


def test_a_delta_is_as_large_as_what_was_touched(tmp_path):
    table = TableConfig(100_000, 16, RowIdInitializer(), name="item")
    engine = EmbeddingEngine({"x": FeatureConfig(table)}, o.SGD(0.1), mesh=mesh(2))
    state, touched = engine.init(jax.random.key(0)), TouchedRows(engine)
    sizes = []
    for n in (100, 1000):
        ids = np.random.default_rng(0).permutation(100_000)[:n]
        touched.record({"x": ids}, 1)
        export = tmp_path / f"{n}"
        state = state.__class__(state.tables, state.slots, np.int32(1), state.counters)
        export_delta(export, engine, state, touched, since=0)
        sizes.append(sum(f.stat().st_size for f in export.rglob("*") if f.is_file()))
    assert sizes[1] - sizes[0] == pytest.approx(900 * (16 * 4 + 4), abs=64)
    assert sizes[0] < 100 * (16 * 4 + 4) + 2000


# -- servers --------------------------------------------------------------------------------------


class Served(NamedTuple):
    engine: EmbeddingEngine
    features: dict
    root: Path
    deltas: list[Path]
    live: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Return an export of three tables, one quantized, and two deltas."""
    root = tmp_path_factory.mktemp("served")
    engine = make_engine(o.Adagrad(0.1), 2, "mod", "bfloat16")
    configs = engine.table_configs
    features = {name: FeatureConfig(config, on_bad_id="clip") for name, config in configs.items()}
    tables, version, state, deltas = published(root, engine)
    tables["item"] = quantize_rows(tables["item"])
    export_model(root / "m", lambda a: a, tables, features, REQUEST, version=version)
    return Served(engine, features, root / "m", deltas, copied(engine, state))


REQUEST = {
    name: np.random.default_rng(0).integers(-1, size, (4, 3))
    for name, size in {"item": V, "day.of/week": 7, "fixed": 9}.items()
}


def files_of(root):
    return {f: f.read_bytes() for f in root.rglob("*") if f.is_file()}


@pytest.mark.parametrize("way", ["apply", "apply_in_place"])
def test_a_served_model_looks_up_the_live_tables(served, way):
    before = files_of(served.root)
    model = load_model(served.root)
    first = model(REQUEST)
    for path in served.deltas:
        model = getattr(model, way)(path)
    live = served.live | {"item": quantize_rows(served.live["item"])}
    assert_same_bits(model(REQUEST), serving_lookup(live, REQUEST, served.features))
    whole = {part: getattr(live["item"], part) for part in ("values", "scale", "offset")}
    assert_same_bits(model.tables["item"], whole)
    assert model.version.step == 4
    assert files_of(served.root) == before
    assert_same_bits(load_model(served.root)(REQUEST), first)


def test_a_model_whose_tables_were_taken_says_so(served):
    model = load_model(served.root).apply(served.deltas[0])
    model.apply_in_place(served.deltas[1])
    for call in (lambda: model(REQUEST), lambda: model.apply(served.deltas[1])):
        with pytest.raises(ValueError, match="apply_in_place has taken; use the model that it"):
            call()


def test_a_model_goes_on_serving_while_another_is_made_of_it(served):
    model = load_model(served.root)
    first = model(REQUEST)
    newer = model.apply(served.deltas[0])
    assert_same_bits(model(REQUEST), first)
    assert model.version.step == 0
    assert newer.version.step == 2
    assert newer.tables["fixed"] is model.tables["fixed"]


def test_in_place_is_in_the_same_memory(served):
    loaded = load_model(served.root)
    once = loaded.apply_in_place(served.deltas[0])
    assert not loaded.tables["item"]["values"].is_deleted()  # memory of the file: never written
    old = once.tables["item"]["values"]
    place = old.unsafe_buffer_pointer()
    twice = once.apply_in_place(served.deltas[1])
    assert old.is_deleted()
    assert twice.tables["item"]["values"].unsafe_buffer_pointer() == place


def test_an_order_that_leaves_nothing_out_is_good(served):
    first, second = served.deltas
    model = load_model(served.root).apply(first)
    for path in (first, second, second):
        model = model.apply(path)
    assert model.apply(first) is model
    assert_same_bits(model.tables["day.of/week"]["values"], bits(served.live["day.of/week"]))


def test_a_retry_of_an_older_delta_of_the_same_step_changes_nothing(tmp_path):
    engine = make_engine(o.SGD(0.1), 2)
    state, touched = engine.init(jax.random.key(0)), TouchedRows(engine)
    state = rewritten(engine, state, touched, 1)
    tables, version = copied(engine, state), touched.version(state)  # a full export
    features = {n: FeatureConfig(c, on_bad_id="clip") for n, c in engine.table_configs.items()}
    export_model(tmp_path / "m", lambda a: a, tables, features, REQUEST, version=version)
    model = load_model(tmp_path / "m")
    for name in ("a", "b"):
        rows = np.full((1, 5), ord(name))
        state = engine.set_rows(state, "item", [3], rows)
        touched.record_rows("item", [3], 1)
        published = export_delta(tmp_path / name, engine, state, touched, since=version.step)
    for name in ("a", "b", "a"):
        version = apply_delta(tables, tmp_path / name, version)
        model = model.apply(tmp_path / name)
    assert version == model.version == published
    assert_same_bits(tables, engine.tables(state))
    assert_same_bits(model.tables["item"]["values"], engine.tables(state)["item"])
    state = rewritten(engine, state, touched, 1)
    export_delta(tmp_path / "c", engine, state, touched, since=version.step)
    apply_delta(tables, tmp_path / "c", version)
    assert_same_bits(tables, engine.tables(state))


@pytest.mark.parametrize("own", [{"day.of/week"}, {"day.of/week", "item"}])
def test_a_table_that_cannot_be_written_leaves_the_others_in_place(own, served, monkeypatch):
    model = load_model(served.root).apply_in_place(served.deltas[0])
    assert next(iter(model.metadata["tables"])) == "day.of/week"
    model, before = dataclasses.replace(model, _own=frozenset(own)), model(REQUEST)
    monkeypatch.setattr(row_blocks, "INT32_ROWS", V - 1)  # too many are item's alone
    with pytest.raises(ValueError, match="expected at most 60 rows while x64 is off, got 61"):
        model.apply_in_place(served.deltas[1])
    assert_same_bits(model(REQUEST), before)


def bits(table):
    return table.view(np.uint16)


def test_arrays_may_be_bits_or_quantized(served):
    model = load_model(served.root)
    tables = {
        "item": QuantizedTable(**{part: np.array(a) for part, a in model.tables["item"].items()}),
        "day.of/week": np.array(model.tables["day.of/week"]["values"]),
    }
    version = model.version
    for path in served.deltas:
        version = apply_delta(tables, path, version)
    assert_same_bits(tables["item"], quantize_rows(served.live["item"]))
    assert_same_bits(tables["day.of/week"], bits(served.live["day.of/week"]))


# -- refusals -------------------------------------------------------------------------------------


def test_a_gap_and_another_run_are_refused(served, tmp_path):
    model = load_model(served.root)
    with pytest.raises(ValueError, match=r"since: expected at most 0, .* got 2; apply the deltas"):
        model.apply(served.deltas[1])
    other = Version("other", 2)
    tables = {"day.of/week": served.live["day.of/week"].copy()}
    with pytest.raises(ValueError, match=r"run: expected run 'other', .*; training began anew"):
        apply_delta(tables, served.deltas[1], other)
    tables = {n: np.asarray(t) for n, t in served.live.items()}
    export_model(tmp_path / "m", lambda a: a, tables, served.features, REQUEST)
    with pytest.raises(ValueError, match=r"a model of a known version, got none; export it with"):
        load_model(tmp_path / "m").apply(served.deltas[0])


def test_tables_of_another_form_are_refused(served, tmp_path):
    version = load_model(served.root).version
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
            apply_delta(given, served.deltas[0], version)
    table = TableConfig(8, 5, name="day.of/week", dtype="bfloat16")
    grown = np.zeros((8, 5), jax.numpy.bfloat16)
    one = FeatureConfig(table)
    export_model(tmp_path / "m", lambda a: a, {table: grown}, one, IDS["x"], version=version)
    text = r"table 'day.of/week': expected bfloat16 \[8, 5\], got bfloat16 \[7, 5\]; publish a full"
    with pytest.raises(ValueError, match=text):
        load_model(tmp_path / "m").apply(served.deltas[0])


def test_an_export_is_whole_or_refused(tmp_path, monkeypatch):
    engine = make_engine(o.SGD(0.1), 1)
    state, touched = engine.init(jax.random.key(0)), TouchedRows(engine)
    state = rewritten(engine, state, touched, 1)

    def export(name="d", since=0, record=touched):
        export_delta(tmp_path / name, engine, state, record, since=since)

    with pytest.raises(ValueError, match="since: expected at most 1, the state's step, got 2"):
        export(since=2)
    with pytest.raises(ValueError, match="every update from 1 to 1 recorded, got none of 1"):
        export(record=TouchedRows(engine))
    with pytest.raises(ValueError, match="a step from 1 on, where recording began, got 0; publish"):
        export(record=TouchedRows(engine, step=1))
    with pytest.raises(ValueError, match="touched: expected the record of this engine"):
        export(record=TouchedRows(make_engine(o.SGD(0.1), 1)))
    with pytest.raises(ValueError, match="state: expected a TableState"):
        export_delta(tmp_path / "d", engine, None, touched, since=0)
    export()
    with pytest.raises(FileExistsError, match="d: expected nothing, got a file"):
        export()
    monkeypatch.setattr(np, "save", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        export("e")
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


FILES = ["metadata.json", "tables/item.ids.npy", "tables/item.values.npy"]


@pytest.fixture
def damaged(served, tmp_path):
    return Path(shutil.copytree(served.deltas[0], tmp_path / "copy"))


@pytest.mark.parametrize("file", FILES)
def test_a_missing_or_truncated_file_is_named(file, damaged, served):
    model, content = load_model(served.root), (damaged / file).read_bytes()
    for size in (0, 1, len(content) // 2, len(content) - 1):
        (damaged / file).write_bytes(content[:size])
        with pytest.raises(ValueError, match=f"{file}: expected .*; copy the directory whole"):
            model.apply(damaged)
    (damaged / file).unlink()
    text = f"{file}: expected a file, got none; copy the directory whole, or publish a full export"
    with pytest.raises(FileNotFoundError, match=text):
        model.apply(damaged)


@pytest.mark.parametrize("file", FILES)
def test_no_bit_can_be_another(file, damaged):
    content = (damaged / file).read_bytes()
    for at in range(len(content)):
        other = bytearray(content)
        other[at] ^= 1
        (damaged / file).write_bytes(other)
        with pytest.raises(ValueError, match=f"{file}"):
            delta_files.read(damaged)
    (damaged / file).write_bytes(content)
    delta_files.read(damaged)


def test_a_model_is_no_delta_and_a_delta_no_model(served):
    with pytest.raises(ValueError, match=r"metadata.json: kind: expected 'delta', got 'model'"):
        delta_files.read(served.root)
    with pytest.raises(ValueError, match=r"metadata.json: kind: expected 'model', got 'delta'"):
        load_model(served.deltas[0])


def test_a_row_that_cannot_be_quantized_is_refused_before_anything_is_set(tmp_path):
    engine = make_engine(o.SGD(0.1), 1)
    state, touched = engine.init(jax.random.key(0)), TouchedRows(engine)
    small = {"item": quantize_rows(copied(engine, state)["item"])}
    before = pickle.dumps(small)
    state = engine.set_rows(state, "item", [3], np.full((1, 5), np.nan))
    touched.record_rows("item", [3], 0)
    version = export_delta(tmp_path / "d", engine, state, touched, since=0)
    with pytest.raises(ValueError, match="quantize_rows: row 0: expected finite numbers"):
        apply_delta(small, tmp_path / "d", version)
    assert pickle.dumps(small) == before


def test_rows_that_int32_cannot_number_are_refused():
    table = jax.ShapeDtypeStruct((2**31, 4), np.float32)
    with pytest.raises(ValueError, match=r"at most 2147483647 rows while x64 is off, got 21474836"):
        row_blocks.set_rows(table, np.array([2**31 - 1]), np.zeros((1, 4), np.float32))


# -- many processes -------------------------------------------------------------------------------


def test_two_processes_write_one_delta(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with socket.socket() as probe:  # the system picks a free port
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        str(ROOT / "tests/io/delta/delta_process.py"),
        str(tmp_path),
        str(port),
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen([*command, str(n)], env=dict(os.environ), **pipes) for n in range(2)
    ]
    try:
        done = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, done, strict=True):
        assert process.returncode == 0, errors
    seen = [json.loads(out.splitlines()[-1]) for out, _ in done]
    # A path that is taken; one each; a step after the state's in process 1; no room in process 0.
    said = [1, "FileExistsError", "ValueError", "ValueError"]
    assert seen == [[*said, "MemoryError"], [*said, "RuntimeError"]]  # process 1 keeps no rows
    assert {path.name for path in tmp_path.iterdir()} == {"d", "first.npz", "last.npz"}
    first, last = (dict(np.load(tmp_path / f"{name}.npz")) for name in ("first", "last"))
    delta = delta_files.read(tmp_path / "d")
    assert delta.tables["item"].ids.tolist() == sorted({*range(0, 40, 2), *range(1, 20)})
    apply_delta(first, tmp_path / "d", Version(delta.version.run, 0))
    assert_same_bits(first, last)

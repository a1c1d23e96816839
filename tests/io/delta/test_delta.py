"""A full export with all deltas gives the live tables, bit for bit, or raises an error."""

import delta_process
import jax
import numpy as np
import optax
import pairs
import pytest
from delta_cases import BATCH, V, copied, make_engine, published, trained
from facade_cases import mesh
from jax.sharding import AxisType
from kernel_cases import assert_same_bits
from process_runs import run

from tpu_embed import EmbeddingEngine, FeatureConfig, RowIdInitializer, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.io import TouchedRows, Version, apply_delta, export_delta
from tpu_embed.io.delta import delta_files

RULES = {
    "SGD": o.SGD(0.1),
    "Adagrad": o.Adagrad(0.1),
    "Momentum": o.Momentum(0.1),
    "Adam, every row": o.Adam(0.1, lazy_adam=False),
    "optax": optax.adamw(0.1),
}


@pytest.mark.parametrize(
    "case",
    pairs.all_pairs(
        rule=list(RULES),
        devices=[1, 2, 8],
        placement=["mod", "div", "replicated"],
        dtype=["float32", "bfloat16"],
    ),
    ids=lambda case: "-".join(map(str, case.values())),
)
@pytest.mark.quick(1)
def test_deltas_give_the_live_tables(case, tmp_path):
    engine = make_engine(RULES[case["rule"]], case["devices"], case["placement"], case["dtype"])
    tables, version, state, paths = published(tmp_path, engine, trained)
    for path in paths:
        version = apply_delta(tables, path, version)
    assert version.step == 4
    assert_same_bits(tables, engine.tables(state))
    rows = delta_files.read(paths[0]).tables
    assert rows["fixed"].arrays["ids"].size == 0
    every = case["rule"] == "Adam, every row"
    assert (rows["item"].arrays["ids"].size == V) is every


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
    grid = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind), devices=jax.devices())
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
    ones = jax.tree.map(np.ones_like, engine.lookup(state, batch))
    state = engine.update(state, batch, ones)
    export_delta(tmp_path / "d", engine, state, touched, since=0)
    apply_delta(arrays, tmp_path / "d", version)
    assert_same_bits(arrays, engine.tables(state))
    found = delta_files.read(tmp_path / "d").tables
    for name, given in ids.items():
        assert found[name].arrays["ids"].tolist() == np.unique(given[given >= 0]).tolist()


def test_numbers_of_64_bits_travel(tmp_path):
    with jax.enable_x64(True):
        engine = make_engine(o.Adagrad(0.1), 2, "mod", "float64")
        tables, version, state, paths = published(tmp_path, engine, deltas=1, steps=1)
        assert tables["item"].dtype == np.float64
        apply_delta(tables, paths[0], version)
        assert_same_bits(tables, engine.tables(state))


def test_a_delta_is_as_large_as_what_was_touched(tmp_path):
    table = TableConfig(100_000, 16, RowIdInitializer(), name="item")
    engine = EmbeddingEngine({"x": FeatureConfig(table)}, o.SGD(0.1), mesh=mesh(2))
    state, touched = engine.init(jax.random.key(0)), TouchedRows(engine)
    sizes = []
    for n in (100, 1000):
        touched.record_rows("item", np.random.default_rng(0).permutation(100_000)[:n], 0)
        export_delta(tmp_path / f"{n}", engine, state, touched, since=0)
        sizes.append(sum(f.stat().st_size for f in (tmp_path / f"{n}").rglob("*") if f.is_file()))
    assert sizes[1] - sizes[0] == pytest.approx(900 * (16 * 4 + 4), abs=64)
    assert sizes[0] < 100 * (16 * 4 + 4) + 2000


# -- many processes -------------------------------------------------------------------------------


@pytest.mark.whole
def test_two_processes_write_one_delta(tmp_path, tmp_path_factory):
    calls = [(delta_process.publish, tmp_path)]
    ((seen, first, last),), ((other, *_),) = run(2, tmp_path_factory.mktemp("two"), calls)
    # A path that is taken; one each; a step after the state's in process 1; no room in process 0.
    said = [1, "FileExistsError", "ValueError", "ValueError"]
    assert seen == [*said, "MemoryError"]
    assert other == [*said, "RuntimeError"]  # which keeps no rows
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    delta = delta_files.read(tmp_path / "d")
    assert delta.tables["item"].arrays["ids"].tolist() == sorted({*range(0, 40, 2), *range(1, 20)})
    apply_delta(first, tmp_path / "d", Version(delta.version.run, 0))
    assert_same_bits(first, last)

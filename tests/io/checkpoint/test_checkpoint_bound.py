"""Files of another checkpoint, table, slot or place are refused, and the error names them."""

import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import contents, table_of
from facade_cases import assert_same, mesh
from file_cases import chunks, rewrite, swap

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.io import restore, save
from tpu_embed.io.checkpoint import row_files

# Tables of different seeds are to differ.
pytestmark = pytest.mark.default_rows

MODEL = {"w": jnp.arange(6.0), "v": jnp.arange(6.0) + 1}


@pytest.fixture(scope="module")
def engine():
    """Two tables of one form, each with a slot of the same form; two shards, in pieces."""
    tables = [TableConfig(9, 2, name=name, placement="div") for name in ("item", "user")]
    features = [FeatureConfig(table) for table in tables]
    return EmbeddingEngine(features, o.Adagrad(0.5), mesh=mesh(2))


@pytest.fixture(scope="module")
def saved(engine, tmp_path_factory):
    """Two checkpoints of one form, chunks of 2 rows, whose numbers are all different."""
    root = tmp_path_factory.mktemp("bound")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_files, "BLOCK", 16)
        for i, name in enumerate(("a", "b")):
            state = engine.init(jax.random.key(i))
            rows = np.arange(18, dtype=np.float32).reshape(9, 2) + 200 * i
            for n, table in enumerate(("item", "user")):
                slot = rows + 100 * n
                state = engine.set_rows(state, table, np.arange(9), slot, slot="accumulators")
            model = jax.tree.map(lambda leaf, i=i: leaf + 10 * i, MODEL)
            save(root / name, engine, state, model=model, position={"epoch": i})
    return root


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


SWAPS = {
    "places of one shard": (("a", "item/table", 0), ("a", "item/table", 1)),
    "two shards": (("a", "item/table", 0), ("a", "item/table", -1)),
    "a slot's and a table's": (("a", "item/table", 1), ("a", "item/slots", 1)),
    "two tables'": (("a", "item/table", 1), ("a", "user/table", 1)),
    "two slots'": (("a", "item/slots", 2), ("a", "user/slots", 2)),
    "two checkpoints'": (("a", "item/table", 3), ("b", "item/table", 3)),
    "two checkpoints' slots": (("a", "user/slots", 0), ("b", "user/slots", 0)),
}


@pytest.mark.parametrize("case", SWAPS)
@pytest.mark.quick(2)
def test_a_chunk_of_another_place_is_refused_by_name(engine, copy, case):
    first, second = (chunks(copy / root / "tables" / place)[n] for root, place, n in SWAPS[case])
    assert first.read_bytes() != second.read_bytes()
    swap(first, second)
    said = "expected the file of this place and checkpoint, of checksum .*, got that of checksum"
    with pytest.raises(ValueError, match=re.escape(f"{first}") + f": {said}") as error:
        restore(copy / "a", engine)
    assert f"table {SWAPS[case][0][1][:4]!r}" in str(error.value)


PLACES = {
    "an array": ("a/tables/item/table", "a/tables/user/table"),
    "a slot as a table": ("a/tables/item/table", "a/tables/item/slots/accumulators"),
    "an array of another": ("a/tables/item/table", "b/tables/item/table"),
    "a table of another": ("a/tables/user", "b/tables/user"),
    "the position of another": ("a/position", "b/position"),
    "the model of another": ("a/model", "b/model"),
    "the tables of another": ("a/tables", "b/tables"),
    "manifest of another": ("a/tables/tables.json", "b/tables/tables.json"),
    "checksums of another": ("a/tables/checksums.0.json", "b/tables/checksums.0.json"),
    "position of another": ("a/position/value.json", "b/position/value.json"),
    "leaves of another": ("a/model/leaves.json", "b/model/leaves.json"),
    "checksums of another's model": ("a/model/checksums.json", "b/model/checksums.json"),
    "a position that is a model's": ("a/position/value.json", "a/model/leaves.json"),
}


@pytest.mark.parametrize("case", PLACES)
def test_what_is_of_another_place_is_refused_by_name(engine, copy, case):
    first, second = (copy / name for name in PLACES[case])
    swap(first, second)
    with pytest.raises(ValueError, match=re.escape(f"{copy / 'a'}/")) as error:
        restore(copy / "a", engine, model=MODEL)
    if first.is_dir():  # the tables say which checkpoint it is
        named = "model" if first.name == "tables" else first.relative_to(copy / "a")
        assert f"{copy / 'a' / named}/" in str(error.value)


def test_metadata_of_an_array_is_as_written(engine, copy):
    path = copy / "a/tables/item/table/zarr.json"  # chunks of as many numbers, in another order
    assert '"chunk_shape":[1,2,2]' in path.read_text()
    path.write_text(path.read_text().replace('"chunk_shape":[1,2,2]', '"chunk_shape":[2,1,2]'))
    with pytest.raises(ValueError, match=re.escape(f"{copy / 'a'}/")):
        restore(copy / "a", engine, model=MODEL)


def test_a_models_array_of_another_checkpoint_is_refused_by_name(engine, copy):
    first, second = (min((copy / name / "model").rglob("d/*")) for name in "ab")
    shutil.copyfile(second, first)
    with pytest.raises(ValueError, match=re.escape(first.name)):
        restore(copy / "a", engine, model=MODEL)


def test_what_is_not_read_is_not_checked(engine, copy):
    """An engine of one table, without an optimizer, reads that table's chunks alone."""
    state = restore(copy / "a", engine).state
    for path in (*chunks(copy / "a/tables/user"), *chunks(copy / "a/tables/item/slots")):
        path.write_bytes(b"damaged")
    item = {"x": FeatureConfig(TableConfig(9, 2, name="item"))}
    one = EmbeddingEngine(item, mesh=mesh(1))
    found = restore(copy / "a", one, leave_out=["user"]).state
    assert_same(table_of(one, found), table_of(engine, state))


def test_checksums_of_every_process_are_asked_for(engine, copy):
    rewrite(copy / "a/tables/tables.json", lambda one: one["value"].update(processes=2))
    with pytest.raises(FileNotFoundError, match=r"checksums\.1\.json: expected a file, got none"):
        restore(copy / "a", engine)


def test_two_checkpoints_of_one_state_are_two(engine, tmp_path):
    state = engine.init(jax.random.key(0))
    for name in "ab":
        save(tmp_path / name, engine, state)
    swap(*(tmp_path / name / "position" for name in "ab"))
    with pytest.raises(ValueError, match=r"value\.json: expected a file of checkpoint \w+, got"):
        restore(tmp_path / "a", engine)
    swap(*(tmp_path / name / "position" for name in "ab"))
    assert_same(contents(engine, restore(tmp_path / "a", engine).state), contents(engine, state))


def test_numbers_are_converted_between_floats_alone(engine, copy):
    for dtype, said in (("int32", "declare it as it was"), ("float16", "convert=True rounds it")):
        rewrite(
            copy / "a/tables/tables.json",
            lambda one, d=dtype: one["value"]["tables"]["item"]["table"].update({"dtype": d}),
        )
        for options in ({}, {"convert": True}) if dtype == "int32" else ({},):
            with pytest.raises(ValueError, match=f"expected dtype float32, got .*{dtype}; {said}"):
                restore(copy / "a", engine, **options)

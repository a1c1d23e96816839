"""Rows on disk: in logical order for any shards, in blocks, from the host or from devices."""

import re
import weakref

import jax
import numpy as np
import pytest
from facade_cases import mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig
from tpu_embed.core.layout import MeshAxes, resolve
from tpu_embed.core.rows import devices
from tpu_embed.core.state import fields
from tpu_embed.io.checkpoint import row_files
from tpu_embed.io.checkpoint.row_files import RowArray, RowReader, RowWriter
from tpu_embed.io.checkpoint.tables import LocalShards, row_array, write_rows


def made(path, shards, alternate, row=(2,), size=11, together=None):
    """Return a reader of an array on disk whose row r is [r, r, …], those rows, and the sums."""
    per_shard = -(-size // shards)
    array = RowArray(path, shards, per_shard, alternate, row, np.dtype(np.float32))
    logical = np.broadcast_to(
        np.arange(shards * per_shard, dtype=np.float32).reshape(-1, *[1] * len(row)),
        (shards * per_shard, *row),
    )
    physical, together = logical.reshape(array.shape), together or shards
    writer = RowWriter(array, together)
    for first in range(0, per_shard, array.block):
        inside = slice(first, min(first + array.block, per_shard))
        for shard in range(0, shards, together if alternate else 1):
            chosen = slice(shard, shard + (together if alternate else 1))
            place = (inside, chosen) if alternate else (chosen, inside)
            writer.write(place, physical[place])
    checksums = writer.finish()
    return RowReader(array, checksums), logical[:size], checksums


@pytest.mark.parametrize("alternate", [True, False])
@pytest.mark.parametrize("shards", [1, 2, 8, 16])
def test_any_range_is_read(tmp_path, shards, alternate):
    reader, logical, _ = made(tmp_path / "rows", shards, alternate)
    for first in range(len(logical)):
        for last in range(first + 1, len(logical) + 1):
            np.testing.assert_array_equal(reader.read(range(first, last)), logical[first:last])


def test_one_number_a_row(tmp_path):
    reader, logical, _ = made(tmp_path / "rows", 2, True, row=())
    np.testing.assert_array_equal(reader.read(range(3, 8)), logical[3:8])


@pytest.mark.parametrize(
    "other",
    [{"shards": 3}, {"alternate": False}, {"row": (3,)}, {"dtype": np.dtype(np.int32)}],
    ids=lambda other: next(iter(other)),
)
def test_an_array_of_another_form_is_not_opened(tmp_path, other):
    reader, _, checksums = made(tmp_path / "rows", 2, True)
    form = {"shards": 2, "rows_per_shard": 6, "alternate": True, "row": (2,)} | other
    array = RowArray(reader.array.path, **({"dtype": reader.array.dtype} | form))
    with pytest.raises(ValueError, match="as the manifest says, got float32"):
        RowReader(array, checksums)


def test_a_missing_chunk_is_no_zeros(tmp_path):
    reader, *_ = made(tmp_path / "rows", 1, True)
    path = reader.array.path / "c.0.0.0"
    path.unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(f"{path}: expected a file, got none")):
        reader.read(range(2))


@pytest.mark.parametrize("alternate", [True, False])
def test_every_chunk_is_known_and_only_those_that_are_read_are_checked(
    tmp_path, monkeypatch, alternate
):
    """Chunks of 2 rows, of two shards each where shards alternate: rows in pieces have others."""
    monkeypatch.setattr(row_files, "BLOCK", 64 if alternate else 16)
    reader, logical, checksums = made(tmp_path / "rows", 4, alternate, size=19, together=2)
    path = reader.array.path
    assert sorted(checksums) == sorted(file.name for file in path.iterdir())
    assert len(checksums) == 1 + (3 * 2 if alternate else 4 * 3)
    first, other = path / "c.0.0.0", path / ("c.2.1.0" if alternate else "c.3.1.0")
    content, instead = first.read_bytes(), other.read_bytes()
    for damaged, said in (
        (instead, "expected the file of this place and checkpoint, of checksum"),
        (content + b"    ", f"expected {len(content)} bytes, got {len(content) + 4}"),
        (content[:-1], f"expected {len(content)} bytes, got {len(content) - 1}"),
        (b"", f"expected {len(content)} bytes, got 0"),
    ):
        first.write_bytes(damaged)
        fresh = RowReader(reader.array, checksums)
        rest = slice(8, 19) if alternate else slice(2, 14)
        np.testing.assert_array_equal(fresh.read(range(rest.start, rest.stop)), logical[rest])
        with pytest.raises(ValueError, match=re.escape(f"{first}: {said}")):
            fresh.read(range(19))
    first.write_bytes(content)
    np.testing.assert_array_equal(RowReader(reader.array, checksums).read(range(19)), logical)


def test_a_damaged_chunk_that_ends_as_it_should_is_refused(tmp_path):
    reader, *_ = made(tmp_path / "rows", 1, True)
    path = reader.array.path / "c.0.0.0"
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(ValueError, match=r"c\.0\.0\.0.*Digest mismatch"):
        reader.read(range(2))


def _field(packing, devices, dtype, monkeypatch):
    monkeypatch.setattr(resolve, "packing_of", lambda device: packing)
    tables = [TableConfig(n, 24, dtype=dtype, name=f"{n}") for n in (37, 13)]
    engine = EmbeddingEngine([FeatureConfig(table) for table in tables], mesh=mesh(devices))
    return engine, list(fields(engine.layout))[1]


@pytest.mark.parametrize(
    ("packing", "dtype", "copied"), [("none", "float32", False), ("lanes", "bfloat16", True)]
)
@pytest.mark.quick(1)
def test_devices_give_a_block_at_a_time(tmp_path, monkeypatch, packing, dtype, copied):
    """As on an accelerator: nothing but blocks of the table's own rows is moved to the host."""
    engine, field = _field(packing, 2, dtype, monkeypatch)
    state, moved = engine.init(jax.random.key(0)), []
    wanted, take = np.asarray(engine.tables(state)["13"]), devices._take

    def counted(lines, places, row_format):
        moved.append(int((places >= 0).sum()))
        return take(lines, places, row_format)

    monkeypatch.setattr(MeshAxes, "on_cpu", False)
    monkeypatch.setattr(devices, "_take", counted)
    monkeypatch.setattr(devices, "BLOCK", 4 * wanted[0].nbytes)
    monkeypatch.setattr(row_files, "BLOCK", 4 * wanted[0].nbytes)
    array = row_array(tmp_path / "rows", field)
    shards = LocalShards(state, engine.layout, field, copied=copied)
    reader = RowReader(array, write_rows(array, shards))
    np.testing.assert_array_equal(reader.read(range(13)), wanted)
    assert max(moved) <= 4
    assert len(moved) >= 4


def test_rows_that_were_copied_let_the_state_go():
    engine = EmbeddingEngine(FeatureConfig(TableConfig(9, 2, name="t")), mesh=mesh(2))
    state = engine.init(jax.random.key(0))
    (f,), held = fields(engine.layout), [weakref.ref(leaf) for leaf in state.tables.values()]
    expected = np.asarray(engine.tables(state)["t"])
    shards = LocalShards(state, engine.layout, f, copied=True)
    del state
    assert [one() for one in held] == [None]
    np.testing.assert_array_equal(shards.block([0, 1], 0, 5).reshape(-1, 2)[:9], expected)

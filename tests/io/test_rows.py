"""Rows on disk: logical order whatever the shards, in blocks, from the host or from devices."""

import jax
import numpy as np
import pytest
from facade_cases import mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig
from tpu_embed.core import resolve
from tpu_embed.core.fields import fields
from tpu_embed.io import rows
from tpu_embed.io.rows import RowArray, Shards, row_array, write_rows


def made(path, shards, alternate, row=(2,), size=11):
    """Return an array on disk whose row r is [r, r, …], and those rows."""
    per_shard = -(-size // shards)
    array = RowArray(path, shards, per_shard, alternate, row, np.dtype(np.float32))
    logical = np.broadcast_to(
        np.arange(shards * per_shard, dtype=np.float32).reshape(-1, *[1] * len(row)),
        (shards * per_shard, *row),
    )
    store = array.create(shards)
    store[...].write(logical.reshape(array.shape)).result()
    return array, logical[:size]


@pytest.mark.parametrize("alternate", [True, False])
@pytest.mark.parametrize("shards", [1, 2, 8, 16])
def test_any_range_is_read(tmp_path, shards, alternate):
    array, logical = made(tmp_path / "rows", shards, alternate)
    store = array.open()
    for first in range(len(logical)):
        for last in range(first + 1, len(logical) + 1):
            np.testing.assert_array_equal(array.read(store, first, last), logical[first:last])


def test_one_number_a_row(tmp_path):
    array, logical = made(tmp_path / "rows", 2, True, row=())
    np.testing.assert_array_equal(array.read(array.open(), 3, 8), logical[3:8])


@pytest.mark.parametrize(
    "other",
    [{"shards": 3}, {"alternate": False}, {"row": (3,)}, {"dtype": np.dtype(np.int32)}],
    ids=lambda other: next(iter(other)),
)
def test_an_array_of_another_form_is_not_opened(tmp_path, other):
    array, _ = made(tmp_path / "rows", 2, True)
    form = {"shards": 2, "rows_per_shard": 6, "alternate": True, "row": (2,)} | other
    with pytest.raises(ValueError, match=r"zarr|mismatch|rank|Expected"):
        RowArray(array.path, dtype=form.pop("dtype", array.dtype), **form).open()


def test_a_missing_chunk_is_no_zeros(tmp_path):
    array, _ = made(tmp_path / "rows", 1, True)
    store = array.open()
    next(path for path in array.path.rglob("c/*/*/*")).unlink()
    with pytest.raises(ValueError, match="missing"):
        array.read(store, 0, 2)


def _field(packing, devices, dtype, monkeypatch):
    monkeypatch.setattr(resolve, "packing_of", lambda device: packing)
    tables = [TableConfig(n, 24, dtype=dtype, name=f"{n}") for n in (37, 13)]
    engine = EmbeddingEngine([FeatureConfig(table) for table in tables], mesh=mesh(devices))
    return engine, list(fields(engine.layout))[1]


@pytest.mark.parametrize(
    ("packing", "dtype", "copied"), [("none", "float32", False), ("lanes", "bfloat16", True)]
)
def test_devices_give_a_block_at_a_time(tmp_path, monkeypatch, packing, dtype, copied):
    """As on an accelerator: nothing but blocks of the table's own rows is moved to the host."""
    engine, field = _field(packing, 2, dtype, monkeypatch)
    state, moved = engine.init(jax.random.key(0)), []
    wanted = np.asarray(engine.tables(state)["13"])
    on_host = rows._on_host

    def counted(array, first, n):
        assert isinstance(array, jax.Array)
        moved.append(on_host(array, first, n).nbytes)
        return on_host(array, first, n)

    monkeypatch.setattr(rows, "_seen_from_host", lambda data: data)
    monkeypatch.setattr(rows, "_on_host", counted)
    monkeypatch.setattr(rows, "BLOCK", 4 * wanted[0].nbytes)
    array = row_array(tmp_path / "rows", field)
    shards = Shards(field, field.read(state), copied=copied)
    write_rows(array, shards)
    np.testing.assert_array_equal(array.read(array.open(), 0, 13), wanted)
    assert max(moved) <= 8 * 128 * 4  # four rows, in lines
    assert len(moved) >= 4

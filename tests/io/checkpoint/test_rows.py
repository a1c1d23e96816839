"""Rows on disk: in logical order for any shards, in blocks, from the host or from devices."""

import weakref

import jax
import numpy as np
import pytest
from checkpoint_cases import contents
from facade_cases import assert_same, mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig
from tpu_embed.core.layout import MeshAxes
from tpu_embed.core.rows import devices
from tpu_embed.core.state import fields
from tpu_embed.io import CheckpointManager, restore
from tpu_embed.io.checkpoint import row_files
from tpu_embed.io.checkpoint.tables import LocalShards


@pytest.mark.parametrize(
    ("packing", "dtype", "in_background"), [("none", "float32", False), ("lanes", "bfloat16", True)]
)
@pytest.mark.quick(1)
def test_devices_give_a_block_at_a_time(tmp_path, monkeypatch, packing, dtype, in_background):
    """As on an accelerator: nothing but blocks of the table's own rows is moved to the host."""
    monkeypatch.setattr("tpu_embed.core.layout.layout.packing_of", lambda device: packing)
    tables = [TableConfig(n, 24, dtype=dtype, name=f"{n}") for n in (37, 13)]
    engine = EmbeddingEngine([FeatureConfig(table) for table in tables], mesh=mesh(2))
    state, moved = engine.init(jax.random.key(0)), []
    take, block = devices._take, 4 * 24 * np.dtype(jax.numpy.dtype(dtype)).itemsize

    def counted(lines, places, row_format):
        moved.append(int((places >= 0).sum()))
        return take(lines, places, row_format)

    with monkeypatch.context() as patched:
        patched.setattr(MeshAxes, "on_cpu", False)
        patched.setattr(devices, "_take", counted)
        patched.setattr(devices, "BLOCK", block)
        patched.setattr(row_files, "BLOCK", block)
        with CheckpointManager(tmp_path, engine, in_background=in_background) as manager:
            manager.save(1, state)
    assert max(moved) <= 4
    assert len(moved) >= 14
    assert_same(contents(engine, restore(tmp_path / "1", engine).state), contents(engine, state))


def test_rows_that_were_copied_let_the_state_go():
    engine = EmbeddingEngine(FeatureConfig(TableConfig(9, 2, name="t")), mesh=mesh(2))
    state = engine.init(jax.random.key(0))
    (f,), held = fields(engine.layout), [weakref.ref(leaf) for leaf in state.tables.values()]
    expected = np.asarray(engine.tables(state)["t"])
    shards = LocalShards(state, engine.layout, f, copied=True)
    del state
    assert [one() for one in held] == [None]
    np.testing.assert_array_equal(shards.block([0, 1], 0, 5).reshape(-1, 2)[:9], expected)

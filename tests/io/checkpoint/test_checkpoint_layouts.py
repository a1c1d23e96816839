"""A checkpoint of any layout is restored on any other; training continues with the same bits."""

import weakref

import jax
import numpy as np
import pytest
from checkpoint_cases import PLACEMENTS, check_moved, contents, engine, never_stopped, saved_state
from facade_cases import assert_same, mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.core.layout import MeshAxes
from tpu_embed.core.rows import devices as device_rows
from tpu_embed.core.state import fields
from tpu_embed.io import CheckpointManager, restore, save
from tpu_embed.io.checkpoint import row_files
from tpu_embed.io.checkpoint.tables import LocalShards

DEVICES, TURNS = (1, 2, 8), range(len(PLACEMENTS))
LAYOUTS = [(devices, turn) for devices in DEVICES for turn in TURNS]
FEW = [(1, 0), (2, 3), (8, 4)]
"""Between these some table moves from each placement to each other one."""
CASES = [(a, b) for layouts in (LAYOUTS, FEW) for a in layouts for b in layouts]


@pytest.mark.parametrize(("source", "target"), CASES)
@pytest.mark.quick(1)
def test_any_layout_goes_on_from_any_other(tmp_path, source, target):
    check_moved(tmp_path / "saved", source, target)


def test_a_state_that_was_sharded_anew_is_saved_as_it_is(tmp_path):
    one = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    moved = jax.device_put(saved_state((2, 3)), one)
    save(tmp_path / "saved", engine(2, 3), moved)
    state = restore(tmp_path / "saved", engine(2, 3)).state
    assert_same(contents(engine(2, 3), state), never_stopped()[0])


def _wide(monkeypatch, packing, devices, dim, dtype):
    """Return an engine of two stacked tables, packed as on a TPU or not."""
    monkeypatch.setattr("tpu_embed.core.layout.layout.packing_of", lambda device: packing)
    tables = [TableConfig(n, dim, dtype=dtype, name=f"{n} rows") for n in (37, 7)]
    features = [FeatureConfig(table) for table in tables]
    return EmbeddingEngine(features, o.RowWiseAdagrad(0.5), mesh=mesh(devices))


PACKED = [
    ("words", 33, "bfloat16"),
    ("words", 5, "float32"),
    ("lanes", 7, "bfloat16"),
    ("lanes", 200, "float32"),
    ("lanes", 20, "float32"),
]


@pytest.mark.parametrize(("packing", "dim", "dtype"), PACKED)
@pytest.mark.quick(1)
def test_packed_rows_are_saved_and_restored_as_rows(tmp_path, monkeypatch, packing, dim, dtype):
    packed = _wide(monkeypatch, packing, 2, dim, dtype)
    plain = _wide(monkeypatch, "none", 8, dim, dtype)
    assert packed.layout.stacks[0].row_format.packed
    state = packed.init(jax.random.key(0))
    counted = {"37 rows": {"accumulators": np.arange(37, dtype=np.float32)}}
    state = packed.load_arrays(state, {}, counted)
    save(tmp_path / "packed", packed, state)
    unpacked = restore(tmp_path / "packed", plain).state
    assert_same(contents(plain, unpacked), contents(packed, state))
    save(tmp_path / "plain", plain, unpacked)
    again = restore(tmp_path / "plain", packed).state
    assert_same(contents(packed, again), contents(packed, state))


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
    take, block = device_rows._take, 4 * 24 * np.dtype(jax.numpy.dtype(dtype)).itemsize

    def counted(lines, places, row_format):
        moved.append(int((places >= 0).sum()))
        return take(lines, places, row_format)

    with monkeypatch.context() as patched:
        patched.setattr(MeshAxes, "on_cpu", False)
        patched.setattr(device_rows, "_take", counted)
        patched.setattr(device_rows, "BLOCK", block)
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

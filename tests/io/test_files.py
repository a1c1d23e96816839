"""Any name becomes a file name; files are on disk before they appear."""

import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoint_cases import contents, small_engine, small_state
from facade_cases import assert_same, mesh
from hypothesis import given
from hypothesis import strategies as st

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, io
from tpu_embed import optimizers as o
from tpu_embed.io import files

ODD = ["x" * 300, "é" * 200, "a/b", "..", "a.", "a", "A", "\0", "tables.json", "ü ?"]


@given(st.lists(st.text(min_size=1), unique=True), st.integers(0, 300))
@pytest.mark.whole
def test_names_are_file_names_of_their_own_whatever_the_case(names, more):
    names = {name * k for name in names for k in (1, more)} - {""}
    found = {files.file_name(name).casefold() for name in names}
    assert len(found) == len(names)
    assert all(re.fullmatch("[a-z0-9_-]{0,64}(~[0-9a-f]{16})?", name) for name in found)
    assert all(0 < len(name) <= 64 for name in found)


def test_plain_names_stay_and_others_can_be_read():
    plain = ["films", "user_7-b", "0"]
    assert [files.file_name(name) for name in plain] == plain
    assert re.fullmatch("films-eu~[0-9a-f]{16}", files.file_name("Films.EU"))


@pytest.fixture(scope="module")
def odd():
    features = {f"{i}": FeatureConfig(TableConfig(3, 2, name=name)) for i, name in enumerate(ODD)}
    return EmbeddingEngine(features, o.SGD(0.5), mesh=mesh(1))


def assert_short(root):
    """Names fit into every file system, also into those that ignore case."""
    for directory, *inside in os.walk(root):
        names = [name for kind in inside for name in kind]
        assert all(len(name.encode()) <= 100 for name in names), directory
        assert len({name.casefold() for name in names}) == len(names)


@pytest.mark.whole
def test_tables_of_any_name_are_saved_exported_and_changed(odd, tmp_path):
    state = odd.init(jax.random.key(0))
    io.save(tmp_path / "saved", odd, state)
    assert {path.name for path in tmp_path.iterdir()} == {"saved"}
    assert_same(contents(odd, io.restore(tmp_path / "saved", odd).state), contents(odd, state))
    features = {f"{i}": FeatureConfig(odd.table_configs[name]) for i, name in enumerate(ODD)}
    request = {path: np.zeros((1, 1), np.int32) for path in features}
    old, new = (contents(odd, odd.init(jax.random.key(seed)))[0] for seed in (0, 1))
    first = (touched := io.TouchedRows(odd)).version(state)
    options = {"platforms": "cpu", "version": first}
    io.export_model(tmp_path / "m", lambda a: a, old, features, request, **options)
    for name in ODD:
        touched.record_rows(name, np.arange(3), 0)
    io.export_delta(tmp_path / "d", odd, odd.init(jax.random.key(1)), touched, since=0)
    assert_short(tmp_path)
    loaded = io.load_model(tmp_path / "m")
    served, arrays = loaded.apply(tmp_path / "d"), {name: old[name].copy() for name in ODD}
    io.apply_delta(arrays, tmp_path / "d", first)
    for name in ODD:
        assert_same(np.asarray(loaded.tables[name]["values"]), old[name])
        assert_same(np.asarray(served.tables[name]["values"]), new[name])
        assert_same(arrays[name], new[name])


# -- on the disk ----------------------------------------------------------------------------------


class Disk:
    """What was synced, by inode, while a path was not there yet, and since it was."""

    def __init__(self, path, monkeypatch):
        self.path, self.before, self.after = path, set(), set()
        sync = os.fsync

        def fsync(descriptor):
            synced = self.after if path.exists() else self.before
            synced.add(os.fstat(descriptor).st_ino)
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)

    def missing(self):
        """Return what appeared with the path and was not on the disk, or whose name was not."""
        inside = [Path(directory) / name for directory, *names in os.walk(self.path)
                  for kind in names for name in kind]  # fmt: skip
        # Tensorstore syncs its own files; nobody reads the notes of orbax.
        others = ("_CHECKPOINT_METADATA", "commit_success.txt", "zarr.json")
        inside = [one for one in inside if one.name not in others and not one.match("c.*")]
        found = {path for path in (self.path, *inside) if path.stat().st_ino not in self.before}
        parents = [self.path.parent]
        return found | {path for path in parents if path.stat().st_ino not in self.after}


@pytest.mark.parametrize("in_background", [None, True, False], ids=["save", "behind", "waiting"])
def test_a_checkpoint_is_on_the_disk_before_it_appears(tmp_path, monkeypatch, in_background):
    path = tmp_path / "new" / "7"
    disk = Disk(path, monkeypatch)
    given = {"model": {"w": np.arange(3.0, dtype=np.float32)}, "position": 1}
    if in_background is None:
        io.save(path, small_engine(), small_state(), **given)
    else:
        options = {"in_background": in_background}
        with io.CheckpointManager(path.parent, small_engine(), **options) as manager:
            manager.save(7, small_state(), **given)
    assert disk.missing() == set()
    assert tmp_path.stat().st_ino in disk.before  # where "new" was made


def test_an_export_and_a_delta_are_on_the_disk_before_they_appear(tmp_path, monkeypatch):
    engine, state = small_engine(), small_state()
    path, touched = tmp_path / "new" / "m", io.TouchedRows(engine)
    disk = Disk(path, monkeypatch)
    features = {"x": FeatureConfig(engine.table_configs["item"])}
    tables = {name: np.asarray(table) for name, table in engine.tables(state).items()}
    io.export_model(path, lambda a: a, tables, features, {"x": np.zeros((1, 1), int)})
    assert disk.missing() == set()
    assert tmp_path.stat().st_ino in disk.before
    monkeypatch.undo()
    disk = Disk(tmp_path / "d", monkeypatch)
    io.export_delta(tmp_path / "d", engine, state, touched, since=0)
    assert disk.missing() == set()

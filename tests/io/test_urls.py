"""A URL is one of a bucket, or refused: Python would take it for a folder named "gs:"."""

import importlib
import inspect
from pathlib import Path, PurePosixPath

import jax
import pytest
from checkpoint_cases import small, small_engine, small_state
from export_cases import export_one
from flax import nnx

import tpu_embed
from tpu_embed import HostStorage, fit, io, planning
from tpu_embed.io.checkpoint import read_maps, statistics_of

URLS = ["s3://bucket", "gs:///run", "gs:/bucket", "abfs+x://a@b/c", PurePosixPath("gs://b/c")]
ON_DISKS = ("HostStorage.__init__", "count_hits")
"""What takes no bucket."""


def served(name, path):
    if not Path("model").exists():
        export_one("model")
    model = io.load_model("model")
    model = io.FollowingModel(model) if name == "FollowingModel" else model
    return model.apply_in_place(path) if name == "in place" else model.apply(path)


def recorded():
    """Return an engine, its state and the record of its touched rows."""
    engine = small(optimizer=False)
    return engine, engine.init(jax.random.key(0)), io.TouchedRows(engine)


MODULES = {"model": nnx.Dict()}
CALLS = {
    "save": lambda path: io.save(path, small_engine(), small_state()),
    "restore": lambda path: io.restore(path, small_engine()),
    "save_modules": lambda path: io.save_modules(path, MODULES),
    "restore_modules": lambda path: io.restore_modules(path, MODULES),
    "CheckpointManager.__init__": lambda path: io.CheckpointManager(path, small_engine()),
    "ModuleCheckpointManager.__init__": io.ModuleCheckpointManager,
    "export_model": export_one,
    "load_model": io.load_model,
    "export_delta": lambda path: io.export_delta(path, *recorded(), since=0),
    "apply_delta": lambda path: io.apply_delta({}, path, io.Version("", 0, 0, 0)),
    "ServedModel.apply": lambda path: served("ServedModel", path),
    "ServedModel.apply_in_place": lambda path: served("in place", path),
    "publish": lambda path: io.publish(path, *recorded(), lambda place, version: None),
    "follow": io.follow,
    "FollowingModel.apply": lambda path: served("FollowingModel", path),
    "fit": lambda path: fit(small_engine(), sum, [], directory=path, progress=False),
    "HostStorage.__init__": lambda path: HostStorage(device_rows=8, path=path),
    "count_hits": lambda path: planning.count_hits(path, HostStorage(device_rows=8)),
    "read_maps": read_maps,
    "statistics_of": statistics_of,
}
OURS = {"ServedModel.prepare", "HostPlan.__init__"}
"""What users do not call with a path: `apply` does, and a plan repeats that of the storage."""


@pytest.mark.parametrize("call", CALLS)
def test_a_url_is_refused_and_nothing_is_written(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = "a path, or a URL such as gs://bucket/name or s3://bucket/name, got '"
    if call in ON_DISKS:
        said = r"one of a file system, got '\w.*; use a disk"
    for url in URLS + ["gs://bucket/run"] * (call in ON_DISKS):
        with pytest.raises(ValueError, match=f": expected {said}"):
            CALLS[call](url)
    assert not [path for path in tmp_path.iterdir() if path.name != "model"]


def test_folders_with_a_colon_are_no_urls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("20:15", "c:/run", "./gs:/run", tmp_path / "s3:" / "run"):
        io.save(path, small_engine(), small_state())
        io.restore(path, small_engine())


def paths_of(name, value):
    """Return the functions and methods of a public name that have an argument for a path."""
    found = {name: value} if inspect.isfunction(value) else {}
    if inspect.isclass(value):
        methods = inspect.getmembers(value, inspect.isfunction)
        public = [(n, m) for n, m in methods if n == "__init__" or not n.startswith("_")]
        found = {f"{name}.{method}": function for method, function in public}
    return {
        called
        for called, function in found.items()
        for argument, one in inspect.signature(function).parameters.items()
        if argument in ("path", "directory", "root", "file") or "PathLike" in str(one.annotation)
    }


def test_every_public_name_that_takes_a_path_is_tried():
    modules = [tpu_embed, io, planning, *(
        importlib.import_module(f"tpu_embed.{name}")
        for name in ("check", "data", "loop", "metrics", "nn", "optimizers", "retrieval")
    )]  # fmt: skip
    found = set()
    for module in modules:
        for name in module.__all__:
            found |= paths_of(name, getattr(module, name))
    assert found - OURS == CALLS.keys() - {"read_maps", "statistics_of"}
    assert found >= OURS

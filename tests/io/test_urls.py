"""URLs are refused wherever a path is written or read; no folder is named after a scheme."""

from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoint_cases import small_engine, small_state

from tpu_embed import FeatureConfig, TableConfig, fit, io
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.optimizers import SGD

FEATURES = {"x": FeatureConfig(TableConfig(8, 2, name="t"))}


def exported(path):
    tables = {"t": np.zeros((8, 2), np.float32)}
    return io.export_model(path, lambda found: found, tables, FEATURES, {"x": np.arange(2)})


def delta(path):
    engine = EmbeddingEngine(FEATURES, SGD(0.1), mesh=jax.make_mesh((1,), ("d",)))
    state, touched = engine.init(jax.random.key(0)), io.TouchedRows(engine)
    return io.export_delta(path, engine, state, touched, since=touched.version(state))


def trained(path):
    engine = EmbeddingEngine(FEATURES, SGD(0.1), mesh=jax.make_mesh((1,), ("d",)))
    return fit(engine, lambda found: found["x"].sum(), [{"x": np.arange(2)}], directory=path)


def with_model(call):
    """Return a function of a path that gives it to a method of a loaded model."""

    def called(path):
        if not Path("model").exists():
            exported("model")
        return call(io.load_model("model"), path)

    return called


DOORS = {
    "save": lambda path: io.save(path, small_engine(), small_state()),
    "restore": lambda path: io.restore(path, small_engine()),
    "CheckpointManager": lambda path: io.CheckpointManager(path, small_engine()),
    "save_modules": lambda path: io.save_modules(path, {}),
    "restore_modules": lambda path: io.restore_modules(path, {}),
    "ModuleCheckpointManager": lambda path: io.ModuleCheckpointManager(path),
    "export_model": exported,
    "load_model": io.load_model,
    "export_delta": delta,
    "apply_delta": lambda path: io.apply_delta({}, path, None),
    "ServedModel.apply": with_model(lambda model, path: model.apply(path)),
    "ServedModel.apply_in_place": with_model(lambda model, path: model.apply_in_place(path)),
    "FollowingModel.apply": with_model(lambda model, path: io.FollowingModel(model).apply(path)),
    "fit": trained,
}


@pytest.mark.parametrize("door", DOORS)
def test_urls_are_refused(door, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for address in ("gs://bucket/run", "s3://bucket"):
        with pytest.raises(
            ValueError, match=f"path: expected one of a file system, got '{address}"
        ):
            DOORS[door](address)
    assert {path.name for path in tmp_path.iterdir()} <= {"model"}

"""A disk without room: the training stops, says why, and goes on from its last checkpoint."""

import contextlib

import jax
import numpy as np
import pytest
from random_rows import no_file_beyond

from tpu_embed import EmbeddingEngine, FeatureConfig, HostStorage, TableConfig, io, optimizers

BATCH, ROWS = 8, 4000


def make(path=None):
    storage = None if path is None else HostStorage(device_rows=64, path=path)
    drawn = jax.nn.initializers.normal()
    table = TableConfig(ROWS, 64, drawn, name="items", storage=storage)
    return EmbeddingEngine(FeatureConfig(table), optimizers.Adagrad(0.5))


def ids_of(step):
    """Return a batch's ids: old ones and new ones."""
    rng = np.random.default_rng(step)
    new = np.arange(48 * step, 48 * (step + 1))
    return np.concatenate([new, rng.integers(0, 48 * step + 1, 16)]).reshape(BATCH, 8)


def train(engine, state, steps):
    for step in steps:
        batch = engine.place(ids_of(step))
        state, batch = engine.admit(state, batch)
        state = engine.update_in_place(state, batch, engine.lookup(state, batch))
    return state


def flushed(engine):
    """Return whether all displaced rows have arrived at home."""
    with contextlib.suppress(RuntimeError):
        engine.storage.flush()
        return True


def save_in_background(path, engine, state):
    with io.CheckpointManager(path, engine) as manager:
        manager.save(1, state)


def rows_of(engine, state):
    ids = np.arange(ROWS)
    return [engine.rows(state, "items", ids, slot=slot) for slot in (None, "accumulators")]


def test_a_full_disk_stops_the_training_until_the_last_checkpoint_is_restored(tmp_path):
    (tmp_path / "home").mkdir()
    engine, resident = make(tmp_path / "home"), make()
    state, step = train(engine, engine.init(jax.random.key(0)), range(2)), 2
    io.save(tmp_path / "saved", engine, state, position=step)
    with no_file_beyond(1 << 17):  # 256 rows
        while flushed(engine):
            state, step = train(engine, state, [step]), step + 1
        batch = engine.place(ids_of(step))
        full = rf"rows of \['items'\] written at home, got an error at step {step}: OSError: "
        full += r".*File too large; restore the last checkpoint, when there is room again"
        for call in (
            lambda: engine.admit(state, batch),
            engine.storage.flush,
            lambda: io.save(tmp_path / "late", engine, state),
            lambda: save_in_background(tmp_path / "later", engine, state),
        ):
            with pytest.raises(RuntimeError, match=full):
                call()
    assert engine.vocabularies.admitted == step > 4
    assert not (tmp_path / "late").exists()
    assert list((tmp_path / "later").iterdir()) == []
    restored = io.restore(tmp_path / "saved", engine)
    assert restored.position == engine.vocabularies.admitted == 2
    state = train(engine, restored.state, range(2, step + 3))
    assert flushed(engine)
    other = train(resident, resident.init(jax.random.key(0)), range(step + 3))
    np.testing.assert_array_equal(rows_of(engine, state), rows_of(resident, other))

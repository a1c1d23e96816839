"""Records of touched rows in checkpoints: what had changed is known after a restart."""

import threading

import jax
import numpy as np
import pytest
from file_cases import swap
from living_cases import mesh, simple
from record_cases import NAMES, check, configs, draw, rows_by_key

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig, io
from tpu_embed import optimizers as o
from tpu_embed.io import TouchedRows
from tpu_embed.io.checkpoint import engine_checkpoint

STEPS, CAPACITY = 6, 9


class Trainer:
    """An engine, its state and its record; and all rows at each version."""

    def __init__(self, devices=1, capacity=CAPACITY):
        features = {**configs(capacity), "users": FeatureConfig(TableConfig(8, 2, name="users"))}
        options = {"mesh": mesh(devices), "lookahead": 0}
        self.engine = tpu_embed.EmbeddingEngine(features, o.SGD(0.5), **options)
        self.state = self.engine.init(jax.random.key(0))
        self.touched, self.versions = TouchedRows(self.engine), []

    def train(self, steps):
        for _ in range(steps):
            step = int(self.state.step)
            batch = draw(np.random.default_rng(step), step) | {"users": np.full(4, step % 8)}
            self.state, placed = self.engine.admit(self.state, self.engine.place(batch))
            found = self.engine.lookup(self.state, placed)
            self.state = self.engine.update(self.state, placed, jax.tree.map(np.ones_like, found))
            self.touched.record(placed, step + 1)
            self.touched.record_rows("users", [7], step + 1)
            now = rows_by_key(self.engine, self.state)
            self.versions.append((self.touched.version(self.state), now))

    def check(self, *versions):
        """Check what is reported since all versions of this run, and some of those before it."""
        now = rows_by_key(self.engine, self.state)
        for version, before in (*versions, *self.versions):
            check(self.touched, version, before, now)

    def save(self, path):
        io.save(path, self.engine, self.state, touched=self.touched)
        return path

    def restore(self, path):
        self.state = io.restore(path, self.engine, touched=self.touched).state


def restored(path, *args):
    """Return another trainer, which goes on from a checkpoint."""
    other = Trainer(*args)
    other.restore(path)
    return other


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a trainer that has saved, and its checkpoint."""
    one = Trainer(2)
    one.train(STEPS)
    return one, one.save(tmp_path_factory.mktemp("record") / "step")


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.whole
def test_a_record_goes_on_on_other_devices(saved, devices):
    one, other = saved[0], restored(saved[1], devices)
    assert other.touched.never() == one.touched.never()
    for version, _ in one.versions:
        mine, theirs = other.touched.changes(version), one.touched.changes(version)
        for name in (*NAMES, "users"):
            ids = [x.rows if x.keys is None else x.keys for x in (mine[name], theirs[name])]
            np.testing.assert_array_equal(*ids, err_msg=f"{name} {version}")
        for name in NAMES:
            np.testing.assert_array_equal(mine[name].lost, theirs[name].lost)
            assert (mine[name].shared is None) == (theirs[name].shared is None)
        # Also by its step alone.
        assert other.touched.known(version.step)[1:] == (version.step, 0, version.keys)
    other.train(3)
    other.check(*one.versions)
    run = other.touched.lineage
    assert run.ancestors == (one.versions[-1][0],)
    assert run.run == other.versions[0][0].run != one.versions[0][0].run
    assert other.versions[0][0][1:] == (STEPS + 1, STEPS + 1, STEPS + 1)
    # What the first run does later is no part of the second.
    later = one.versions[-1][0]._replace(step=STEPS + 1)
    with pytest.raises(ValueError, match="since: expected a version of run"):
        other.touched.since(later)


@pytest.mark.whole
@pytest.mark.parametrize("capacity", [5, 30])
def test_keys_that_find_no_row_in_a_smaller_table_are_lost(saved, capacity):
    one, other = saved[0], restored(saved[1], 2, capacity)
    other.check(*one.versions)
    now = rows_by_key(other.engine, other.state)["items"]
    gone = set(one.versions[-1][1]["items"]) - set(now)
    assert bool(gone) == (capacity < CAPACITY)
    assert other.touched.changes(one.versions[-1][0])["items"].lost.tolist() == sorted(gone)
    other.train(3)
    other.check(*one.versions)


@pytest.mark.whole
def test_a_record_is_restored_more_than_once(saved, tmp_path):
    one, path = saved
    versions = [*one.versions]
    for n in range(3):
        other = restored(path)
        other.check(*versions)
        lineage = other.touched.lineage
        other.train(2)
        other.check(*versions)
        versions += other.versions
        path = other.save(tmp_path / f"{n}")
    assert len(lineage.ancestors) == 3
    assert lineage.ancestors[0] == one.versions[-1][0]


def test_a_manager_keeps_the_record_of_the_moment_of_the_save(tmp_path, monkeypatch):
    may_write, write = threading.Event(), engine_checkpoint.write_record

    def waiting(*given):
        assert may_write.wait(60)
        return write(*given)

    monkeypatch.setattr(engine_checkpoint, "write_record", waiting)
    one, other = Trainer(1), Trainer(1)
    one.train(2)
    with io.CheckpointManager(tmp_path, one.engine) as manager:
        assert manager.save(2, one.state, touched=one.touched)
        saved = one.touched.changes(one.versions[0][0])
        one.train(3)
        may_write.set()
        manager.wait()
    with io.CheckpointManager(tmp_path, other.engine) as manager:
        other.state = manager.restore(touched=other.touched).state
    assert int(other.state.step) == 2
    found = other.touched.changes(one.versions[0][0])
    for name in NAMES:
        np.testing.assert_array_equal(found[name].keys, saved[name].keys)
    other.train(3)
    other.check(*one.versions[:2])


def snapshot(trainer):
    """Return what the maps and a record of them know."""
    maps = {n: one.keys.tolist() for n, one in trainer.engine.vocabularies.states().maps.items()}
    version = trainer.touched.version(trainer.state)
    return maps, version, trainer.touched.never(), trainer.touched.lineage


def test_a_checkpoint_without_a_record_leaves_all_as_it_was(saved, tmp_path):
    one, _ = saved
    io.save(tmp_path / "bare", one.engine, one.state)
    other = Trainer(1)
    other.train(2)
    before = snapshot(other)
    with pytest.raises(FileNotFoundError, match="touched"):
        io.restore(tmp_path / "bare", other.engine, touched=other.touched)
    assert snapshot(other) == before
    io.restore(tmp_path / "bare", other.engine)
    with pytest.raises(ValueError, match=r"restore it with the tables, io\.restore\(…, touched="):
        other.touched.never()


def test_a_record_that_is_not_asked_for_is_not_read(saved):
    (one, path), other = saved, Trainer(1)
    state = io.restore(path, other.engine).state
    touched = TouchedRows(other.engine, step=int(state.step))
    assert touched.version(state)[1:] == (STEPS, 0, STEPS)
    assert touched.never()["users"] == 8
    with pytest.raises(ValueError, match="since: expected a version of run"):
        touched.since(one.versions[-1][0])


def test_another_engines_record_is_refused(saved, tmp_path):
    one, path = saved
    other, third = Trainer(1), Trainer(1)
    before = snapshot(other)
    for wrong, error, text in (
        (third.touched, ValueError, "touched: expected the record of this engine, got another"),
        (3, TypeError, "touched: expected a TouchedRows, or None, got int"),
        (one.versions[0][0], TypeError, "touched: expected a TouchedRows, or None, got Version"),
    ):
        with pytest.raises(error, match=text):
            io.restore(path, other.engine, touched=wrong)
        with pytest.raises(error, match=text):
            io.save(tmp_path / "wrong", other.engine, other.state, touched=wrong)
    assert snapshot(other) == before
    assert not [*tmp_path.iterdir()]


def test_a_record_that_lacks_an_update_is_not_saved(tmp_path):
    one = Trainer(1)
    one.train(1)
    one.touched = TouchedRows(one.engine)
    with pytest.raises(ValueError, match="expected every update from 1 to 1 recorded, got none fo"):
        one.save(tmp_path / "a")
    assert not [*tmp_path.iterdir()]


def test_a_record_of_row_numbers_alone_is_kept(tmp_path):
    users = FeatureConfig(TableConfig(9, 2, name="users"))
    engine = tpu_embed.EmbeddingEngine(users, o.SGD(0.5), mesh=mesh(2))
    touched, state = TouchedRows(engine), engine.init(jax.random.key(0))
    version = touched.version(state)
    touched.record(np.array([3, 5]), 1)
    touched.record_rows("users", [8], 0)
    touched.record_rows("users", None, 6)
    io.save(tmp_path / "a", engine, state, touched=touched)
    other = TouchedRows(engine)
    io.restore(tmp_path / "a", engine, touched=other)
    assert other.since(version)["users"].tolist() == [*range(9)]
    for step in (0, 1, 6, 7):
        assert other.since(step)["users"].tolist() == touched.since(step)["users"].tolist()
    assert other.never() == touched.never() == {"users": 0}


def written_once(name="t"):
    """Return an engine, its state after a batch of two keys, and the record of that."""
    engine, state = simple(3)
    touched = TouchedRows(engine)
    state, batch = engine.admit(state, engine.place({"x": np.array([3, 5 + len(name)])}))
    state = engine.update(state, batch, {"x": np.ones((2, 2), np.float32)})
    touched.record(batch, 1)
    return engine, state, touched


@pytest.fixture
def small(tmp_path):
    """Return a folder with checkpoints of two records."""
    for name in ("a", "bb"):
        engine, state, touched = written_once(name)
        io.save(tmp_path / name, engine, state, touched=touched)
    return tmp_path


def test_a_damaged_record_is_refused_and_nothing_changes(small):
    root, (engine, _) = small, simple(3)
    touched = TouchedRows(engine)

    def refused(error=ValueError):
        with pytest.raises(error, match=r"touched.*expected .*, got .*restore another step"):
            io.restore(root / "a", engine, touched=touched)
        assert (engine.vocabularies.admitted, touched.never()) == (0, {"t": 0})

    files = [path for end in ("json", "npy") for path in (root / "a" / "touched").rglob(f"*.{end}")]
    assert len(files) == 1 + 5
    for path in files:
        content = path.read_bytes()
        for at in (len(content) // 2, len(content) - 1):
            path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
            refused()
        path.write_bytes(content[:-1])
        refused()
        path.unlink()
        refused(FileNotFoundError)
        path.write_bytes(content)
    swap(root / "a" / "touched", root / "bb" / "touched")
    with pytest.raises(ValueError, match=r"touched\.0\.json.*restore another step"):
        io.restore(root / "a", engine, touched=touched)
    swap(root / "a" / "touched", root / "bb" / "touched")
    state = io.restore(root / "a", engine, touched=touched).state
    assert touched.version(state)[1:] == (1, 0, 1)


@pytest.fixture
def of_two(tmp_path, monkeypatch):
    """Return a function that writes the same record twice, as two processes do, and the folder."""

    def write(name):
        _, state, touched = written_once()
        for process in range(2):
            with monkeypatch.context() as patched:
                patched.setattr(jax, "process_index", lambda: process)  # noqa: B023
                patched.setattr(jax, "process_count", lambda: 2)
                engine_checkpoint.write_record(tmp_path / name, name, touched.saved(state))
        return tmp_path / name

    return write


def test_every_process_has_written_its_part_for_the_same_checkpoint(of_two):
    one, other = of_two("one"), of_two("other")
    assert engine_checkpoint.read_record(one, "one").tables["t"].keys.tolist() == [3, 6]

    for process in (1, 0):
        swap(one / f"touched.{process}.json", other / f"touched.{process}.json")
        with pytest.raises(ValueError, match=rf"touched\.{process}\.json.*restore another step"):
            engine_checkpoint.read_record(one, "one")
        swap(one / f"touched.{process}.json", other / f"touched.{process}.json")


def test_what_was_read_is_in_memory(of_two):
    """A checkpoint may be removed, or written anew, while the run goes on."""
    path = of_two("one")
    before = engine_checkpoint.read_record(path, "one").tables["t"]
    for file in path.rglob("*.npy"):
        file.unlink()
    arrays = [one for one in before if isinstance(one, np.ndarray)]
    assert len(arrays) == 5
    assert not any(isinstance(one, np.memmap) for one in arrays)
    assert before.touched.tolist() == [1, 1]

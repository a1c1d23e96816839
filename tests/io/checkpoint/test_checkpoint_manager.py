"""Numbered checkpoints: which are saved and kept, and what happens when a save fails."""

import concurrent.futures
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoint_cases import contents, small, small_engine, small_state, table_of
from facade_cases import assert_same

from tpu_embed.io import CheckpointManager, restore, save
from tpu_embed.io.checkpoint import tables


def manager_of(path, **options):
    return CheckpointManager(path, small_engine(), **options)


def test_every_so_many_steps_the_last_few(tmp_path):
    with manager_of(tmp_path / "a" / "run", every=2, keep=2) as manager:
        assert manager.latest_step() is None
        saved = [step for step in range(1, 10) if manager.save(step, small_state(step))]
        manager.wait()
        assert saved == [2, 4, 6, 8]
        assert manager.all_steps() == [6, 8]
        assert manager.save(9, small_state(9), force=True)
        assert not manager.save(9, small_state(1), force=True)  # it is there
        for step in (None, 9, 8):
            state = manager.restore(step).state
            wanted = small_state(9 if step is None else step)
            assert_same(contents(small_engine(), state), contents(small_engine(), wanted))
        assert manager.latest_step() == 9


def test_all_stay(tmp_path):
    with manager_of(tmp_path, keep=None, in_background=False) as manager:
        assert all(manager.save(step, small_state()) for step in range(5))
        assert manager.all_steps() == [0, 1, 2, 3, 4]


def test_numbers_of_a_manager_are_checked(tmp_path):
    for options in ({"every": 0}, {"keep": 0}, {"every": 1.5}):
        with pytest.raises(ValueError, match=r"(every|keep): expected an integer >= 1"):
            manager_of(tmp_path, **options)
    with manager_of(tmp_path) as manager, pytest.raises(ValueError, match="step: expected an int"):
        manager.save(-1, small_state())


def test_a_step_before_the_last_is_refused_until_that_is_removed(tmp_path):
    with manager_of(tmp_path, every=2) as manager:
        manager.save(2, small_state())
        manager.save(4, small_state())
        with pytest.raises(ValueError, match=r"step: expected at least 4, the last one in .*got 3"):
            manager.save(3, small_state())
        manager.remove(4)
        assert manager.all_steps() == [2]
        assert not manager.save(3, small_state())
        assert manager.save(4, small_state(1))
        assert (table_of(small_engine(), manager.restore().state)
                == table_of(small_engine(), small_state(1))).all()  # fmt: skip


def test_a_step_that_is_not_there(tmp_path):
    with manager_of(tmp_path) as manager:
        with pytest.raises(FileNotFoundError, match=r"step None in .*: expected one of \[\], got"):
            manager.restore()
        manager.save(2, small_state())
        for call in (manager.restore, manager.remove):
            with pytest.raises(FileNotFoundError, match=r"step 3 in .*: expected one of \[2\]"):
                call(3)


def test_what_is_being_saved_may_change(tmp_path, monkeypatch):
    """The state is donated, NumPy arrays and the position are written to, while a save waits."""
    may_write, write = threading.Event(), tables.write

    def later(directory, prepared):
        may_write.wait()
        write(directory, prepared)

    monkeypatch.setattr(tables, "write", later)
    state, position = small_state(), {"next": [1, 2]}
    model = {"host": np.ones(2000, np.float32), "device": jax.numpy.ones(2000)}
    wanted = contents(small_engine(), state)
    with manager_of(tmp_path) as manager:
        assert manager.save(1, state, model=model, position=position)
        assert manager.all_steps() == []
        for array in (*jax.tree.leaves(state), model["device"]):
            jax.block_until_ready(jax.jit(lambda x: x * 0 + 7, donate_argnums=0)(array))
        model["host"][:] = 7
        position["next"].append(3)
        may_write.set()
        like = {"host": np.ones(2000, np.float32), "device": jax.numpy.ones(2000)}
        restored = manager.restore(1, model=like)
    assert_same(contents(small_engine(), restored.state), wanted)
    assert_same(restored.model, like)
    assert restored.position == {"next": [1, 2]}


@pytest.mark.parametrize("in_background", [True, False], ids=["in background", "waiting"])
def test_a_save_that_goes_wrong_is_told_once(tmp_path, monkeypatch, in_background):
    def full(*_):
        raise OSError(28, "No space left on device")

    with manager_of(tmp_path, in_background=in_background) as manager:
        manager.save(1, small_state(1))
        manager.wait()
        monkeypatch.setattr("tpu_embed.io.checkpoint.tables.write_rows", full)
        with pytest.raises(OSError, match="No space left"):
            assert manager.save(2, small_state(2)) == manager.wait()
        monkeypatch.undo()
        assert manager.all_steps() == [1]
        assert manager.save(3, small_state(3))
        state = manager.restore().state
        assert manager.all_steps() == [1, 3]
    assert_same(contents(small_engine(), state), contents(small_engine(), small_state(3)))
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"1", "3"}


def test_the_next_save_tells_of_the_one_before(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tpu_embed.io.checkpoint.tables.write_rows", full)
    with manager_of(tmp_path) as manager:
        assert manager.save(1, small_state())
        with pytest.raises(OSError, match="No space left"):
            manager.save(2, small_state())
        monkeypatch.undo()
        assert manager.save(3, small_state())
        manager.wait()
        assert manager.all_steps() == [3]


def test_a_save_that_went_wrong_is_not_there_and_removes_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with manager_of(tmp_path, keep=1) as manager:
        manager.save(1, small_state())
        for call, step in (("save", 2), ("save", 3), ("wait", None)):
            manager.wait()
            monkeypatch.setattr("tpu_embed.io.checkpoint.tables.write_rows", full)
            assert manager.save(3, small_state())
            with pytest.raises(OSError, match="No space left"):
                getattr(manager, call)(*([step, small_state()] if step else []))
            monkeypatch.undo()
            assert manager.all_steps() == [1]
        assert manager.save(2, small_state())
        manager.wait()
        assert manager.all_steps() == [2]
        manager.remove(2)
        assert manager.latest_step() is None


INTERRUPTED = {
    "the disk is full": (
        "tpu_embed.io.checkpoint.tables.write_rows",
        OSError(28, "No space left on device"),
    ),
    "stopped while it writes": ("tpu_embed.io.checkpoint.tables.write_rows", KeyboardInterrupt()),
    "stopped at the end": ("tpu_embed.io.files.sync_directories", KeyboardInterrupt()),
    "old ones cannot be removed": ("shutil.rmtree", PermissionError(13, "Permission denied")),
    "stopped while old ones are removed": ("shutil.rmtree", KeyboardInterrupt()),
}


@pytest.mark.parametrize("in_background", [True, False], ids=["in background", "waiting"])
@pytest.mark.parametrize("case", INTERRUPTED)
@pytest.mark.quick(3)
def test_as_many_as_are_to_stay_do_after_a_save_was_interrupted(
    tmp_path, monkeypatch, case, in_background
):
    def fails(*_, **__):
        raise error

    name, error = INTERRUPTED[case]
    with manager_of(tmp_path, keep=2, in_background=in_background) as manager:
        for step in (1, 2):
            manager.save(step, small_state(step))
        manager.wait()
        monkeypatch.setattr(name, fails)
        with pytest.raises(type(error)):
            assert manager.save(3, small_state(3)) == manager.wait()
        monkeypatch.undo()
        for step in (4, 5, 6):
            assert manager.save(step, small_state(step))
            manager.wait()
            assert len(manager.all_steps()) == 2
            assert manager.all_steps()[-1] == step
        assert manager.all_steps() == [5, 6]
        for step in (5, 6):
            state = manager.restore(step).state
            assert_same(
                contents(small_engine(), state), contents(small_engine(), small_state(step))
            )
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"5", "6"}


def test_as_many_as_are_to_stay_do_after_a_wait_was_interrupted(tmp_path, monkeypatch):
    """The save goes on; its step is there when the next one looks."""
    may_write, write = threading.Event(), tables.write

    def later(directory, prepared):
        may_write.wait()
        write(directory, prepared)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with manager_of(tmp_path, keep=2) as manager:
        for step in (1, 2):
            manager.save(step, small_state(step))
        manager.wait()
        monkeypatch.setattr(tables, "write", later)
        manager.save(3, small_state(3))
        with monkeypatch.context() as patch:
            patch.setattr(concurrent.futures, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                manager.wait()
        may_write.set()
        assert not manager.save(3, small_state(3))
        assert manager.all_steps() == [2, 3]
        for step in (4, 5):
            manager.save(step, small_state(step))
            manager.wait()
            assert manager.all_steps() == [step - 1, step]


@pytest.mark.parametrize("keep", [1, None])
def test_a_pinned_checkpoint_stays_until_another_one_is(keep, tmp_path):
    left = []
    for pinned, step in ((None, 1), (1, 2), (1, 3), (3, 4), (None, 5)):
        with manager_of(tmp_path, keep=keep) as manager:  # a new one, as after a restart
            manager.pin(pinned)
            manager.save(step, small_state(step))
        left.append(manager.all_steps())
    kept = [[1], [1, 2], [1, 3], [3, 4], [5]]
    assert left == (kept if keep else [list(range(1, n)) for n in range(2, 7)])


def test_a_step_that_is_half_removed_is_no_checkpoint(tmp_path, monkeypatch):
    with manager_of(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, small_state(step))
        manager.wait()

        def half(path, **_):
            (Path(path) / "tables" / "tables.json").unlink()
            raise KeyboardInterrupt

        monkeypatch.setattr(shutil, "rmtree", half)
        with pytest.raises(KeyboardInterrupt):
            manager.remove(2)
        monkeypatch.undo()
        assert manager.all_steps() == [1]
        manager.restore()
        save(tmp_path / "2", small_engine(), small_state(2))  # beside what is left
        manager.remove(2)
        assert manager.save(2, small_state(2))
        manager.wait()
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"1", "2"}


def test_what_did_not_end_is_no_checkpoint_and_is_cleaned_up(tmp_path):
    with manager_of(tmp_path) as manager:
        manager.save(2, small_state())
    left = tmp_path / "4.orbax-checkpoint-tmp"
    (left / "tables").mkdir(parents=True)
    with manager_of(tmp_path) as reader:
        assert reader.all_steps() == [2]
        reader.restore()
        assert left.exists()  # it may be a save that another process is at
    with manager_of(tmp_path) as manager:
        assert manager.save(4, small_state())
        manager.wait()
        assert not left.exists()
        assert manager.all_steps() == [2, 4]


def test_what_else_is_there_is_no_checkpoint(tmp_path):
    (tmp_path / "0002").mkdir()
    (tmp_path / "\u0663").mkdir()  # a digit, not of ASCII
    (tmp_path / "99").write_text("notes")
    with manager_of(tmp_path) as manager:
        assert manager.latest_step() is None
        assert manager.save(1, small_state())
        assert manager.save(2, small_state())
        manager.wait()
        assert manager.all_steps() == [1, 2]
        shutil.rmtree(tmp_path / "2")
        assert manager.save(2, small_state())  # it is not there any more
        manager.wait()
        assert manager.all_steps() == [1, 2]


def test_threads_may_save_at_a_time(tmp_path):
    with manager_of(tmp_path, keep=None) as manager:
        told = []

        def save_there(step):
            try:
                told.append(manager.save(step, small_state(step)))
            except ValueError as error:  # the other step was first
                told.append(f"{error}")

        threads = [threading.Thread(target=save_there, args=(step,)) for step in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        manager.wait()
        assert len(manager.all_steps()) == told.count(True) >= 1
        for step in manager.all_steps():
            state = manager.restore(step).state
            assert_same(
                contents(small_engine(), state), contents(small_engine(), small_state(step))
            )


def test_a_numbered_directory_is_a_checkpoint(tmp_path):
    with manager_of(tmp_path) as manager:
        manager.save(2, small_state(), position=3)
    restored = restore(tmp_path / "2", small(devices=2))
    assert restored.position == 3


def test_a_damaged_step_names_the_others(tmp_path):
    with manager_of(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, small_state(step))
        manager.wait()
        (tmp_path / "3" / "tables" / "tables.json").unlink()
        with pytest.raises(FileNotFoundError, match=r"tables\.json") as error:
            manager.restore()
        assert error.value.__notes__ == [f"steps in {tmp_path}: [1, 2, 3]"]
        state = manager.restore(2).state
        assert_same(contents(small_engine(), state), contents(small_engine(), small_state(2)))


def test_threads_end(tmp_path):
    before = threading.active_count()
    for number in range(3):
        with manager_of(tmp_path / f"{number}") as manager:
            manager.save(1, small_state())
            manager.restore()
    assert threading.active_count() <= before + 1


def test_threads_end_when_the_last_save_went_wrong(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tpu_embed.io.checkpoint.tables.write_rows", full)
    before = threading.active_count()
    for number in range(3):
        with (
            pytest.raises(OSError, match="No space left"),
            manager_of(tmp_path / f"{number}") as manager,
        ):
            assert manager.save(1, small_state())
    assert threading.active_count() <= before + 1


AFTER_MAIN = """
import sys, threading
import jax, numpy as np
from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, io

made = EmbeddingEngine(FeatureConfig(TableConfig(9, 2, name="t")))
state, manager = made.init(jax.random.key(0)), io.CheckpointManager(sys.argv[1], made)

def loop():
    threading.main_thread().join()
    manager.save(1, state)
    manager.wait()
    print(manager.all_steps())

threading.Thread(target=loop).start()
"""


def test_a_loop_that_outlives_the_main_thread_saves(tmp_path):
    command = [sys.executable, "-c", AFTER_MAIN, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "[1]\n", done.stderr

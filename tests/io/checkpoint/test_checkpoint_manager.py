"""Numbered checkpoints: which are saved and kept, and what happens when a save fails."""

import concurrent.futures
import contextlib
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from checkpoint_cases import contents, small, small_engine, small_state
from facade_cases import assert_same

from tpu_embed.io import CheckpointManager, restore, save
from tpu_embed.io.checkpoint import tables

WRITE, FULL = "tpu_embed.io.checkpoint.tables.write_rows", OSError(28, "No space left on device")


def manager_of(path, **options):
    return CheckpointManager(path, small_engine(), **options)


def save_all(manager, *steps):
    for step in steps:
        assert manager.save(step, small_state(step))
        manager.wait()


def assert_restored(manager, step, seed=None):
    """Check that a step has the state that is made of its number, or of a seed."""
    wanted = small_state(step if seed is None else seed)
    state = manager.restore(step).state
    assert_same(contents(small_engine(), state), contents(small_engine(), wanted))


@pytest.fixture
def may_write(monkeypatch):
    """Return an event that saves wait for."""
    event, write = threading.Event(), tables.write

    def later(directory, prepared):
        event.wait()
        write(directory, prepared)

    monkeypatch.setattr(tables, "write", later)
    return event


def test_every_so_many_steps_the_last_few(tmp_path):
    with manager_of(tmp_path / "a" / "run", every=2, keep=2) as manager:
        assert manager.latest_step() is None
        saved = [step for step in range(1, 10) if manager.save(step, small_state(step))]
        manager.wait()
        assert saved == [2, 4, 6, 8]
        assert manager.all_steps() == [6, 8]
        assert manager.save(9, small_state(9), force=True)
        assert not manager.save(9, small_state(1), force=True)  # it is there
        for step, seed in ((None, 9), (9, 9), (8, 8)):
            assert_restored(manager, step, seed)
        assert manager.latest_step() == 9


def test_numbers_of_a_manager_are_checked(tmp_path):
    for name, number in (("every", 0), ("keep", 0), ("every", 1.5)):
        with pytest.raises(ValueError, match=f"{name}: expected an integer >= 1"):
            manager_of(tmp_path, **{name: number})
    with manager_of(tmp_path) as manager, pytest.raises(ValueError, match="step: expected an int"):
        manager.save(-1, small_state())


def test_a_step_before_the_last_is_refused_until_that_is_removed(tmp_path):
    with manager_of(tmp_path, every=2) as manager:
        save_all(manager, 2, 4)
        with pytest.raises(ValueError, match=r"step: expected at least 4, the last one in .*got 3"):
            manager.save(3, small_state())
        manager.remove(4)
        assert manager.all_steps() == [2]
        assert not manager.save(3, small_state())
        assert manager.save(4, small_state(1))
        assert_restored(manager, None, 1)


def test_a_step_that_is_not_there(tmp_path):
    with manager_of(tmp_path) as manager:
        with pytest.raises(FileNotFoundError, match=r"step None in .*: expected one of \[\], got"):
            manager.restore()
        manager.save(2, small_state())
        for call in (manager.restore, manager.remove):
            with pytest.raises(FileNotFoundError, match=r"step 3 in .*: expected one of \[2\]"):
                call(3)


def test_what_is_being_saved_may_change(tmp_path, may_write):
    """The state is donated, NumPy arrays and the position are written to, while a save waits."""
    state, position = small_state(1), {"next": [1, 2]}
    model = {"host": np.ones(2000, np.float32), "device": jax.numpy.ones(2000)}
    like = jax.tree.map(lambda array: array.copy(), model)
    with manager_of(tmp_path) as manager:
        assert manager.save(1, state, model=model, position=position)
        assert manager.all_steps() == []
        for array in (*jax.tree.leaves(state), model["device"]):
            jax.block_until_ready(jax.jit(lambda x: x * 0 + 7, donate_argnums=0)(array))
        model["host"][:] = 7
        position["next"].append(3)
        may_write.set()
        restored = manager.restore(1, model=like)
        assert_restored(manager, 1)
    assert_same(restored.model, like)
    assert restored.position == {"next": [1, 2]}


def test_a_save_that_went_wrong_is_not_there_and_removes_nothing(tmp_path):
    with manager_of(tmp_path, keep=1) as manager:
        save_all(manager, 1)
        for call, *args in (
            (manager.save, 2, small_state()),
            (manager.save, 3, small_state()),
            (manager.wait,),
        ):
            with mock.patch(WRITE, side_effect=FULL):
                assert manager.save(3, small_state())
                with pytest.raises(OSError, match="No space left"):
                    call(*args)
            assert manager.all_steps() == [1]
        save_all(manager, 2)
        assert manager.all_steps() == [2]
        manager.remove(2)
        assert manager.latest_step() is None


INTERRUPTED = {
    "the disk is full": (WRITE, FULL),
    "stopped while it writes": (WRITE, KeyboardInterrupt()),
    "stopped at the end": ("tpu_embed.io.files.sync_directories", KeyboardInterrupt()),
    "old ones cannot be removed": ("shutil.rmtree", PermissionError(13, "Permission denied")),
    "stopped while old ones are removed": ("shutil.rmtree", KeyboardInterrupt()),
}


@pytest.mark.parametrize("in_background", [True, False], ids=["in background", "waiting"])
@pytest.mark.parametrize("case", INTERRUPTED)
@pytest.mark.quick(3)
def test_as_many_as_are_to_stay_do_after_a_save_was_interrupted(tmp_path, case, in_background):
    name, error = INTERRUPTED[case]
    with manager_of(tmp_path, keep=2, in_background=in_background) as manager:
        save_all(manager, 1, 2)
        with mock.patch(name, side_effect=error), pytest.raises(type(error)):
            assert manager.save(3, small_state(3)) == manager.wait()
        for step in (4, 5, 6):
            save_all(manager, step)
            assert len(manager.all_steps()) == 2
            assert manager.all_steps()[-1] == step
        assert_restored(manager, 5)
        assert_restored(manager, 6)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"5", "6"}


def test_as_many_as_are_to_stay_do_after_a_wait_was_interrupted(tmp_path, may_write):
    """The save goes on; its step is there when the next one looks."""
    may_write.set()
    with manager_of(tmp_path, keep=2) as manager:
        save_all(manager, 1, 2)
        may_write.clear()
        manager.save(3, small_state(3))
        interrupted = mock.patch("concurrent.futures.wait", side_effect=KeyboardInterrupt)
        with interrupted, pytest.raises(KeyboardInterrupt):
            manager.wait()
        may_write.set()
        assert not manager.save(3, small_state(3))
        assert manager.all_steps() == [2, 3]
        for step in (4, 5):
            save_all(manager, step)
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


def test_a_step_that_is_half_removed_is_no_checkpoint(tmp_path):
    def half(path, **_):
        (Path(path) / "tables" / "tables.json").unlink()
        raise KeyboardInterrupt

    with manager_of(tmp_path) as manager:
        save_all(manager, 1, 2)
        with mock.patch("shutil.rmtree", half), pytest.raises(KeyboardInterrupt):
            manager.remove(2)
        assert manager.all_steps() == [1]
        manager.restore()
        save(tmp_path / "2", small_engine(), small_state(2))  # beside what is left
        manager.remove(2)
        save_all(manager, 2)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"1", "2"}


def test_what_else_is_there_is_no_checkpoint_and_what_did_not_end_is_cleaned_up(tmp_path):
    for name in ("0002", "\u0663"):  # the second is a digit, not of ASCII
        (tmp_path / name).mkdir()
    (tmp_path / "99").write_text("notes")
    left = tmp_path / "4.orbax-checkpoint-tmp"
    (left / "tables").mkdir(parents=True)
    with manager_of(tmp_path) as manager:
        assert manager.latest_step() is None
        assert left.exists()  # it may be a save that another process is at
        save_all(manager, 1, 2)
        assert not left.exists()
        assert manager.all_steps() == [1, 2]
        shutil.rmtree(tmp_path / "2")
        save_all(manager, 2)  # it is not there any more
        assert manager.all_steps() == [1, 2]


def test_threads_may_save_at_a_time(tmp_path):
    pool = concurrent.futures.ThreadPoolExecutor(2)
    with manager_of(tmp_path, keep=None) as manager, pool:
        calls = [pool.submit(manager.save, step, small_state(step)) for step in (1, 2)]
        errors = [call.exception() for call in calls]
        manager.wait()
        assert len(manager.all_steps()) == errors.count(None) >= 1
        assert {type(error) for error in errors} <= {ValueError, type(None)}  # the other was first
        for step in manager.all_steps():
            assert_restored(manager, step)


def test_a_damaged_step_names_the_others(tmp_path):
    with manager_of(tmp_path) as manager:
        save_all(manager, 1, 2, 3)
        (tmp_path / "3" / "tables" / "tables.json").unlink()
        with pytest.raises(FileNotFoundError, match=r"tables\.json") as error:
            manager.restore()
        assert error.value.__notes__ == [f"steps in {tmp_path}: [1, 2, 3]"]
        assert_restored(manager, 2)
    restore(tmp_path / "2", small(devices=2))  # a numbered directory is a checkpoint


@pytest.mark.parametrize("error", [None, FULL], ids=str)
def test_threads_end(tmp_path, error):
    before = threading.active_count()
    for number in range(3):
        with (
            mock.patch(WRITE, side_effect=error, wraps=tables.write_rows),
            pytest.raises(OSError, match="No space") if error else contextlib.nullcontext(),
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


def test_a_save_waits_where_the_interpreter_waits_for_no_thread(tmp_path, monkeypatch):
    with manager_of(tmp_path) as manager:
        ended = mock.Mock(**{"is_alive.return_value": False})
        with monkeypatch.context() as patched:  # as in a handler of `atexit`
            patched.setattr(threading, "main_thread", lambda: ended)
            save_all(manager, 1)
        assert (tmp_path / "1").is_dir()
        with monkeypatch.context() as patched:
            start = mock.Mock(side_effect=RuntimeError("no thread"))
            patched.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="no thread"):
                manager.save(2, small_state(2))
        save_all(manager, 3)
        manager.wait()
        assert manager.all_steps() == [1, 3]

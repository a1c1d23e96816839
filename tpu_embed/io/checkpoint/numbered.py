"""Numbered checkpoints of a run, on orbax: every so many steps, in the background, the last few.

Numbering, retention and atomicity are orbax's. What a checkpoint holds is the business of whoever
saves and restores: the managers of `manager.py`.

Input: steps, and functions that say what to write or that read. Output: numbered directories.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import jax
import orbax.checkpoint as ocp

from tpu_embed._checks import check_int, message
from tpu_embed.io import files
from tpu_embed.io.checkpoint.commit import local_path, new_checkpoint, remove, remove_unfinished
from tpu_embed.io.checkpoint.items import registry
from tpu_embed.io.checkpoint.step_paths import StepNames, SyncedPath, steps_in
from tpu_embed.processes import FILES_SECONDS, check_same, gather_from_all, raise_on_all

__all__ = ["NumberedCheckpoints"]

_T = TypeVar("_T")


class NumberedCheckpoints(abc.ABC):
    """Numbered checkpoints in one directory: every so many steps, in the background, the last few.

    One manager at a time writes to a directory; others may read from it. A subclass says what a
    checkpoint holds: its `save` calls `_save_numbered`, its `restore` calls `_restore_numbered`.

    Args:
      directory: of all checkpoints; made if it is not there.
      every: a save is due at multiples of this step alone, and where a preemption was announced.
      keep: how many of the last ones stay; None: all.
      in_background: whether a save returns before the files are written.

    Raises:
      ValueError: a number below 1, a directory that is no file's, or is another one in another
        process.
    """

    def __init__(
        self, directory: str | Path, *, every: int, keep: int | None, in_background: bool
    ) -> None:
        self._directory, self._in_background = local_path(directory), in_background
        self._lock = threading.Lock()  # one save or removal at a time
        every = check_int("every", every, minimum=1)
        policies = ocp.checkpoint_managers
        options = ocp.CheckpointManagerOptions(
            save_decision_policy=policies.AnySavePolicy(
                [policies.FixedIntervalPolicy(every), policies.PreemptionCheckpointingPolicy()]
            ),
            step_name_format=StepNames(),
            temporary_path_class=SyncedPath,
            max_to_keep=None if keep is None else check_int("keep", keep, minimum=1),
            enable_async_checkpointing=in_background,
            async_options=ocp.AsyncOptions(
                create_directories_asynchronously=False, timeout_secs=FILES_SECONDS
            ),
        )
        self._open()
        self._manager = ocp.CheckpointManager(
            self._directory, options=options, handler_registry=registry()
        )

    def _open(self) -> None:
        """Make the directory, and check that all processes see the same one."""
        what, seen = "CheckpointManager", ""

        def made() -> None:
            if jax.process_index() == 0:
                files.make_directory(self._directory)

        check_same(what, f"{self._directory}")
        raise_on_all(what, self._directory, made)
        for _ in range(3):  # another run may save between two looks
            seen = f"steps {self.all_steps()}" if self._directory.is_dir() else "no directory"
            if len(set(gather_from_all(what, seen))) == 1:
                return
        check_same(f"{what} {self._directory}", seen)

    @abc.abstractmethod
    def _save_args(self, content: Any, position: Any, checkpoint: str) -> ocp.args.Composite:
        """Return what to write, as orbax takes it.

        Args:
          content: what the subclass's `save` was given.
          position: a JSON value.
          checkpoint: the name of the checkpoint.
        """

    def _save_numbered(self, step: int, content: Any, position: Any, *, force: bool) -> bool:
        """Save if a save is due at this step and not there yet; tell whether it was.

        Args:
          step: the number.
          content: as for `_save_args`.
          position: as for `_save_args`.
          force: whether it is due whatever the step.

        Raises:
          ValueError: a step before the last one that is there.
          Exception: what `_save_args` raised; what went wrong while the save before was written.
        """
        step = check_int("step", step, minimum=0)
        with self._lock:
            return self._save_locked(step, content, position, force=force)

    def _save_locked(self, step: int, content: Any, position: Any, *, force: bool) -> bool:
        last = self._manager.latest_step()  # it counts while it is written
        due = force or self._manager.should_save(step)  # False of a step that is not after the last
        if not due and (last is None or step > last):
            return False
        self.wait()
        # Orbax counts a save, and drops what it makes old, before it has ended: it may not have.
        self._manager.reload()
        last = self._manager.latest_step()
        if last is not None and step < last:
            remedy = "restore that one, or remove those after the one you go on from"
            expected = f"at least {last}, the last one in {self._directory}"
            raise ValueError(message("step", expected=expected, got=f"{step}", remedy=remedy))
        if step == last or not (due or self._manager.should_save(step)):
            return False
        remove_unfinished(self._directory)
        checkpoint = new_checkpoint(self._directory)
        args = raise_on_all(
            "save", self._directory, lambda: self._save_args(content, position, checkpoint)
        )
        return self._manager.save(step, args=args, force=True)

    def _restore_numbered(self, step: int | None, read: Callable[[Path], _T]) -> _T:
        """Return what a function reads from a checkpoint; wait for a save that is under way.

        Args:
          step: its number; None: the last one.
          read: given the directory.

        Raises:
          ValueError: what `read` refuses; a note names the steps that are there.
          FileNotFoundError: there is no such checkpoint; or the same.
        """
        self.wait()
        steps = gather_from_all("restore", self.all_steps())[0]  # another run may save now
        if not steps or step not in (None, *steps):
            what, expected = f"step {step} in {self._directory}", f"one of {steps}"
            raise FileNotFoundError(message(what, expected=expected, got="none"))
        path = self._directory / f"{steps[-1] if step is None else step}"
        try:
            return read(path)
        except (ValueError, FileNotFoundError) as error:
            error.add_note(f"steps in {self._directory}: {steps}")
            raise

    def remove(self, step: int) -> None:
        """Remove a checkpoint, for example a damaged one.

        Raises:
          FileNotFoundError: there is no such checkpoint.
        """
        self.wait()
        steps = gather_from_all("remove", self.all_steps())[
            0
        ]  # before the first process removes it
        if step not in steps:
            what, expected = f"step {step} in {self._directory}", f"one of {steps}"
            raise FileNotFoundError(message(what, expected=expected, got="none"))
        path = self._directory / f"{step}"
        with self._lock:
            raise_on_all("remove", path, lambda: remove(path))
            self._manager.reload()

    def latest_step(self) -> int | None:
        """Return the number of the last checkpoint that is there, or None."""
        return max(self.all_steps(), default=None)

    def all_steps(self) -> list[int]:
        """Return the numbers of all that are there, ascending; not one that is being written."""
        return steps_in(self._directory)

    def wait(self) -> None:
        """Wait until what is being saved is there.

        Raises:
          Exception: what went wrong while it was written.
        """
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait, and end the threads.

        Raises:
          Exception: what went wrong while the last save was written.
        """
        try:
            self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

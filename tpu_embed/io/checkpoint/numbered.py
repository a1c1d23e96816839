"""Numbered checkpoints of a run: save every so many steps in the background, keep the last few.

Orbax numbers them, deletes old ones and makes each appear at once. What a checkpoint holds is
defined by the subclasses in `manager.py`.

Input: steps, and functions that return what to write or that read. Output: numbered directories.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import jax
import orbax.checkpoint as ocp

from tpu_embed._checks import check_int, local_path, message
from tpu_embed.io import files
from tpu_embed.io.checkpoint.commit import new_checkpoint, remove, remove_unfinished
from tpu_embed.io.checkpoint.items import registry
from tpu_embed.io.checkpoint.step_paths import StepNames, SyncedPath, steps_in
from tpu_embed.processes import FILES_SECONDS, check_same, gather_from_all, raise_on_all

_T = TypeVar("_T")


class _Kept:
    """Tells orbax to keep the latest checkpoints, and the one that is pinned.

    Args:
      latest: how many; None: all.

    Attributes:
      pinned: its number, or None.
    """

    def __init__(self, latest: int | None) -> None:
        self._latest = latest
        self.pinned: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Tell which of the checkpoints, from the first to the last, stay."""
        first = 0 if self._latest is None else len(checkpoints) - self._latest
        return [at >= first or one.step == self.pinned for at, one in enumerate(checkpoints)]


class NumberedCheckpoints(abc.ABC):
    """Save numbered checkpoints in one directory, and keep the last few.

    One manager at a time may write to a directory; others may read from it. A subclass defines what
    a checkpoint holds: its `save` calls `_save_numbered`, its `restore` calls `_restore_numbered`.

    Args:
      directory: the directory of all checkpoints; it is made if it does not exist.
      every: save at multiples of this step only, and when a preemption has been announced.
      keep: how many of the latest checkpoints to keep; None keeps all.
      in_background: whether a save returns before the files are written.

    Raises:
      ValueError: a number is below 1; the directory is a URL, or differs between processes.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        every: int = 1,
        keep: int | None = 3,
        in_background: bool = True,
    ) -> None:
        self._directory = local_path(directory, "directory").absolute()
        self._in_background = in_background
        self._lock = threading.Lock()  # one save or removal at a time
        every = check_int("every", every, minimum=1)
        policies = ocp.checkpoint_managers
        self._kept = _Kept(None if keep is None else check_int("keep", keep, minimum=1))
        options = ocp.CheckpointManagerOptions(
            save_decision_policy=policies.AnySavePolicy(
                [policies.FixedIntervalPolicy(every), policies.PreemptionCheckpointingPolicy()]
            ),
            step_name_format=StepNames(),
            temporary_path_class=SyncedPath,
            preservation_policy=self._kept,
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
        """Make the directory, and check that all processes see the same one.

        Two directories of the same path are told apart by the steps in them.
        """
        what, seen = "CheckpointManager", ""

        def made() -> None:
            if jax.process_index() == 0:
                files.make_directory(self._directory)

        check_same(what, f"{self._directory}")
        raise_on_all(what, self._directory, made)
        # Another run may save while the processes look one after the other: try three times.
        for _ in range(3):
            seen = f"steps {self.all_steps()}" if self._directory.is_dir() else "no directory"
            if len(set(gather_from_all(what, seen))) == 1:
                return
        check_same(f"{what} {self._directory}", seen)

    @abc.abstractmethod
    def save(self, step: int, *content: Any, force: bool = False) -> bool:
        """Save if a save is due at this step and not yet done; return whether it saved."""

    def _save_numbered(
        self, step: int, args_of: Callable[..., ocp.args.Composite], *, force: bool
    ) -> bool:
        """Save if a save is due at this step and not yet done; return whether it saved.

        Args:
          step: the number of the checkpoint.
          args_of: as for `write_checkpoint`.
          force: whether to save whatever the step is.

        Raises:
          ValueError: the step is before the latest checkpoint.
          Exception: whatever `args_of` raises; an error in writing the previous save.
        """
        step = check_int("step", step, minimum=0)
        with self._lock:
            last = self._manager.latest_step()  # counts a save that is still being written
            due = force or self._manager.should_save(step)  # orbax: False unless step > last
            if not due and (last is None or step > last):
                return False
            self.wait()
            # Orbax counts a save, and forgets the ones that it replaces, as soon as it starts. The
            # save may have failed since, so read again from disk which steps exist.
            self._manager.reload()
            last = self._manager.latest_step()
            if last is not None and step < last:
                remedy = "restore that one, or remove those after the one you go on from"
                expected = f"at least {last}, the last one in {self._directory}"
                raise ValueError(message("step", expected=expected, got=f"{step}", remedy=remedy))
            if step == last or not (due or self._manager.should_save(step)):
                return False
            remove_unfinished(self._directory)
            checkpoint, path = new_checkpoint(self._directory), self._directory / f"{step}"
            args = raise_on_all(
                "save", self._directory, lambda: args_of(path=path, checkpoint=checkpoint)
            )
            return self._manager.save(step, args=args, force=True)

    def _restore_numbered(self, step: int | None, read: Callable[[Path], _T]) -> _T:
        """Return what a function reads from a checkpoint; wait for a save that is under way.

        Args:
          step: the number of the checkpoint; None takes the latest one.
          read: the function, given the directory of the checkpoint.

        Raises:
          ValueError: whatever `read` refuses; a note lists the steps that exist.
          FileNotFoundError: there is no such checkpoint, or `read` misses a file of it.
        """
        self.wait()
        # Another run may save now: all processes use the list that the first one sees.
        steps = gather_from_all("restore", self.all_steps())[0]
        path = self._path_of(steps[-1] if steps and step is None else step, steps)
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
        # Agree on the list first: the first process may remove the step before another one looks.
        path = self._path_of(step, gather_from_all("remove", self.all_steps())[0])
        with self._lock:
            raise_on_all("remove", path, lambda: remove(path))
            self._manager.reload()

    def pin(self, step: int | None) -> None:
        """Have later saves leave this checkpoint there, whatever `keep` says.

        Args:
          step: its number, in place of the one that was pinned before; None: none is.
        """
        self._kept.pinned = step

    def _path_of(self, step: int | None, steps: list[int]) -> Path:
        """Return the directory of a checkpoint, which must be among the steps that exist."""
        if step not in steps:
            what, expected = f"step {step} in {self._directory}", f"one of {steps}"
            raise FileNotFoundError(message(what, expected=expected, got="none"))
        return self._directory / f"{step}"

    def latest_step(self) -> int | None:
        """Return the number of the latest finished checkpoint, or None."""
        return max(self.all_steps(), default=None)

    def all_steps(self) -> list[int]:
        """Return the numbers of all finished checkpoints, ascending."""
        return steps_in(self._directory)

    def wait(self) -> None:
        """Wait until the save that is under way has finished.

        Raises:
          Exception: an error in writing it.
        """
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait for the save that is under way, and end the threads.

        Raises:
          Exception: an error in writing it.
        """
        try:
            self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

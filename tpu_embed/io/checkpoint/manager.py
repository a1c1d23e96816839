"""Checkpoint managers: save every so many steps of a run, keep the last few, restore any of them.

One class is for the states of an engine, the other for flax modules. Checkpoints have the numbers
of their steps; a thread writes them, and removes old ones, while training goes on.

Input: states or modules, step after step. Output: numbered directories, or the contents of one.
"""

from __future__ import annotations

import abc
import concurrent.futures
import functools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, final

import jax
import orbax.checkpoint as ocp

from tpu_embed._checks import check_int, refuse
from tpu_embed._types import Array, PyTree
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.state import TableState
from tpu_embed.io import files
from tpu_embed.io.checkpoint.commit import Begin, begin_checkpoint, find_checkpoint
from tpu_embed.io.checkpoint.engine_checkpoint import (
    Restored,
    check_engine_or_name_others,
    prepare_save,
    restore,
)
from tpu_embed.io.checkpoint.module_checkpoint import prepare_modules, restore_modules
from tpu_embed.io.commits import committer
from tpu_embed.io.store import Bucket, Place, place_of
from tpu_embed.processes import check_same, gather_from_all, raise_on_all
from tpu_embed.touched import TouchedRows

_NUMBER = re.compile("0|[1-9][0-9]*")
"""Matches the names of finished checkpoints; those of unfinished ones have a suffix."""

_T = TypeVar("_T")


def _in_the_first(what: str, path: Place, function: Callable[[], None]) -> None:
    """Call a function in the first process; an error in it is raised in all, as `raise_on_all`."""
    raise_on_all(what, path, (lambda: None) if jax.process_index() else function)


class _NumberedCheckpoints(abc.ABC):
    """Save numbered checkpoints in one directory, and keep the last few.

    One manager at a time may write to a directory; others may read from it. A subclass defines what
    a checkpoint holds: its `save` calls `_save_numbered`, its `restore` calls `_restore_numbered`.

    Args:
      directory: the directory of all checkpoints; it is made if it does not exist.
      every: save at multiples of this step only, and when a preemption has been announced.
      keep: how many of the latest checkpoints to keep; None keeps all.
      in_background: whether a save returns before the files are written.

    Raises:
      ValueError: a number is below 1; the directory is a bad URL, or differs between processes.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        every: int = 1,
        keep: int | None = 3,
        in_background: bool = True,
    ) -> None:
        self._directory = place_of(directory, "directory")
        self._in_background = in_background
        self._lock = threading.Lock()  # one save or removal at a time
        self._every = check_int("every", every, minimum=1)
        self._keep = None if keep is None else check_int("keep", keep, minimum=1)
        self._pinned: int | None = None
        self._saving: concurrent.futures.Future[None] | None = None
        self._open()
        # Counts a save that is still being written.
        self._last = max(self._steps_on_all("CheckpointManager"), default=None)

    def _open(self) -> None:
        """Make the directory, and check that all processes see the same one.

        Two directories of the same path are told apart by the steps in them.
        """
        what, directory, seen = "CheckpointManager", self._directory, ""

        def look():
            there = isinstance(directory, Bucket) or directory.is_dir()
            return f"steps {self.all_steps()}" if there else "no directory"

        check_same(what, f"{directory}")
        if isinstance(directory, Path):
            _in_the_first(what, directory, lambda: files.make_directory(directory))
        # Another run may save while the processes look one after the other: try three times.
        for _ in range(3):
            seen = raise_on_all(what, directory, look)
            if len(set(gather_from_all(what, seen))) == 1:
                return
        check_same(f"{what} {directory}", seen)

    @abc.abstractmethod
    def save(self, step: int, *content: Any, force: bool = False) -> bool:
        """Save if a save is due at this step and not yet done; return whether it saved."""

    def _save_numbered(
        self, step: int, prepare: Callable[..., Mapping[str, Begin]], *, force: bool
    ) -> bool:
        """Save if a save is due at this step and not yet done; return whether it saved.

        Args:
          step: the number of the checkpoint.
          prepare: as for `begin_checkpoint`.
          force: whether to save whatever the step is.

        Raises:
          ValueError: the step is before the latest checkpoint.
          Exception: whatever `prepare` raises; an error in writing the previous save.
        """
        step = check_int("step", step, minimum=0)
        with self._lock:
            # To be asked at every step.
            preempted = ocp.utils.reached_preemption(step)
            due = force or preempted or step % self._every == 0
            if not due and (self._last is None or step > self._last):
                return False
            self.wait()
            # The save may have failed.
            last = self._last = max(self._steps_on_all("save"), default=None)
            if last is not None and step < last:
                refuse(
                    "step",
                    expected=f"at least {last}, the last one in {self._directory}",
                    got=f"{step}",
                    remedy="restore that one, or remove those after the one you go on from",
                )
            if step == last or not due:
                return False
            _in_the_first("sweep", self._directory, committer(self._directory).sweep)
            write = begin_checkpoint(self._directory / f"{step}", prepare)
            self._last, pinned = step, self._pinned

            def saved():
                write()
                _in_the_first(
                    "remove", self._directory, lambda: self._remove_old(pinned)
                )

            # The interpreter waits at its end for a thread, but for none that begins after the main
            # one; an executor takes nothing by then.
            if self._in_background and threading.main_thread().is_alive():
                saving = concurrent.futures.Future()

                def fulfil():
                    try:
                        saving.set_result(saved())
                    except BaseException as error:
                        saving.set_exception(error)

                thread = threading.Thread(target=fulfil, name="tpu_embed_save")
                self._saving = saving
                try:
                    thread.start()
                except BaseException:
                    if not thread.is_alive():  # nobody will fulfil it
                        self._saving = None
                    raise
            else:
                saved()
            return True

    def _remove_old(self, pinned: int | None) -> None:
        """Remove all but the latest checkpoints and the pinned one."""
        if self._keep is not None:
            for step in self.all_steps()[: -self._keep]:
                if step != pinned:
                    committer(self._directory / f"{step}").remove()

    def _restore_numbered(self, step: int | None, read: Callable[[Any], _T]) -> _T:
        """Return what a function reads from a checkpoint; wait for a save that is under way.

        Args:
          step: the number of the checkpoint; None takes the latest one.
          read: the function, given the directory of the checkpoint.

        Raises:
          ValueError: whatever `read` refuses; a note lists the steps that exist.
          FileNotFoundError: there is no such checkpoint, or `read` misses a file of it.
        """
        self.wait()
        steps = self._steps_on_all("restore")
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
        path = self._path_of(step, self._steps_on_all("remove"))
        with self._lock:
            _in_the_first("remove", path, committer(path).remove)

    def pin(self, step: int | None) -> None:
        """Have later saves leave this checkpoint there, whatever `keep` says.

        Args:
          step: its number, in place of the one that was pinned before; None: none is.
        """
        self._pinned = step

    def _path_of(self, step: int | None, steps: list[int]) -> Place:
        """Return the directory of a checkpoint, which must be among the steps that exist."""
        if step not in steps:
            refuse(
                f"step {step} in {self._directory}",
                expected=f"one of {steps}",
                got="none",
                error=FileNotFoundError,
            )
        return self._directory / f"{step}"

    def _steps_on_all(self, what: str) -> list[int]:
        """Return the numbers of the checkpoints that the first process sees; all call this."""
        # Another run may save now, or the first process may be the first to remove one.
        mine = raise_on_all(what, self._directory, self.all_steps)
        return gather_from_all(f"{what}: steps", mine)[0]

    def latest_step(self) -> int | None:
        """Return the number of the latest finished checkpoint, or None."""
        return max(self.all_steps(), default=None)

    def all_steps(self) -> list[int]:
        """Return the numbers of all finished checkpoints, ascending."""
        found = committer(self._directory).names()
        return sorted(int(name) for name in found if _NUMBER.fullmatch(name))

    def has(self, step: int, item: str) -> bool:
        """Return whether a checkpoint has a part: `MODEL`, or `TOUCHED`."""
        return (find_checkpoint(self._directory / f"{step}") / item).is_dir()

    def wait(self) -> None:
        """Wait until the save that is under way has finished.

        Raises:
          Exception: an error in writing it.
        """
        if (saving := self._saving) is not None:
            concurrent.futures.wait([saving])
            if self._saving is saving:  # an error is raised once
                self._saving = None
                saving.result()

    def close(self) -> None:
        """Wait for the save that is under way.

        Raises:
          Exception: an error in writing it.
        """
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@final
class CheckpointManager(_NumberedCheckpoints):
    """Save numbered checkpoints of an engine in one directory, and keep the last few.

    A save copies the state to the host and returns; a thread writes the files. One manager at a
    time may write to a directory; others may read from it.

    Args:
      directory: the directory of all checkpoints; it is made if it does not exist.
      engine: the engine that makes the states.
      every: save at multiples of this step only, and when a preemption has been announced.
      keep: how many of the latest checkpoints to keep; None keeps all.
      in_background: whether `save` returns before the files are written.

    Raises:
      ValueError: a number is below 1; the directory is a bad URL, or differs between processes.
      TypeError: `engine` is not an `EmbeddingEngine`.
    """

    def __init__(
        self,
        directory: str | Path,
        engine: EmbeddingEngine,
        *,
        every: int = 1,
        keep: int | None = 3,
        in_background: bool = True,
    ) -> None:
        check_engine_or_name_others(engine)
        super().__init__(directory, every=every, keep=keep, in_background=in_background)
        self._engine = engine

    def save(
        self,
        step: int,
        state: TableState,
        *,
        model: PyTree = None,
        position: Any = None,
        touched: TouchedRows | None = None,
        force: bool = False,
    ) -> bool:
        """Save if a save is due at this step and not yet done; return whether it saved.

        This waits for the previous save to finish.

        Args:
          step: the number of the checkpoint.
          state: as for `save`; it may be donated as soon as this returns.
          model: as for `save`.
          position: as for `save`.
          touched: as for `save`.
          force: whether to save whatever the step is, for example at the end of a run.

        Raises:
          ValueError: whatever `save` refuses; a step before the latest checkpoint.
          Exception: an error in writing the previous save; nothing is saved now.
        """
        content = self._engine, state, model, position, touched
        prepare = functools.partial(prepare_save, *content, copied=self._in_background)
        return self._save_numbered(step, prepare, force=force)

    def restore(
        self,
        step: int | None = None,
        *,
        model: PyTree = None,
        key: Array | None = None,
        convert: bool = False,
        leave_out: Sequence[str] = (),
        touched: TouchedRows | None = None,
    ) -> Restored:
        """Return the contents of a checkpoint; see `restore`.

        This waits for a save that is under way.

        Args:
          step: the number of the checkpoint; None takes the latest one.
          model: as for `restore`.
          key: as for `restore`.
          convert: as for `restore`.
          leave_out: as for `restore`.
          touched: as for `restore`.

        Raises:
          ValueError: whatever `restore` refuses; a note lists the steps that exist.
          FileNotFoundError: there is no such checkpoint.
        """
        read = functools.partial(
            restore,
            engine=self._engine,
            model=model,
            key=key,
            convert=convert,
            leave_out=leave_out,
            touched=touched,
        )
        return self._restore_numbered(step, read)


@final
class ModuleCheckpointManager(_NumberedCheckpoints):
    """Save numbered checkpoints of flax modules in one directory, and keep the last few.

    A save copies all arrays to the host and returns; a thread writes the files. One manager at a
    time may write to a directory; others may read from it.

    Args:
      directory: the directory of all checkpoints; it is made if it does not exist.
      every: save at multiples of this step only, and when a preemption has been announced.
      keep: how many of the latest checkpoints to keep; None keeps all.
      in_background: whether `save` returns before the files are written.

    Raises:
      ValueError: a number is below 1; the directory is a bad URL, or differs between processes.
    """

    def save(
        self,
        step: int,
        modules: Mapping[str, Any],
        *,
        position: Any = None,
        force: bool = False,
    ) -> bool:
        """Save if a save is due at this step and not yet done; return whether it saved.

        This waits for the previous save to finish.

        Args:
          step: the number of the checkpoint.
          modules: as for `save_modules`; training may continue as soon as this returns.
          position: as for `save_modules`.
          force: whether to save whatever the step is, for example at the end of a run.

        Raises:
          ValueError: whatever `save_modules` refuses; a step before the latest checkpoint.
          TypeError: whatever `save_modules` refuses.
          Exception: an error in writing the previous save; nothing is saved now.
        """
        copied = self._in_background
        prepare = functools.partial(prepare_modules, modules, position, copied=copied)
        return self._save_numbered(step, prepare, force=force)

    def restore(
        self,
        modules: Mapping[str, Any],
        step: int | None = None,
        *,
        key: Array | None = None,
        convert: bool = False,
        leave_out: Sequence[str] = (),
    ) -> Any:
        """Fill modules from a checkpoint; see `restore_modules`.

        This waits for a save that is under way.

        Args:
          modules: as for `restore_modules`.
          step: the number of the checkpoint; None takes the latest one.
          key: as for `restore_modules`.
          convert: as for `restore_modules`.
          leave_out: as for `restore_modules`.

        Returns:
          The position, or None.

        Raises:
          ValueError: whatever `restore_modules` refuses; a note lists the steps that exist.
          TypeError: whatever `restore_modules` refuses.
          FileNotFoundError: there is no such checkpoint.
        """
        read = functools.partial(
            restore_modules,
            modules=modules,
            key=key,
            convert=convert,
            leave_out=leave_out,
        )
        return self._restore_numbered(step, read)

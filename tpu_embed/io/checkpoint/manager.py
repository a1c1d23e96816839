"""Checkpoint managers: save every so many steps of a run, keep the last few, restore any of them.

One class is for the states of an engine, the other for flax modules.

Input: states or modules, step after step. Output: numbered directories, or the contents of one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from tpu_embed._types import Array, PyTree
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.state import TableState
from tpu_embed.io.checkpoint.engine_checkpoint import (
    Restored,
    check_engine_or_name_others,
    restore,
    save_args,
)
from tpu_embed.io.checkpoint.module_checkpoint import restore_modules, save_modules_args
from tpu_embed.io.checkpoint.numbered import NumberedCheckpoints
from tpu_embed.touched import TouchedRows


@final
class CheckpointManager(NumberedCheckpoints):
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
      ValueError: a number is below 1; the directory is a URL, or differs between processes.
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
        args_of = functools.partial(save_args, *content, copied=self._in_background)
        return self._save_numbered(step, args_of, force=force)

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
        wishes: dict[str, Any] = {"key": key, "convert": convert, "leave_out": leave_out}
        wishes |= {"model": model, "touched": touched}
        return self._restore_numbered(step, lambda path: restore(path, self._engine, **wishes))


@final
class ModuleCheckpointManager(NumberedCheckpoints):
    """Save numbered checkpoints of flax modules in one directory, and keep the last few.

    A save copies all arrays to the host and returns; a thread writes the files. One manager at a
    time may write to a directory; others may read from it.

    Args:
      directory: the directory of all checkpoints; it is made if it does not exist.
      every: save at multiples of this step only, and when a preemption has been announced.
      keep: how many of the latest checkpoints to keep; None keeps all.
      in_background: whether `save` returns before the files are written.

    Raises:
      ValueError: a number is below 1; the directory is a URL, or differs between processes.
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
        args_of = functools.partial(save_modules_args, modules, position, copied=copied)
        return self._save_numbered(step, args_of, force=force)

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
        wishes: dict[str, Any] = {"key": key, "convert": convert, "leave_out": leave_out}
        return self._restore_numbered(step, lambda path: restore_modules(path, modules, **wishes))

"""The managers of a run's checkpoints: of an engine's states, or of flax modules.

Input: states or modules, step after step. Output: numbered directories, or what is in one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import orbax.checkpoint as ocp

from tpu_embed._types import Array, PyTree
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.state import TableState
from tpu_embed.io.checkpoint.engine_checkpoint import Restored, check_engine, restore, save_args
from tpu_embed.io.checkpoint.module_checkpoint import restore_modules, save_modules_args
from tpu_embed.io.checkpoint.numbered import NumberedCheckpoints

__all__ = ["CheckpointManager", "ModuleCheckpointManager"]


@final
class CheckpointManager(NumberedCheckpoints):
    """Numbered checkpoints in one directory: every so many steps, in the background, the last few.

    A save copies the state to the host and returns; files are written by a thread. One manager at a
    time writes to a directory; others may read from it.

    Args:
      directory: of all checkpoints; made if it is not there.
      engine: whose states they are.
      every: `save` saves at multiples of this step alone, and where a preemption was announced.
      keep: how many of the last ones stay; None: all.
      in_background: whether `save` returns before the files are written.

    Raises:
      ValueError: a number below 1, a directory that is no file's, or is another one in another
        process.
      TypeError: no engine.
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
        check_engine(engine)
        super().__init__(directory, every=every, keep=keep, in_background=in_background)
        self._engine = engine

    def save(
        self,
        step: int,
        state: TableState,
        *,
        model: PyTree = None,
        position: Any = None,
        force: bool = False,
    ) -> bool:
        """Save, if a save is due at this step and not there yet; tell whether it was.

        It waits for the save before it.

        Args:
          step: the number.
          state: as for `save`; it may be donated as soon as this returns.
          model: as for `save`.
          position: as for `save`.
          force: whether it is due whatever the step, for example at the end.

        Raises:
          ValueError: what `save` refuses; a step before the last one that is there.
          Exception: what went wrong while the save before it was written; nothing was saved.
        """
        return self._save_numbered(step, (state, model), position, force=force)

    def _save_args(self, content: Any, position: Any, checkpoint: str) -> ocp.args.Composite:
        state, model = content
        copied = self._in_background
        return save_args(self._engine, state, model, position, checkpoint=checkpoint, copied=copied)

    def restore(
        self,
        step: int | None = None,
        *,
        model: PyTree = None,
        key: Array | None = None,
        convert: bool = False,
        leave_out: Sequence[str] = (),
    ) -> Restored:
        """Return what is in a checkpoint; see `restore`. It waits for a save that is under way.

        Args:
          step: its number; None: the last one.
          model: as for `restore`.
          key: as for `restore`.
          convert: as for `restore`.
          leave_out: as for `restore`.

        Raises:
          ValueError: what `restore` refuses; a note names the steps that are there.
          FileNotFoundError: there is no such checkpoint.
        """
        wishes: dict[str, Any] = {"key": key, "convert": convert, "leave_out": leave_out}
        return self._restore_numbered(
            step, lambda path: restore(path, self._engine, model=model, **wishes)
        )


@final
class ModuleCheckpointManager(NumberedCheckpoints):
    """Numbered checkpoints of flax modules: every so many steps, in the background, the last few.

    A save copies all arrays to the host and returns; files are written by a thread. One manager at
    a time writes to a directory; others may read from it.

    Args:
      directory: of all checkpoints; made if it is not there.
      every: `save` saves at multiples of this step alone, and where a preemption was announced.
      keep: how many of the last ones stay; None: all.
      in_background: whether `save` returns before the files are written.

    Raises:
      ValueError: a number below 1, a directory that is no file's, or is another one in another
        process.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        every: int = 1,
        keep: int | None = 3,
        in_background: bool = True,
    ) -> None:
        super().__init__(directory, every=every, keep=keep, in_background=in_background)

    def save(
        self,
        step: int,
        modules: Mapping[str, Any],
        *,
        position: Any = None,
        force: bool = False,
    ) -> bool:
        """Save, if a save is due at this step and not there yet; tell whether it was.

        It waits for the save before it.

        Args:
          step: the number.
          modules: as for `save_modules`; they may be trained on as soon as this returns.
          position: as for `save_modules`.
          force: whether it is due whatever the step, for example at the end.

        Raises:
          ValueError: what `save_modules` refuses; a step before the last one that is there.
          TypeError: what `save_modules` refuses.
          Exception: what went wrong while the save before it was written; nothing was saved.
        """
        return self._save_numbered(step, modules, position, force=force)

    def _save_args(self, content: Any, position: Any, checkpoint: str) -> ocp.args.Composite:
        copied = self._in_background
        return save_modules_args(content, position, checkpoint=checkpoint, copied=copied)

    def restore(
        self,
        modules: Mapping[str, Any],
        step: int | None = None,
        *,
        key: Array | None = None,
        convert: bool = False,
        leave_out: Sequence[str] = (),
    ) -> Any:
        """Fill modules with what is in a checkpoint; see `restore_modules`.

        It waits for a save that is under way.

        Args:
          modules: as for `restore_modules`.
          step: its number; None: the last one.
          key: as for `restore_modules`.
          convert: as for `restore_modules`.
          leave_out: as for `restore_modules`.

        Returns:
          the position, or None.

        Raises:
          ValueError: what `restore_modules` refuses; a note names the steps that are there.
          TypeError: what `restore_modules` refuses.
          FileNotFoundError: there is no such checkpoint.
        """
        wishes: dict[str, Any] = {"key": key, "convert": convert, "leave_out": leave_out}
        return self._restore_numbered(step, lambda path: restore_modules(path, modules, **wishes))

"""Checkpoints, on orbax: tables and slots by name, the network beside them, whole or not at all.

Enters: an engine and its state, a pytree, a position in the data. Leaves: a directory, or all that
again, for any mesh, placement and stacking. Called by users; a `TPUEmbedding` has `engine` and
`state` to give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orbax.checkpoint as ocp

from tpu_embed._checks import check_int, message
from tpu_embed._types import Array, PyTree
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.tables import TableState
from tpu_embed.io.checked import PyTreeArgs, PyTreeHandler, TablesArgs, TablesHandler
from tpu_embed.io.tables import Wanted

__all__ = ["CheckpointManager", "Restored", "restore", "save"]

_TABLES, _MODEL, _POSITION = "tables", "model", "position"


class Restored(NamedTuple):
    """What was in a checkpoint.

    Attributes:
      state: tables and slots, as the engine has them.
      model: the pytree beside them, or None if none was asked for.
      position: the JSON value beside them, or None.
    """

    state: TableState
    model: PyTree
    position: Any


def save(
    path: str | Path,
    engine: EmbeddingEngine,
    state: TableState,
    *,
    model: PyTree = None,
    position: Any = None,
) -> None:
    """Write a checkpoint; it is there when this returns, and nothing of it before.

    Args:
      path: a directory that does not exist.
      engine: whose state it is.
      state: tables and slots; at most a few blocks of rows are held beside them.
      model: a pytree of arrays.
      position: a JSON value, for example where the data iterator stands.

    Raises:
      ValueError: the path exists, or the state is another engine's.

    Example:
      >>> import tempfile, jax, tpu_embed
      >>> table = tpu_embed.TableConfig(vocabulary_size=8, dim=2, name="item")
      >>> engine = EmbeddingEngine({"x": tpu_embed.FeatureConfig(table)})
      >>> state = engine.init(jax.random.key(0))
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     save(f"{directory}/first", engine, state, position={"epoch": 1})
      ...     restored = restore(f"{directory}/first", engine)
      >>> restored.position, bool((engine.tables(restored.state)["item"][0]
      ...                         == engine.tables(state)["item"][0]).all())
      ({'epoch': 1}, True)
    """
    path = Path(path).absolute()
    if path.exists():
        remedy = "remove it, or save elsewhere; CheckpointManager numbers its directories"
        raise ValueError(message("path", expected="no file", got=f"{path}", remedy=remedy))
    with ocp.Checkpointer(_handler()) as checkpointer:
        checkpointer.save(path, args=_save_args(engine, state, model, position))


def restore(
    path: str | Path,
    engine: EmbeddingEngine,
    *,
    model: PyTree = None,
    key: Array | None = None,
    convert: bool = False,
    leave_out: Sequence[str] = (),
) -> Restored:
    """Return what is in a checkpoint, for an engine of any mesh, placement and stacking.

    An engine without optimizers reads tables alone.

    Args:
      path: what `save` wrote.
      engine: whose state to make.
      model: the pytree beside the tables, or its shapes, with the shardings it is to have; None:
        it is not read.
      key: makes what is not in the checkpoint (tables, slots, rows by which a table has grown) as
        `engine.init` would; None: that something is not there is an error.
      convert: whether dtypes may be others than they were; numbers are rounded then.
      leave_out: tables of the checkpoint that the engine does not have.

    Raises:
      ValueError: a table, slot, shape or dtype is not what the engine has; a file is damaged.
      FileNotFoundError: there is no checkpoint.
    """
    path = Path(path).absolute()
    _check_there(path)
    wanted = Wanted(engine, key, convert, tuple(leave_out))
    with ocp.Checkpointer(_handler()) as checkpointer:
        found = checkpointer.restore(path, args=_restore_args(path, wanted, model))
    return _restored(found)


def _check_there(path: Path) -> None:
    if not (path / _TABLES).is_dir():
        got, remedy = "none", "give the directory that save wrote"
        text = message(f"path {path}", expected="a checkpoint", got=got, remedy=remedy)
        raise FileNotFoundError(text)


def _registry() -> Any:
    registry = ocp.DefaultCheckpointHandlerRegistry()
    items: dict[str, tuple[Callable[[], Any], type]] = {
        _TABLES: (TablesHandler, TablesArgs),
        _MODEL: (PyTreeHandler, PyTreeArgs),
    }
    for name, (handler, args) in items.items():
        registry.add(name, args, handler())
    registry.add(_POSITION, ocp.args.JsonSave, ocp.JsonCheckpointHandler())
    registry.add(_POSITION, ocp.args.JsonRestore, ocp.JsonCheckpointHandler())
    return registry


def _handler() -> Any:
    return ocp.CompositeCheckpointHandler(handler_registry=_registry())


def _save_args(
    engine: EmbeddingEngine, state: TableState, model: PyTree, position: Any
) -> ocp.args.Composite:
    items: dict[str, Any] = {_TABLES: TablesArgs(engine, state)}
    if model is not None:
        items[_MODEL] = PyTreeArgs(model)
    items[_POSITION] = ocp.args.JsonSave({"position": position})
    return ocp.args.Composite(**items)


def _restore_args(path: Path, wanted: Wanted, model: PyTree) -> ocp.args.Composite:
    items: dict[str, Any] = {_TABLES: TablesArgs(wanted=wanted)}
    if model is not None:
        if not (path / _MODEL).is_dir():
            expected, remedy = "one in the checkpoint", "leave it out, or save with model="
            raise ValueError(message("model", expected=expected, got="none", remedy=remedy))
        items[_MODEL] = PyTreeArgs(model)
    items[_POSITION] = ocp.args.JsonRestore()
    return ocp.args.Composite(**items)


def _restored(found: Any) -> Restored:
    return Restored(found[_TABLES], found.get(_MODEL), found[_POSITION]["position"])


class CheckpointManager:
    """Numbered checkpoints in one directory: every so many steps, in the background, the last few.

    A save copies the state to the host and returns; files are written by a thread. Thin: the
    numbering, retention and atomicity are orbax's.

    Args:
      directory: of all checkpoints; made if it is not there.
      engine: whose states they are.
      every: steps from one save to the next; `save` does nothing in between.
      keep: how many of the last ones stay; None: all.
      in_background: whether `save` returns before the files are written.

    Raises:
      ValueError: a number below 1.
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
        self._directory, self._engine = Path(directory).absolute(), engine
        options = ocp.CheckpointManagerOptions(
            save_interval_steps=check_int("every", every, minimum=1),
            max_to_keep=None if keep is None else check_int("keep", keep, minimum=1),
            enable_async_checkpointing=in_background,
            create=True,
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        self._manager = ocp.CheckpointManager(
            self._directory, options=options, handler_registry=_registry()
        )

    def save(
        self, step: int, state: TableState, *, model: PyTree = None, position: Any = None
    ) -> bool:
        """Save, if a save is due at this step; tell whether it was.

        Args:
          step: the number.
          state: as for `save`; it may be donated as soon as this returns.
          model: as for `save`.
          position: as for `save`.
        """
        args = _save_args(self._engine, state, model, position)
        return self._manager.save(step, args=args)

    def restore(
        self,
        step: int | None = None,
        *,
        model: PyTree = None,
        key: Array | None = None,
        convert: bool = False,
        leave_out: Sequence[str] = (),
    ) -> Restored:
        """Return what is in a checkpoint; see `restore`.

        Args:
          step: its number; None: the last one.
          model: as for `restore`.
          key: as for `restore`.
          convert: as for `restore`.
          leave_out: as for `restore`.

        Raises:
          ValueError: what `restore` refuses.
          FileNotFoundError: there is no such checkpoint.
        """
        step = self.latest_step() if step is None else step
        path = self._directory / str(step)
        _check_there(path)
        wanted = Wanted(self._engine, key, convert, tuple(leave_out))
        return _restored(self._manager.restore(step, args=_restore_args(path, wanted, model)))

    def latest_step(self) -> int | None:
        """Return the number of the last checkpoint that is whole, or None."""
        return self._manager.latest_step()

    def all_steps(self) -> list[int]:
        """Return the numbers of all that are whole, ascending."""
        return sorted(self._manager.all_steps())

    def wait(self) -> None:
        """Wait until what is being saved is there.

        Raises:
          Exception: what went wrong while it was written.
        """
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait, and end the threads."""
        self._manager.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

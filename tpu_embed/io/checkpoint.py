"""Checkpoints, on orbax: tables and slots by name, the network beside them, whole or not at all.

Enters: an engine and its state, a pytree, a position in the data. Leaves: a directory, or all that
again, for any mesh, placement and stacking. Called by users; a `TPUEmbedding` has `engine` and
`state` to give.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import glob
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from tpu_embed._checks import check_int, message
from tpu_embed._types import Array, PyTree
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.tables import TableState
from tpu_embed.io import tables
from tpu_embed.io.checked import JsonArgs, JsonHandler, PyTreeArgs, PyTreeHandler
from tpu_embed.io.tables import Wanted

__all__ = ["CheckpointManager", "Restored", "restore", "save"]

_TABLES, _MODEL, _POSITION = "tables", "model", "position"
_UNFINISHED = ".orbax-checkpoint-tmp"
"""How the name of a directory goes on while orbax fills it."""


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
      model: a pytree of arrays, none of size 0, and Python numbers.
      position: a JSON value, for example where the data iterator stands.

    Raises:
      ValueError: the path exists, or is no file's; the state is another engine's; a model without
        arrays, a position that is no JSON.

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
    path = _local(path)
    if path.exists():
        remedy = "remove it, or save elsewhere; CheckpointManager numbers its directories"
        raise ValueError(message("path", expected="no file", got=f"{path}", remedy=remedy))
    prepared = tables.prepare(engine, state, copied=False)
    args = _save_args(prepared, model, position)
    try:
        with ocp.Checkpointer(_handler()) as checkpointer:
            checkpointer.save(path, args=args)
    except BaseException:
        _remove_unfinished(path.parent, path.name)
        raise


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
      path: what `save` wrote, or one of the numbered directories of a `CheckpointManager`.
      engine: whose state to make.
      model: the pytree beside the tables, or its shapes. Each leaf gets the sharding that this one
        has been given; where none was, it is on every device of the engine. None: it is not read.
      key: makes what is not in the checkpoint as `engine.init` would: tables, rows by which a table
        has grown, all slots of a table whose optimizer is of another class, or has other slots.
        None: that something is not there is an error.
      convert: whether dtypes may be others than they were; numbers are rounded then.
      leave_out: tables of the checkpoint that are not read.

    Raises:
      ValueError: a table, slot, leaf, shape or dtype is not as it was saved; a file is damaged.
      FileNotFoundError: there is no checkpoint, or no model in it.
    """
    path = _local(path)
    parts = (_TABLES, _POSITION) if model is None else (_TABLES, _POSITION, _MODEL)
    missing = [part for part in parts if not (path / part).is_dir()]
    if missing:
        expected, got = f"a directory with {', '.join(parts)}", f"none of {', '.join(missing)}"
        remedy = "give the directory that save wrote"
        what = f"checkpoint {path}"
        raise FileNotFoundError(message(what, expected=expected, got=got, remedy=remedy))
    wanted = Wanted(engine, key, convert, tuple(leave_out))
    with ocp.Checkpointer(_handler()) as checkpointer:
        found: Any = checkpointer.restore(path, args=_restore_args(wanted, model))
    return Restored(found[_TABLES], found.get(_MODEL), found[_POSITION])


def _local(path: str | Path) -> Path:
    """Return an absolute path; refuse an address, which `Path` would take for a directory here."""
    if re.match(r"\w\w+:/", str(path)):
        remedy = "mount the bucket, or copy the checkpoint"
        got = repr(str(path))
        raise ValueError(message("path", expected="one of a file system", got=got, remedy=remedy))
    return Path(path).absolute()


def _remove_unfinished(directory: Path, name: str | None = None) -> None:
    """Remove what saves have left that did not end: of one directory, or of all."""
    if jax.process_index() == 0:
        start = "*" if name is None else glob.escape(name)
        for left in directory.glob(f"{start}{_UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)


@dataclasses.dataclass
class _TablesArgs(ocp.args.CheckpointArgs):
    """What to save, or what to restore."""

    prepared: tables.Prepared | None = None
    wanted: Wanted | None = None


class _TablesHandler(ocp.AsyncCheckpointHandler):
    """Saves and restores a `TableState`; orbax waits for the files, now or later."""

    def __init__(self) -> None:
        self._background = concurrent.futures.ThreadPoolExecutor(1, "tpu_embed_save")

    def save(self, directory: Any, args: _TablesArgs) -> None:
        assert args.prepared is not None, "made by _save_args"
        tables.write(Path(directory), args.prepared)

    async def async_save(self, directory: Any, args: _TablesArgs) -> list[Any]:
        return [self._background.submit(self.save, directory, args)]

    def restore(self, directory: Any, args: _TablesArgs) -> TableState:
        assert args.wanted is not None, "made by _restore_args"
        return tables.read(Path(directory), args.wanted)

    def finalize(self, directory: Any) -> None:
        """Do nothing: all is written."""

    def metadata(self, directory: Any) -> Any:
        """Return nothing: `tables.json` is read by `restore`."""
        return None

    def close(self) -> None:
        self._background.shutdown()


def _registry() -> Any:
    registry = ocp.DefaultCheckpointHandlerRegistry()
    registry.add(_TABLES, _TablesArgs, _TablesHandler())
    registry.add(_MODEL, PyTreeArgs, PyTreeHandler())
    registry.add(_POSITION, JsonArgs, JsonHandler())
    return registry


def _handler() -> Any:
    return ocp.CompositeCheckpointHandler(handler_registry=_registry())


def _save_args(prepared: tables.Prepared, model: PyTree, position: Any) -> ocp.args.Composite:
    try:
        plain = json.loads(json.dumps(position))  # a copy: the iterator goes on
    except (TypeError, ValueError) as error:
        raise ValueError(message("position", expected="a JSON value", got=f"{error}")) from error
    items: dict[str, Any] = {_TABLES: _TablesArgs(prepared), _POSITION: JsonArgs(plain)}
    if model is not None:
        if not jax.tree.leaves(model):
            remedy = "leave it out"
            raise ValueError(message("model", expected="arrays", got=repr(model), remedy=remedy))
        items[_MODEL] = PyTreeArgs(jax.tree.map(_array, model))
    return ocp.args.Composite(**items)


def _restore_args(wanted: Wanted, model: PyTree) -> ocp.args.Composite:
    items: dict[str, Any] = {_TABLES: _TablesArgs(wanted=wanted), _POSITION: JsonArgs()}
    if model is not None:
        everywhere = wanted.engine.layout.axes.sharding(())
        abstract = jax.tree.map(lambda leaf: _abstract(leaf, everywhere), model)
        items[_MODEL] = PyTreeArgs(abstract, wanted.convert)
    return ocp.args.Composite(**items)


def _array(leaf: Any) -> Any:
    """Return a NumPy scalar, which orbax does not know, as an array; others as they are."""
    return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf


def _abstract(leaf: Any, everywhere: jax.sharding.Sharding) -> Any:
    """Return what orbax is to make of an array, with a sharding; of others, themselves."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return _array(leaf)
    given = leaf.sharding if not isinstance(leaf, jax.Array) or leaf.committed else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=given or everywhere)


class CheckpointManager:
    """Numbered checkpoints in one directory: every so many steps, in the background, the last few.

    A save copies the state to the host and returns; files are written by a thread. Thin: numbering,
    retention and atomicity are orbax's. One manager at a time writes to a directory; others may
    read from it.

    Args:
      directory: of all checkpoints; made if it is not there.
      engine: whose states they are.
      every: `save` saves at multiples of this step alone, and where a preemption was announced.
      keep: how many of the last ones stay; None: all.
      in_background: whether `save` returns before the files are written.

    Raises:
      ValueError: a number below 1, or a directory that is no file's.
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
        self._directory, self._engine = _local(directory), engine
        self._in_background = in_background
        every = check_int("every", every, minimum=1)
        policies = ocp.checkpoint_managers
        options = ocp.CheckpointManagerOptions(
            save_decision_policy=policies.AnySavePolicy(
                [policies.FixedIntervalPolicy(every), policies.PreemptionCheckpointingPolicy()]
            ),
            max_to_keep=None if keep is None else check_int("keep", keep, minimum=1),
            enable_async_checkpointing=in_background,
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        self._manager = ocp.CheckpointManager(
            self._directory, options=options, handler_registry=_registry()
        )

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
        last, step = self._manager.latest_step(), check_int("step", step, minimum=0)
        if last is not None and step < last:
            remedy = "restore that one, or remove those after the one you go on from"
            expected = f"at least {last}, the last one in {self._directory}"
            raise ValueError(message("step", expected=expected, got=f"{step}", remedy=remedy))
        if step == last or not (force or self._manager.should_save(step)):
            return False
        self.wait()
        _remove_unfinished(self._directory)
        prepared = tables.prepare(self._engine, state, copied=self._in_background)
        args = _save_args(prepared, model, position)
        return self._manager.save(step, args=args, force=True)

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
        self.wait()
        steps = self.all_steps()
        if not steps or step not in (None, *steps):
            what, expected = f"step {step} in {self._directory}", f"one of {steps}"
            raise FileNotFoundError(message(what, expected=expected, got="none"))
        path = self._directory / f"{steps[-1] if step is None else step}"
        wishes: dict[str, Any] = {"key": key, "convert": convert, "leave_out": leave_out}
        try:
            return restore(path, self._engine, model=model, **wishes)
        except (ValueError, FileNotFoundError) as error:
            error.add_note(f"steps in {self._directory}: {steps}")
            raise

    def remove(self, step: int) -> None:
        """Remove a checkpoint, for example a damaged one.

        Raises:
          FileNotFoundError: there is no such checkpoint.
        """
        self.wait()
        if step not in self.all_steps():
            what, expected = f"step {step} in {self._directory}", f"one of {self.all_steps()}"
            raise FileNotFoundError(message(what, expected=expected, got="none"))
        self._manager.delete(step)

    def latest_step(self) -> int | None:
        """Return the number of the last checkpoint that is there, or None."""
        return max(self.all_steps(), default=None)

    def all_steps(self) -> list[int]:
        """Return the numbers of all that are there, ascending; not one that is being written."""
        names = [path.name for path in self._directory.iterdir()]
        return sorted(int(name) for name in names if re.fullmatch(r"\d+", name))

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

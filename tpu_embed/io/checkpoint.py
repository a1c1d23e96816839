"""Checkpoints, on orbax: tables and slots by name, the network beside them, whole or not at all.

Enters: an engine and its state, a pytree, a position in the data. Leaves: a directory, or all that
again, for any mesh, placement and stacking. Called by users; a `TPUEmbedding` has `engine` and
`state` to give.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from tpu_embed._checks import message
from tpu_embed._types import Array, PyTree
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.processes import check_same, together
from tpu_embed.core.tables import TableState
from tpu_embed.io import files, manifest, tables
from tpu_embed.io.items import (
    MODEL,
    POSITION,
    TABLES,
    check_engine,
    handler,
    local_path,
    new_checkpoint,
    remove_unfinished,
    restore_args,
    save_args,
)
from tpu_embed.io.manifest import Wanted
from tpu_embed.io.step_paths import SyncedPath

__all__ = ["Restored", "restore", "save"]

_SAVING = threading.Lock()
"""One `save` at a time: another one to the same path must find it there."""


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
    """Write a checkpoint; it is on the disk when this returns, and nothing of it is there before.

    Of several processes, all call this; what goes wrong in one is raised in all.

    Args:
      path: a directory that does not exist.
      engine: whose state it is.
      state: tables and slots; at most a few blocks of rows are held beside them.
      model: a pytree, no single leaf, of arrays, none of size 0, and Python numbers.
      position: a JSON value, its keys strings, for example where the data iterator stands.

    Raises:
      ValueError: the path exists, or is no file's; the state is another engine's; a model without
        arrays, a position that is no JSON.
      TypeError: no engine.

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
    path = local_path(path)
    check_engine(engine)

    def prepared() -> ocp.args.Composite:
        if path.exists():
            remedy = "remove it, or save elsewhere; CheckpointManager numbers its directories"
            raise ValueError(message("path", expected="no file", got=f"{path}", remedy=remedy))
        parts = tables.prepare(engine, state, checkpoint=checkpoint, copied=False)
        args = save_args(parts, model, position)
        if jax.process_index() == 0:
            files.make_directory(path.parent)
        return args

    with _SAVING:
        check_same("save", f"{path}")
        checkpoint = new_checkpoint(path)
        args = together("save", path, prepared)
        try:
            with ocp.Checkpointer(handler(), temporary_path_class=SyncedPath) as checkpointer:
                checkpointer.save(path, args=args)
        except BaseException:
            remove_unfinished(path.parent, path.name)
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

    An engine without optimizers reads tables alone. Of several processes, all call this; what goes
    wrong in one is raised in all.

    Args:
      path: what `save` wrote, or one of the numbered directories of a `CheckpointManager`.
      engine: whose state to make.
      model: the pytree beside the tables, or its shapes. Each leaf gets the sharding that this one
        has been given; where none was, it is on every device of the engine. None: it is not read.
      key: makes what is not in the checkpoint as `engine.init` would: tables, rows by which a table
        has grown, all slots of a table whose optimizer is of another class, or has other slots.
        None: that something is not there is an error.
      convert: whether floats may be of another dtype than they were; they are rounded then.
      leave_out: tables of the checkpoint that are not read.

    Raises:
      ValueError: a table, slot, leaf, shape or dtype is not as it was saved; a file is damaged, or
        belongs to another checkpoint, table, slot or place.
      FileNotFoundError: there is no checkpoint, or no model in it; a file of it is missing.
      TypeError: no engine.
    """
    path = local_path(path)
    check_engine(engine)
    parts = (TABLES, POSITION) if model is None else (TABLES, POSITION, MODEL)

    def prepared() -> ocp.args.Composite:
        missing = [part for part in parts if not (path / part).is_dir()]
        if missing:
            expected, got = f"a directory with {', '.join(parts)}", f"none of {', '.join(missing)}"
            remedy = "give the directory that save wrote, which every process can reach"
            what = f"checkpoint {path}"
            raise FileNotFoundError(message(what, expected=expected, got=got, remedy=remedy))
        wanted = Wanted(engine, key, convert, tuple(leave_out))
        return restore_args(wanted, model, manifest.name_of(path / TABLES))

    check_same("restore", f"{path}")
    args = together("restore", path, prepared)
    with ocp.Checkpointer(handler()) as checkpointer:
        found: Any = checkpointer.restore(path, args=args)
    return Restored(found[TABLES], found.get(MODEL), found[POSITION])

"""Checkpoints of an engine: tables and slots by name, a network and a position beside them.

Input: an engine and its state, a pytree, a position in the data. Output: a directory, or all that
again, for any mesh, placement and stacking. A `TPUEmbedding` has `engine` and `state` to give.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from flax import nnx

from tpu_embed._checks import message
from tpu_embed._types import Array, PyTree
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.state import TableState
from tpu_embed.io.checkpoint import manifest, tables
from tpu_embed.io.checkpoint.checked import JsonArgs, as_json
from tpu_embed.io.checkpoint.commit import read_checkpoint, write_checkpoint
from tpu_embed.io.checkpoint.items import MODEL, POSITION, TABLES, FilesArgs
from tpu_embed.io.checkpoint.manifest import Wanted
from tpu_embed.io.checkpoint.trees import PyTreeArgs, abstract_leaf, as_array, check_leaves

__all__ = ["Restored", "check_engine", "restore", "save", "save_args"]


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
      model: a pytree, no single leaf, of arrays and Python numbers.
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
    check_engine(engine)
    write_checkpoint(
        path,
        lambda checkpoint: save_args(
            engine, state, model, position, checkpoint=checkpoint, copied=False
        ),
    )


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
    check_engine(engine)
    wanted = Wanted(engine, key, convert, tuple(leave_out))
    items = (TABLES, POSITION) if model is None else (TABLES, POSITION, MODEL)
    found = read_checkpoint(
        path, items, lambda path: _restore_args(wanted, model, path), writer="save"
    )
    return Restored(found[TABLES], found.get(MODEL), found[POSITION])


def check_engine(engine: Any) -> None:
    """Check that something is an engine.

    Raises:
      TypeError: it is not.
    """
    if not isinstance(engine, EmbeddingEngine):
        remedy = "a TPUEmbedding has one: embedding.engine"
        if isinstance(engine, nnx.Pytree):
            remedy = "save_modules, restore_modules and ModuleCheckpointManager take flax modules"
        got = type(engine).__name__
        text = message("engine", expected="an EmbeddingEngine", got=got, remedy=remedy)
        raise TypeError(text)


def save_args(
    engine: EmbeddingEngine,
    state: TableState,
    model: PyTree,
    position: Any,
    *,
    checkpoint: str,
    copied: bool,
) -> ocp.args.Composite:
    """Return what to save, as orbax takes it.

    Args:
      engine: whose state it is.
      state: the state.
      model: the pytree beside it, or None.
      position: a JSON value.
      checkpoint: the name of the checkpoint.
      copied: whether to copy the state to the host now: it may be donated afterwards.

    Raises:
      ValueError: the state of another engine, a model without arrays, a position that is no JSON.
    """
    prepared = tables.prepare(engine, state, checkpoint=checkpoint, copied=copied)
    items: dict[str, Any] = {
        TABLES: FilesArgs(write=lambda path: tables.write(path, prepared)),
        POSITION: JsonArgs(checkpoint, as_json(position)),
    }
    if model is not None:
        if not jax.tree.leaves(model):
            remedy = "leave it out"
            raise ValueError(message("model", expected="arrays", got=repr(model), remedy=remedy))
        check_leaves("model", model)
        items[MODEL] = PyTreeArgs(checkpoint, jax.tree.map(as_array, model))
    return ocp.args.Composite(**items)


def _restore_args(wanted: Wanted, model: PyTree, path: Path) -> ocp.args.Composite:
    """Return what to restore, as orbax takes it."""
    checkpoint = manifest.name_of(path / TABLES)
    items: dict[str, Any] = {
        TABLES: FilesArgs(read=lambda path: tables.read(path, wanted)),
        POSITION: JsonArgs(checkpoint),
    }
    if model is not None:
        check_leaves("model", model)
        everywhere = wanted.engine.layout.axes.sharding(())
        abstract = jax.tree.map(lambda leaf: abstract_leaf(leaf, everywhere), model)
        items[MODEL] = PyTreeArgs(checkpoint, abstract, wanted.convert)
    return ocp.args.Composite(**items)

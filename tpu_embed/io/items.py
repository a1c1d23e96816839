"""What a checkpoint consists of, as orbax handles it: tables, a model, a position.

Enters: prepared tables and pytrees, or what is wanted. Leaves: arguments and handlers for orbax.
Called by `checkpoint.py` and `manager.py`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import glob
import json
import re
import shutil
import uuid
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from tpu_embed._checks import message
from tpu_embed._types import PyTree
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.processes import said_by_all, together
from tpu_embed.core.tables import TableState
from tpu_embed.io import files, tables
from tpu_embed.io.checked import JsonArgs, JsonHandler, PyTreeArgs, PyTreeHandler, check_model
from tpu_embed.io.manifest import Wanted

TABLES, MODEL, POSITION = "tables", "model", "position"
_UNFINISHED = ".orbax-checkpoint-tmp"
"""How the name of a directory goes on while orbax fills it."""

_DEEPEST = 100
"""Values of a position inside each other."""


def local_path(path: str | Path) -> Path:
    """Return an absolute path; refuse an address, which `Path` would take for a directory here."""
    if re.match(r"\w\w+:/", str(path)):
        remedy = "mount the bucket, or copy the checkpoint"
        got = repr(str(path))
        raise ValueError(message("path", expected="one of a file system", got=got, remedy=remedy))
    return Path(path).absolute()


def check_engine(engine: Any) -> None:
    """Check that something is an engine.

    Raises:
      TypeError: it is not.
    """
    if not isinstance(engine, EmbeddingEngine):
        remedy = "a TPUEmbedding has one: embedding.engine"
        got = type(engine).__name__
        text = message("engine", expected="an EmbeddingEngine", got=got, remedy=remedy)
        raise TypeError(text)


def remove(path: Path) -> None:
    """Remove a checkpoint; if that is interrupted, what is left of it is no checkpoint."""
    if jax.process_index() == 0:
        remove_unfinished(path.parent, path.name)
        left = path.with_name(f"{path.name}{_UNFINISHED}-removed")
        path.rename(left)
        files.sync(path.parent)
        shutil.rmtree(left)


def remove_unfinished(directory: Path, name: str | None = None) -> None:
    """Remove what saves have left that did not end: of one directory, or of all."""
    if jax.process_index() == 0:
        start = "*" if name is None else glob.escape(name)
        for left in directory.glob(f"{start}{_UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)


def new_checkpoint(path: Path) -> str:
    """Return a name for a checkpoint that no other has; all processes call this, and get the same.

    Args:
      path: where it will be.
    """
    what = f"checkpoint/{zlib.crc32(str(path).encode()):08x}"
    return said_by_all(what, uuid.uuid4().hex)[0]


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
        path, prepared = Path(directory), args.prepared
        assert prepared is not None, "made by save_args"

        def written() -> None:
            if not path.is_dir():  # the first process has made it
                expected, remedy = "a directory", "give a path that every process can reach"
                text = message(f"checkpoint {path}", expected=expected, got="none", remedy=remedy)
                raise FileNotFoundError(text)
            tables.write(path, prepared)

        together("save", path, written)

    async def async_save(self, directory: Any, args: _TablesArgs) -> list[Any]:
        return [self._background.submit(self.save, directory, args)]

    def restore(self, directory: Any, args: _TablesArgs) -> TableState:
        assert args.wanted is not None, "made by restore_args"
        return tables.read(Path(directory), args.wanted)

    def finalize(self, directory: Any) -> None:
        """Do nothing: all is written."""

    def metadata(self, directory: Any) -> Any:
        """Return nothing: `tables.json` is read by `restore`."""
        return None

    def close(self) -> None:
        self._background.shutdown()


def registry() -> Any:
    """Return orbax's registry of handlers, one an item."""
    made = ocp.DefaultCheckpointHandlerRegistry()
    made.add(TABLES, _TablesArgs, _TablesHandler())
    made.add(MODEL, PyTreeArgs, PyTreeHandler())
    made.add(POSITION, JsonArgs, JsonHandler())
    return made


def handler() -> Any:
    """Return orbax's handler of a whole checkpoint."""
    return ocp.CompositeCheckpointHandler(handler_registry=registry())


def save_args(prepared: tables.Prepared, model: PyTree, position: Any) -> ocp.args.Composite:
    """Return what to save, as orbax takes it.

    Raises:
      ValueError: a model without arrays, a position that is no JSON.
    """
    name = prepared.checkpoint
    items: dict[str, Any] = {
        TABLES: _TablesArgs(prepared),
        POSITION: JsonArgs(name, _as_json(position)),
    }
    if model is not None:
        if not jax.tree.leaves(model):
            remedy = "leave it out"
            raise ValueError(message("model", expected="arrays", got=repr(model), remedy=remedy))
        check_model(model)
        items[MODEL] = PyTreeArgs(name, jax.tree.map(_array, model))
    return ocp.args.Composite(**items)


def _as_json(position: Any) -> Any:
    """Return a copy of a JSON value: the iterator that it came from goes on.

    Raises:
      ValueError: it is no JSON value.
    """
    _check_nested(position, 0)
    try:
        return json.loads(json.dumps(position))
    except (TypeError, ValueError) as error:
        raise ValueError(message("position", expected="a JSON value", got=f"{error}")) from error


def _check_nested(value: Any, depth: int) -> None:
    """Check that keys are strings, others would come back as such, and that nesting is bounded.

    Who restores may have less room on its stack than who saves.
    """
    if depth > _DEEPEST:
        expected, got = f"at most {_DEEPEST} values inside each other", "more"
        raise ValueError(message("position", expected=expected, got=got))
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(message("position", expected="string keys", got=f"key {key!r}"))
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inside in value:
            _check_nested(inside, depth + 1)


def restore_args(wanted: Wanted, model: PyTree, checkpoint: str) -> ocp.args.Composite:
    """Return what to restore, as orbax takes it.

    Args:
      wanted: what to make of the tables.
      model: the abstract pytree, or None.
      checkpoint: the name of the checkpoint that all parts must belong to.
    """
    items: dict[str, Any] = {
        TABLES: _TablesArgs(wanted=wanted),
        POSITION: JsonArgs(checkpoint),
    }
    if model is not None:
        check_model(model)
        everywhere = wanted.engine.layout.axes.sharding(())
        abstract = jax.tree.map(lambda leaf: _abstract(leaf, everywhere), model)
        items[MODEL] = PyTreeArgs(checkpoint, abstract, wanted.convert)
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

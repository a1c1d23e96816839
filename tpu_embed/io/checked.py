"""Items of a checkpoint as orbax handles them: tables, and pytrees whose files are checked.

Enters: what orbax asks of a handler. Leaves: files in the directory that orbax gives, or what was
in them. Called by `checkpoint.py`, which hands these to orbax.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from tpu_embed._checks import message
from tpu_embed._types import PyTree
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.tables import TableState
from tpu_embed.io import tables

__all__ = ["PyTreeArgs", "PyTreeHandler", "TablesArgs", "TablesHandler"]

_SUMS = "checksums.json"


@dataclasses.dataclass
class TablesArgs(ocp.args.CheckpointArgs):
    """What to save: an engine's state; or what to restore."""

    engine: EmbeddingEngine | None = None
    state: TableState | None = None
    wanted: tables.Wanted | None = None


class TablesHandler(ocp.AsyncCheckpointHandler):
    """Saves and restores a `TableState`. A save in the background works on a copy on the host."""

    def __init__(self) -> None:
        self._background = concurrent.futures.ThreadPoolExecutor(1, "tpu_embed_save")

    def save(self, directory: Any, args: TablesArgs) -> None:
        """Write the state before returning."""
        assert args.engine is not None, "made by checkpoint.py"
        assert args.state is not None, "made by checkpoint.py"
        tables.write(Path(directory), tables.prepare(args.engine, args.state, copied=False))

    async def async_save(self, directory: Any, args: TablesArgs) -> list[Any]:
        """Copy the state to the host; return a future of its being written."""
        assert args.engine is not None, "made by checkpoint.py"
        assert args.state is not None, "made by checkpoint.py"
        prepared = tables.prepare(args.engine, args.state, copied=True)
        return [self._background.submit(tables.write, Path(directory), prepared)]

    def restore(self, directory: Any, args: TablesArgs) -> TableState:
        """Return the state."""
        assert args.wanted is not None, "made by checkpoint.py"
        return tables.read(Path(directory), args.wanted)

    def finalize(self, directory: Any) -> None:
        """Do nothing: all is written."""

    def metadata(self, directory: Any) -> Any:
        """Return nothing: the manifest is read by `restore`."""
        return None

    def close(self) -> None:
        """End the thread."""
        self._background.shutdown()


@dataclasses.dataclass
class PyTreeArgs(ocp.args.CheckpointArgs):
    """A pytree to save; or the abstract one to restore."""

    tree: PyTree


class PyTreeHandler(ocp.AsyncCheckpointHandler):
    """Orbax's handler of pytrees; its files are checked against their CRC-32 before they are read.

    Orbax checks what it needs to find arrays, and not their bytes.
    """

    def __init__(self) -> None:
        self._handler = ocp.StandardCheckpointHandler()

    def save(self, directory: Any, args: PyTreeArgs) -> None:
        """Write the tree before returning."""
        self._handler.save(directory, args=ocp.args.StandardSave(args.tree))

    async def async_save(self, directory: Any, args: PyTreeArgs) -> list[Any] | None:
        """Copy the tree to the host; return futures of its being written."""
        return await self._handler.async_save(directory, args=ocp.args.StandardSave(args.tree))

    def restore(self, directory: Any, args: PyTreeArgs) -> PyTree:
        """Check the files, and return the tree."""
        _check_sums(Path(directory))
        return self._handler.restore(directory, args=ocp.args.StandardRestore(args.tree))

    def finalize(self, directory: Any) -> None:
        """Let orbax finish, and write the checksums of its files."""
        self._handler.finalize(directory)
        if jax.process_index() == 0:
            (Path(directory) / _SUMS).write_text(json.dumps(_sums(Path(directory))))

    def metadata(self, directory: Any) -> Any:
        """Return what orbax says of the tree."""
        return self._handler.metadata(directory)

    def close(self) -> None:
        """Let orbax end its threads."""
        self._handler.close()


def _sums(directory: Path) -> dict[str, int]:
    """Return the CRC-32 of every file in a directory, by its path there."""
    files = sorted(p for p in directory.rglob("*") if p.is_file() and p.name != _SUMS)
    return {str(p.relative_to(directory)): zlib.crc32(p.read_bytes()) for p in files}


def _check_sums(directory: Path) -> None:
    """Check the files of a tree.

    Raises:
      ValueError: one is damaged, missing, or not of it.
    """
    what, remedy = f"checkpoint {directory}", "restore another step; this one is damaged"
    try:
        expected = json.loads((directory / _SUMS).read_text())
    except (OSError, ValueError) as error:
        got = f"{type(error).__name__}: {error}"
        raise ValueError(message(what, expected="checksums", got=got, remedy=remedy)) from error
    found = _sums(directory)  # orbax adds a mark of its own later
    wrong = sorted(name for name in expected if found.get(name) != expected[name])
    if wrong:
        expected, got = "files as they were written", f"other bytes in {wrong}"
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))

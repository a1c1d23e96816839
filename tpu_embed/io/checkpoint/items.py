"""The items of a checkpoint. Orbax gives each its own directory, and a handler that writes it.

    of an engine    tables, position, and model and touched if they were given
    of modules      layers, variables, position

Input: functions that write or read the files of a directory; pytrees; JSON values. Output: orbax's
arguments and handlers.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from tpu_embed._checks import message
from tpu_embed.io.checkpoint.checked import JsonArgs, JsonHandler
from tpu_embed.io.checkpoint.trees import PyTreeArgs, PyTreeHandler
from tpu_embed.processes import raise_on_all

TABLES, MODEL = "tables", "model"
LAYERS, VARIABLES = "layers", "variables"
POSITION, TOUCHED = "position", "touched"


@dataclasses.dataclass
class FilesArgs(ocp.args.CheckpointArgs):
    """The function that writes this process's files into a directory, or the one that reads them.

    Attributes:
      write: given the directory; it must not wait for other processes.
      read: given the directory, returns its contents; it may wait for other processes.
    """

    write: Callable[[Path], None] | None = None
    read: Callable[[Path], Any] | None = None


class _FilesHandler(ocp.AsyncCheckpointHandler):
    """Orbax's handler of files that this package writes itself, at once or in the background."""

    def __init__(self) -> None:
        self._background = concurrent.futures.ThreadPoolExecutor(1, "tpu_embed_save")

    def save(self, directory: Any, args: FilesArgs) -> None:
        path, write = Path(directory), args.write
        assert write is not None, "this is a save"

        def written() -> None:
            # The first process made it; another one that does not see it has another file system.
            if not path.is_dir():
                expected, remedy = "a directory", "give a path that every process can reach"
                text = message(f"checkpoint {path}", expected=expected, got="none", remedy=remedy)
                raise FileNotFoundError(text)
            write(path)

        raise_on_all("save", path, written)

    async def async_save(self, directory: Any, args: FilesArgs) -> list[Any]:
        return [self._background.submit(self.save, directory, args)]

    def restore(self, directory: Any, args: FilesArgs) -> Any:
        assert args.read is not None, "this is a restore"
        return args.read(Path(directory))

    def finalize(self, directory: Any) -> None:
        """Do nothing: the files have been written."""

    def metadata(self, directory: Any) -> Any:
        """Return None: `restore` reads `tables.json` and `layers.json` itself."""
        return None

    def close(self) -> None:
        self._background.shutdown()


def registry() -> Any:
    """Return orbax's registry of handlers, one per item."""
    made = ocp.DefaultCheckpointHandlerRegistry()
    for files in (TABLES, LAYERS, TOUCHED):
        made.add(files, FilesArgs, _FilesHandler())
    for tree in (MODEL, VARIABLES):
        made.add(tree, PyTreeArgs, PyTreeHandler())
    made.add(POSITION, JsonArgs, JsonHandler())
    return made


def handler() -> Any:
    """Return orbax's handler of a whole checkpoint."""
    return ocp.CompositeCheckpointHandler(handler_registry=registry())

"""Write, find and remove a checkpoint directory, which is either complete or absent.

    of an engine    tables, position, and model and touched if they were given
    of modules      layers, variables, position

A directory has a temporary name until all of its items are written and on disk, then its own. When
there are several processes, all of them make these calls, and an error in one is raised in all.

Input: a path, and what to write. Output: a directory, or what was found in one.
"""

from __future__ import annotations

import glob
import shutil
import threading
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import jax

from tpu_embed._checks import local_path, message
from tpu_embed.io import files
from tpu_embed.io.checkpoint import trees
from tpu_embed.processes import check_same, gather_from_all, raise_on_all

TABLES, MODEL = "tables", "model"
LAYERS, VARIABLES = "layers", "variables"
POSITION, TOUCHED = "position", "touched"

Begin = Callable[[Path], Callable[[], None]]
"""Copies what may change from now on, and returns what writes this process's files of an item.

It is given the directory of the item. Neither waits for other processes.
"""

_T = TypeVar("_T")
_SAVING = threading.Lock()
"""Held during a save, so that a second save to the same path sees the first one's directory."""

_SHOWN = 3
"""How many checkpoints of a directory a message names."""
_UNFINISHED = ".orbax-checkpoint-tmp"
"""What follows the name of a directory while it is filled, as when orbax did that."""


def remove(path: Path) -> None:
    """Remove a checkpoint.

    It is renamed first, so that an interrupted removal never leaves half a checkpoint.
    """
    if jax.process_index() == 0:
        remove_unfinished(path.parent, path.name)
        left = path.with_name(f"{path.name}{_UNFINISHED}-removed")
        files.rename(path, left)
        shutil.rmtree(left)


def remove_unfinished(directory: Path, name: str | None = None) -> None:
    """Remove the temporary directories of unfinished saves: those of one checkpoint, or all."""
    if jax.process_index() == 0:
        start = "*" if name is None else glob.escape(name)
        for left in directory.glob(f"{start}{_UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)


def begin_checkpoint(path: Path, prepare: Callable[..., Mapping[str, Begin]]) -> Callable[[], None]:
    """Begin to write a checkpoint; return what goes on until it is complete and on disk.

    Args:
      path: a directory that does not exist yet.
      prepare: checks and returns what to write, by item, given the `path` of the checkpoint and
        its name as `checkpoint`.

    Raises:
      ValueError: the path exists.
      Exception: whatever `prepare` raises. What an error leaves has a temporary name.
    """
    # One key per path, so that saves to different paths do not mix up their exchanges.
    what = f"checkpoint/{zlib.crc32(str(path).encode()):08x}"
    checkpoint = gather_from_all(what, uuid.uuid4().hex)[0]
    temporary = path.with_name(f"{path.name}{_UNFINISHED}")

    def prepared() -> Mapping[str, Begin]:
        if path.exists():
            remedy = "remove it, or save elsewhere; CheckpointManager numbers its directories"
            raise ValueError(message("path", expected="no file", got=f"{path}", remedy=remedy))
        items = prepare(path=path, checkpoint=checkpoint)
        if jax.process_index() == 0:
            files.make_directory(path.parent)
            remove_unfinished(path.parent, path.name)
            temporary.mkdir()
        return items

    def begun() -> list[Callable[[], None]]:
        # The first process made it; another one that does not see it has another file system.
        if not temporary.is_dir():
            expected, remedy = "a directory", "give a path that every process can reach"
            text = message(f"checkpoint {path}", expected=expected, got="none", remedy=remedy)
            raise FileNotFoundError(text)
        for item in items:
            (temporary / item).mkdir(exist_ok=True)  # every process makes it
        return [begin(temporary / item) for item, begin in items.items()]

    def finished() -> None:
        if jax.process_index() == 0:
            for item in items.keys() & {MODEL, VARIABLES}:
                trees.finish(temporary / item, checkpoint)
            files.sync_directories(temporary)
            files.rename(temporary, path)

    def go_on() -> None:
        raise_on_all("save", path, lambda: [write() for write in writes])
        raise_on_all("save", path, finished)

    items = raise_on_all("save", path, prepared)
    writes = raise_on_all("save", path, begun)
    return go_on


def write_checkpoint(path: str | Path, prepare: Callable[..., Mapping[str, Begin]]) -> None:
    """Write a checkpoint; it appears complete, and is on disk when this returns.

    Args:
      path: as for `begin_checkpoint`.
      prepare: as for `begin_checkpoint`.

    Raises:
      ValueError: the path exists, or is a URL.
      Exception: whatever `prepare` raises; nothing has been written then.
    """
    path = local_path(path).absolute()
    with _SAVING:
        check_same("save", f"{path}")
        try:
            begin_checkpoint(path, prepare)()
        except BaseException:
            remove_unfinished(path.parent, path.name)
            raise


def _missing(path: Path, items: Sequence[str]) -> list[str]:
    """Return the items that a directory does not have; all of them if it was never finished."""
    return [item for item in items if _UNFINISHED in path.name or not (path / item).is_dir()]


def check_items(path: Path, items: Sequence[str], *, writer: str) -> None:
    """Check that a checkpoint is there, with some items.

    Raises:
      FileNotFoundError: it is not.
    """
    missing = _missing(path, items)
    if missing:
        expected, got = f"a directory with {', '.join(items)}", f"none of {', '.join(missing)}"
        remedy = f"give the directory that {writer} wrote, which every process can reach"
        inside = path.iterdir() if path.is_dir() else ()
        numbered = sorted((f"{one}" for one in inside if not _missing(one, items)), reverse=True)
        if numbered:
            shown = ", ".join(numbered[:_SHOWN])
            remedy = f"this one has the checkpoints of a manager: give one of {shown}"
        what = f"checkpoint {path}"
        raise FileNotFoundError(message(what, expected=expected, got=got, remedy=remedy))


def open_checkpoint(
    path: Path, items: Sequence[str], prepare: Callable[[], _T], *, writer: str
) -> _T:
    """Return what a function finds in a checkpoint before its items are read.

    Args:
      path: the checkpoint.
      items: the items that it must have.
      prepare: checks what can be checked before reading.
      writer: the name of the function that writes such checkpoints, for messages.

    Raises:
      FileNotFoundError: there is no checkpoint, or it lacks an item.
      Exception: whatever `prepare` raises.
    """

    def prepared() -> _T:
        check_items(path, items, writer=writer)
        return prepare()

    check_same("restore", f"{path}")
    return raise_on_all("restore", path, prepared)

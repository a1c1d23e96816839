"""A directory that is a checkpoint: it appears whole or not at all, and is removed likewise.

Orbax fills a directory of another name and renames it when all is written. Of several processes,
all make these calls, and what goes wrong in one is raised in all.

Input: a path, and what to write to it or to read. Output: a directory, or what was in it.
"""

from __future__ import annotations

import glob
import re
import shutil
import threading
import uuid
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from tpu_embed._checks import message
from tpu_embed.io import files
from tpu_embed.io.checkpoint.items import handler
from tpu_embed.io.checkpoint.step_paths import SyncedPath
from tpu_embed.processes import check_same, gather_from_all, raise_on_all

__all__ = [
    "local_path",
    "new_checkpoint",
    "read_checkpoint",
    "remove",
    "remove_unfinished",
    "write_checkpoint",
]

_SAVING = threading.Lock()
"""One save at a time: another one to the same path must find it there."""

_UNFINISHED = ".orbax-checkpoint-tmp"
"""How the name of a directory goes on while orbax fills it."""


def local_path(path: str | Path) -> Path:
    """Return an absolute path; refuse an address, which `Path` would take for a directory here."""
    if re.match(r"\w\w+:/", str(path)):
        remedy = "mount the bucket, or copy the checkpoint"
        got = repr(str(path))
        raise ValueError(message("path", expected="one of a file system", got=got, remedy=remedy))
    return Path(path).absolute()


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
    return gather_from_all(what, uuid.uuid4().hex)[0]


def write_checkpoint(path: str | Path, args_of: Callable[[str], ocp.args.Composite]) -> None:
    """Write a checkpoint; it is on the disk when this returns, and nothing of it is there before.

    Args:
      path: a directory that does not exist.
      args_of: returns what to write, given the name of the checkpoint; checks it, too.

    Raises:
      ValueError: the path exists, or is no file's.
      Exception: what `args_of` raises; nothing was written then.
    """
    path = local_path(path)

    def prepared() -> ocp.args.Composite:
        if path.exists():
            remedy = "remove it, or save elsewhere; CheckpointManager numbers its directories"
            raise ValueError(message("path", expected="no file", got=f"{path}", remedy=remedy))
        args = args_of(checkpoint)
        if jax.process_index() == 0:
            files.make_directory(path.parent)
        return args

    with _SAVING:
        check_same("save", f"{path}")
        checkpoint = new_checkpoint(path)
        args = raise_on_all("save", path, prepared)
        try:
            with ocp.Checkpointer(handler(), temporary_path_class=SyncedPath) as checkpointer:
                checkpointer.save(path, args=args)
        except BaseException:
            remove_unfinished(path.parent, path.name)
            raise


def read_checkpoint(
    path: str | Path,
    items: Sequence[str],
    args_of: Callable[[Path], ocp.args.Composite],
    *,
    writer: str,
) -> Any:
    """Return what is in a checkpoint, by item.

    Args:
      path: of the checkpoint.
      items: those that must be there.
      args_of: returns what to read, given the path; checks what can be checked before.
      writer: the function that writes such checkpoints, for messages.

    Raises:
      FileNotFoundError: there is no checkpoint, or an item is not in it.
      Exception: what `args_of` raises, and what goes wrong while files are read.
    """
    path = local_path(path)

    def prepared() -> ocp.args.Composite:
        missing = [item for item in items if not (path / item).is_dir()]
        if missing:
            expected, got = f"a directory with {', '.join(items)}", f"none of {', '.join(missing)}"
            remedy = f"give the directory that {writer} wrote, which every process can reach"
            what = f"checkpoint {path}"
            raise FileNotFoundError(message(what, expected=expected, got=got, remedy=remedy))
        return args_of(path)

    check_same("restore", f"{path}")
    args = raise_on_all("restore", path, prepared)
    with ocp.Checkpointer(handler()) as checkpointer:
        return checkpointer.restore(path, args=args)

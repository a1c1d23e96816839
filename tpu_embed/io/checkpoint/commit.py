"""Write, read and remove a checkpoint directory, which is either complete or absent.

Orbax fills a directory under a temporary name and renames it once everything is written. When there
are several processes, all of them make these calls, and an error in one is raised in all.

Input: a path, and what to write or read. Output: a directory, or the contents of one.
"""

from __future__ import annotations

import glob
import shutil
import threading
import uuid
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from tpu_embed._checks import local_path, message
from tpu_embed.io import files
from tpu_embed.io.checkpoint.items import handler
from tpu_embed.io.checkpoint.step_paths import SyncedPath
from tpu_embed.processes import check_same, gather_from_all, raise_on_all

_SAVING = threading.Lock()
"""Held during a save, so that a second save to the same path sees the first one's directory."""

_SHOWN = 3
"""How many checkpoints of a directory a message names."""
_UNFINISHED = ".orbax-checkpoint-tmp"
"""What orbax appends to the name of a directory while it fills it."""


def remove(path: Path) -> None:
    """Remove a checkpoint.

    It is renamed first, so that an interrupted removal never leaves half a checkpoint.
    """
    if jax.process_index() == 0:
        remove_unfinished(path.parent, path.name)
        left = path.with_name(f"{path.name}{_UNFINISHED}-removed")
        path.rename(left)
        files.sync(path.parent)
        shutil.rmtree(left)


def remove_unfinished(directory: Path, name: str | None = None) -> None:
    """Remove the temporary directories of unfinished saves: those of one checkpoint, or all."""
    if jax.process_index() == 0:
        start = "*" if name is None else glob.escape(name)
        for left in directory.glob(f"{start}{_UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)


def new_checkpoint(path: Path) -> str:
    """Return a unique name for a checkpoint; all processes call this and get the same one.

    Args:
      path: where the checkpoint will be.
    """
    # One key per path, so that saves to different paths do not mix up their exchanges.
    what = f"checkpoint/{zlib.crc32(str(path).encode()):08x}"
    return gather_from_all(what, uuid.uuid4().hex)[0]


def write_checkpoint(path: str | Path, args_of: Callable[..., ocp.args.Composite]) -> None:
    """Write a checkpoint; it appears complete, and is on disk when this returns.

    Args:
      path: a directory that does not exist yet.
      args_of: checks and returns what to write, given the `path` of the checkpoint and its
        name as `checkpoint`.

    Raises:
      ValueError: the path exists, or is a URL.
      Exception: whatever `args_of` raises; nothing has been written then.
    """
    path = local_path(path).absolute()

    def prepared() -> ocp.args.Composite:
        if path.exists():
            remedy = "remove it, or save elsewhere; CheckpointManager numbers its directories"
            raise ValueError(message("path", expected="no file", got=f"{path}", remedy=remedy))
        args = args_of(path=path, checkpoint=checkpoint)
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


def _numbered_inside(path: Path, items: Sequence[str]) -> str:
    """Return some of the checkpoints in a manager's directory, the latest first; "" if none."""
    found = path.iterdir() if path.is_dir() else ()
    names = [one.name for one in found if all((one / item).is_dir() for item in items)]
    shown = sorted(names, reverse=True)[:_SHOWN]
    return ", ".join(str(path / name) for name in shown)


def check_items(path: Path, items: Sequence[str], *, writer: str) -> None:
    """Check that a checkpoint is there, with some items.

    Raises:
      FileNotFoundError: it is not.
    """
    missing = [item for item in items if not (path / item).is_dir()]
    if missing:
        expected, got = f"a directory with {', '.join(items)}", f"none of {', '.join(missing)}"
        remedy = f"give the directory that {writer} wrote, which every process can reach"
        if inside := _numbered_inside(path, items):
            remedy = f"this one has the checkpoints of a manager: give one of {inside}"
        what = f"checkpoint {path}"
        raise FileNotFoundError(message(what, expected=expected, got=got, remedy=remedy))


def read_checkpoint(
    path: str | Path,
    items: Sequence[str],
    args_of: Callable[[Path], ocp.args.Composite],
    *,
    writer: str,
) -> Any:
    """Return the contents of a checkpoint, by item.

    Args:
      path: the checkpoint.
      items: the items that it must have.
      args_of: checks what can be checked before reading, and returns what to read, given the path.
      writer: the name of the function that writes such checkpoints, for messages.

    Raises:
      FileNotFoundError: there is no checkpoint, or it lacks an item.
      Exception: whatever `args_of` raises, and errors in reading files.
    """
    path = local_path(path).absolute()

    def prepared() -> ocp.args.Composite:
        check_items(path, items, writer=writer)
        return args_of(path)

    check_same("restore", f"{path}")
    args = raise_on_all("restore", path, prepared)
    with ocp.Checkpointer(handler()) as checkpointer:
        return checkpointer.restore(path, args=args)

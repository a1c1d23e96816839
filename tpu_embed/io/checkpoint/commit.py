"""Write, find and remove a checkpoint directory, which is either complete or absent.

    of an engine    tables, position, and model and touched if they were given
    of modules      layers, variables, position

A directory has a temporary name until all of its items are written and on disk, then its own. When
there are several processes, all of them make these calls, and an error in one is raised in all.

Input: a path, and what to write. Output: a directory, or what was found in one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from tpu_embed._checks import refuse
from tpu_embed.io.checkpoint import trees
from tpu_embed.io.commits import UNFINISHED, Parts, committer
from tpu_embed.io.store import Bucket, Place, place_of
from tpu_embed.processes import check_same, gather_from_all, raise_on_all

TABLES, MODEL = "tables", "model"
LAYERS, VARIABLES = "layers", "variables"
POSITION, TOUCHED = "position", "touched"

Begin = Callable[[Place], Callable[[], None]]
"""Copies what may change from now on, and returns what writes this process's files of an item.

It is given the directory of the item. Neither waits for other processes.
"""

_T = TypeVar("_T")
_SAVING = threading.Lock()
"""Held during a save, so that a second save to the same path sees the first one's directory."""

_SHOWN = 3
"""How many checkpoints of a directory a message names."""


def begin_checkpoint(
    path: Place, prepare: Callable[..., Mapping[str, Begin]]
) -> Callable[[], None]:
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
    how = committer(path)
    root = how.root(checkpoint[:12])
    parts: list[Parts] = []
    writes: list[Callable[[], None]] = []
    made: list[Place] = []

    def prepared():
        if how.find() is not None:
            refuse(
                "path",
                expected="no file",
                got=f"{path}",
                remedy="remove it, or save elsewhere; CheckpointManager numbers its directories",
            )
        items = prepare(path=path, checkpoint=checkpoint)
        if jax.process_index() == 0:
            how.begin(root)
            made.append(root)
        return items

    def begun():
        # The first process made it; another one that does not see it has another file system.
        if isinstance(root, Path) and not root.is_dir():
            refuse(
                f"checkpoint {path}",
                expected="a directory",
                got="none",
                remedy="give a path that every process can reach",
                error=FileNotFoundError,
            )
        for item, begin in items.items():
            (root / item).mkdir(exist_ok=True)  # every process makes it
            writes.append(begin(root / item))

    def written():
        # All end, whichever fails: nobody writes any more when the directory is removed.
        errors: list[Exception] = []
        while writes:
            try:
                writes.pop(0)()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def finished():
        if jax.process_index() == 0:
            for item in items.keys() & {MODEL, VARIABLES}:
                trees.finish(root / item, checkpoint)
            how.finish(root, parts)

    @contextlib.contextmanager
    def abandoned_on_error():
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception):  # Ctrl-C waits for nobody
                with contextlib.suppress(Exception):
                    written()
            for one in made:
                how.abandon(one)
            raise

    @abandoned_on_error()
    def go_on():
        raise_on_all("save", path, written)
        if isinstance(root, Bucket):
            parts.extend(gather_from_all(f"{what}/parts", root.written))
        raise_on_all("save", path, finished)

    with abandoned_on_error():
        items = raise_on_all("save", path, prepared)
        raise_on_all("save", path, begun)
    return go_on


def write_checkpoint(path: Any, prepare: Callable[..., Mapping[str, Begin]]) -> None:
    """Write a checkpoint; it appears complete, and is on disk when this returns.

    Args:
      path: as for `begin_checkpoint`, or the URL of a place in a bucket.
      prepare: as for `begin_checkpoint`.

    Raises:
      ValueError: the path exists, or is a URL of another scheme.
      Exception: whatever `prepare` raises; nothing has been written then.
    """
    place = place_of(path)
    with _SAVING:
        check_same("save", f"{place}")
        begin_checkpoint(place, prepare)()


def find_checkpoint(path: Any) -> Place:
    """Return where the parts of a checkpoint are read; all processes call this.

    Args:
      path: a path, or the URL of a place in a bucket.

    Raises:
      ValueError: the URL is of another scheme, or a commit is damaged.
    """
    place = place_of(path)
    if isinstance(place, Path):
        return place
    found = raise_on_all("restore", place, committer(place).find)
    return found or dataclasses.replace(place, parts={})


def check_items(path: Place, items: Sequence[str], *, writer: str) -> None:
    """Check that a checkpoint is there, with some items.

    Raises:
      FileNotFoundError: it is not.
    """
    unfinished = UNFINISHED in path.name
    missing = [item for item in items if unfinished or not (path / item).is_dir()]
    if missing:
        expected, got = (
            f"a directory with {', '.join(items)}",
            f"none of {', '.join(missing)}",
        )
        remedy = (
            f"give the directory that {writer} wrote, which every process can reach"
        )
        inside = [path / name for name in committer(path).names()]
        if isinstance(path, Path):
            inside = [
                one for one in inside if all((one / item).is_dir() for item in items)
            ]
        else:
            inside = [one for one in inside if one.name.isdecimal()]
        if inside:
            shown = ", ".join(sorted(map(str, inside), reverse=True)[:_SHOWN])
            remedy = f"this one has the checkpoints of a manager: give one of {shown}"
        refuse(
            f"checkpoint {path}",
            expected=expected,
            got=got,
            remedy=remedy,
            error=FileNotFoundError,
        )


def open_checkpoint(
    path: Place, items: Sequence[str], prepare: Callable[[], _T], *, writer: str
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

    def prepared():
        check_items(path, items, writer=writer)
        return prepare()

    check_same("restore", f"{path}")
    return raise_on_all("restore", path, prepared)

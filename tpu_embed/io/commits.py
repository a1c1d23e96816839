"""Directories that are there as a whole or not at all, on a disk and in a bucket.

What is to be in a place is written under another name. On a disk it is renamed when all of it is
written; in a bucket, where nothing can be renamed, a commit says what it consists of: one object,
written last, and only if it is not there yet.

    on a disk     run/20.orbax-checkpoint-tmp/…     until it is renamed: run/20/…
    in a bucket   run/20~1f0c…/…                    as run/begun/20~1f0c… says
                  run/commits/20.json               its root, and sizes and sums of its parts

Where parts of an earlier root have not changed, a commit shares them: it names their places, such
as 10~77ab…/tables/films/rows/…. So what a root holds is removed when no commit names it any more.

Input: the place that something is to have. Output: the place of its parts while they are written,
or when they are read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import itertools
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from tpu_embed._checks import message, refuse
from tpu_embed.io import files, schema
from tpu_embed.io.store import Bucket, Place, place_of

UNFINISHED = ".orbax-checkpoint-tmp"
"""What follows the name of a directory while it is filled, as when orbax did that."""

_BEGUN, _COMMITS = "begun", "commits"
_SWEEPING = b"sweeping"
"""What the mark of a writer says when its parts are being removed."""

_KIND, _FORMAT = "commit", 2
_REMEDY = "this commit is damaged: remove it, and take another one"
_ONE_WRITER = "one writer per directory: give another one"
_FORM = schema.record(
    root=schema.text,
    parts=schema.mapping(schema.naturals),
    shared=schema.texts,
)

Parts = Mapping[str, Any]
"""Size and CRC-32 by key, of what a process has put into a bucket; of what it shares, the place."""


def committer(place: Place) -> _OnDisk | _InBucket:
    """Return how something appears in a place; one process calls what changes anything."""
    return _InBucket(place) if isinstance(place, Bucket) else _OnDisk(place)


def find(path: Any) -> Place:
    """Return where the parts of something are read.

    Raises:
      FileNotFoundError: it is not there.
      ValueError: its commit is damaged, or there is no answer.
    """
    place = place_of(path)
    if isinstance(place, Path):
        return place
    root = committer(place).find()
    if root is None:
        refuse(
            f"{place}",
            expected="a commit",
            got="none",
            remedy="give the URL that it was written to",
            error=FileNotFoundError,
        )
    return root


def download(root: Bucket, folder: Path) -> Path:
    """Return a directory with all parts of something, which is kept in a folder.

    Args:
      root: where its parts are read.
      folder: the folder, in which it gets a name that nothing else has.

    Raises:
      OSError: no answer; other bytes than the commit says.
    """
    place = folder / root.name
    how = _OnDisk(place)
    temporary = how.root("")
    files.make_directory(folder)
    with files.locked(folder / ".lock"):  # other processes wait, and find it there
        if how.find() is not None:
            return place
        how.begin(temporary)
        try:
            for key in root.parts or ():
                file = temporary / key.removeprefix(f"{root.key}/")
                files.make_directory(file.parent)
                with files.create(file) as opened:
                    for some in dataclasses.replace(root, key=key).blocks():
                        opened.write(some)
            how.finish(temporary, [])
        except BaseException:
            how.abandon(temporary)
            raise
    return place


@final
@dataclasses.dataclass(frozen=True)
class _OnDisk:
    """How something appears in a place of a disk."""

    place: Path

    def root(self, token: str) -> Path:
        """Return where parts are written, under a token that nobody else uses."""
        return self.place.with_name(f"{self.place.name}{UNFINISHED}")

    def begin(self, root: Any) -> None:
        """Make room for the parts."""
        files.make_directory(self.place.parent)
        _OnDisk(self.place.parent).sweep(self.place.name)
        root.mkdir()

    def finish(self, root: Any, parts: Sequence[Parts]) -> None:
        """Have it appear, given what all processes have put there.

        Raises:
          FileExistsError: another writer was first.
        """
        files.sync_directories(root)
        files.rename(root, self.place)

    def abandon(self, root: Any) -> None:
        """Remove what has been written, after an error."""
        shutil.rmtree(root, ignore_errors=True)

    def find(self) -> Path | None:
        """Return where its parts are read; None if it is not there."""
        return self.place if self.place.exists() else None

    def remove(self) -> None:
        """Remove it, so that an interrupted removal leaves no half of it."""
        _OnDisk(self.place.parent).sweep(self.place.name)
        left = self.place.with_name(f"{self.place.name}{UNFINISHED}-removed")
        files.rename(self.place, left)
        shutil.rmtree(left)

    def names(self) -> list[str]:
        """Return the names of what has appeared inside of the place."""
        inside = self.place.iterdir() if self.place.is_dir() else ()
        return sorted(
            one.name for one in inside if one.is_dir() and UNFINISHED not in one.name
        )

    def sweep(self, name: str | None = None) -> None:
        """Remove what unfinished writers have left inside of the place: of one name, or all.

        In a bucket, all are those whose names are numbers: others may be about to export there.
        """
        patterns = [f"*{UNFINISHED}*"]
        if name is not None:  # also what `directory.written` has left
            start = glob.escape(name)
            patterns = [f"{start}{UNFINISHED}*", f".{start}.*"]
        for left in itertools.chain(*map(self.place.glob, patterns)):
            shutil.rmtree(left, ignore_errors=True)


def _roots(said: Mapping[str, Any]) -> list[str]:
    """Return the roots that a commit names: its own, and those of what it shares."""
    return sorted({name.partition("/")[0] for name in (said["root"], *said["shared"])})


def _is_of(root: str, name: str | None) -> bool:
    """Return whether a root is of a name; None: of a number."""
    writer = root.rpartition("~")[0]
    return writer == name or (name is None and writer.isdecimal())


def _swept(root: Place) -> str:
    return message(
        f"{root}", expected="its parts", got="none any more", remedy=_ONE_WRITER
    )


@final
@dataclasses.dataclass(frozen=True)
class _InBucket:
    """As `_OnDisk`, with a commit in place of the renaming."""

    place: Bucket

    def root(self, token: str) -> Bucket:
        return self._beside(f"{self.place.name}~{token}", written={})

    def begin(self, root: Place) -> None:
        self._mark(root.name).put(b"")

    def finish(self, root: Any, parts: Sequence[Parts]) -> None:
        if self._mark(root.name).get() in (None, _SWEEPING):
            if self._commit.exists():
                refuse(
                    f"{self.place}",
                    expected="none",
                    got="a commit",
                    remedy=_ONE_WRITER,
                    error=FileExistsError,
                )
            raise OSError(_swept(root))
        start, own = len(self._beside("").key), f"{root.name}/"
        named = {key[start:]: said for mine in parts for key, said in mine.items()}
        shared = sorted(name for name in named if not name.startswith(own))
        names = {name[len(own) :]: named[name] for name in named.keys() - {*shared}}
        root.written[self._commit.key] = []  # from now on it may be there
        try:
            value = {"root": root.name, "parts": names, "shared": shared}
            schema.write_with_crc(self._commit, _KIND, _FORMAT, value)
        except FileExistsError:
            del root.written[self._commit.key]
            raise
        # Who sweeps changes the mark, then looks for a commit: one of the two sees the other. A
        # mark goes last, so without one, what is shared may be gone already.
        marks = {one: self._mark(one).get() for one in _roots(value)}
        there = [
            f"{one}/{name}"
            for one in marks.keys() - {root.name}
            for name in self._beside(one).names()
        ]
        gone = any(
            not any(key.startswith(f"{one}/") for key in there) for one in shared
        )
        if gone or _SWEEPING in marks.values() or marks[root.name] is None:
            self._commit.remove()
            raise OSError(_swept(root))
        with contextlib.suppress(OSError):  # a later save removes what is left
            self._mark(root.name).remove()
            # Other writers of this name have lost, so what they have left is no use any more.
            _InBucket(self.place.parent).sweep(self.place.name)

    def abandon(self, root: Any) -> None:
        # A commit whose answer was lost may be there, or come yet: a later save looks for it.
        if self._commit.key not in root.written:
            with contextlib.suppress(OSError):
                self._clear(root.name)

    def find(self) -> Bucket | None:
        if (found := self._said()) is None:
            return None
        start = self._beside(found["root"]).key
        parts = {f"{start}/{name}": said for name, said in found["parts"].items()}
        return self._beside(found["root"], parts=parts)

    def _said(self) -> dict[str, Any] | None:
        """Return what the commit says; None if it is not there."""
        try:
            found = schema.read_with_crc(self._commit, _KIND, _FORMAT, _FORM, _REMEDY)
        except FileNotFoundError:
            return None
        for name in (found["root"], *found["parts"], *found["shared"]):
            if not {"", ".", ".."}.isdisjoint(name.split("/")) or "/" in found["root"]:
                refuse(
                    f"{self._commit}",
                    expected="names that lead nowhere else",
                    got=repr(name),
                    remedy=_REMEDY,
                )
        return found

    def remove(self) -> None:
        try:
            found = self._said()
            roots = [] if found is None else _roots(found)
        except ValueError:  # all that it may have named
            every = {name.partition("/")[0] for name in self.place.parent.names()}
            name = None if self.place.name.isdecimal() else self.place.name
            roots = [one for one in sorted(every) if _is_of(one, name)]
        for root in roots:  # where this is interrupted, a later save goes on
            self._mark(root).put(_SWEEPING)
        self._commit.remove()
        self._clear(*roots)

    def names(self) -> list[str]:
        return [name.removesuffix(".json") for name in (self.place / _COMMITS).names()]

    def sweep(self, name: str | None = None) -> None:
        for begun in (self.place / _BEGUN).names():
            if _is_of(begun, name):
                _InBucket(self.place / begun.rpartition("~")[0])._clear(begun)

    def _clear(self, *roots: str) -> None:
        """Remove the parts of writers, but for those that a commit names; their marks go last."""
        for root in roots:
            self._mark(root).put(_SWEEPING)
        beside, names = _InBucket(self.place.parent), [self.place.name]
        if self.place.name.isdecimal():  # only these share
            names += filter(str.isdecimal, beside.names())
        try:
            said = [_InBucket(beside.place / name)._said() for name in {*names}]
        except (
            ValueError
        ):  # who knows what a damaged commit shares: a later save goes on
            for root in roots:
                self._mark(root).put(b"")
            return
        named = {
            name
            for one in said
            if one is not None
            for name in (one["root"], *one["shared"])
        }
        for root in roots:
            if root not in named:
                start = f"{root}/"
                kept = (one[len(start) :] for one in named if one.startswith(start))
                self._beside(root).remove(kept)
            self._mark(root).remove()

    def _mark(self, root: str) -> Bucket:
        """Return the object that says that a writer has begun."""
        return self._beside(f"{_BEGUN}/{root}")

    @property
    def _commit(self) -> Bucket:
        return self._beside(f"{_COMMITS}/{self.place.name}.json")

    def _beside(self, name: str, **noted: Any) -> Bucket:
        bare = dataclasses.replace(self.place.parent / name, parts=None, written=None)
        return dataclasses.replace(bare, **noted)

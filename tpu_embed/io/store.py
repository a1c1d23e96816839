"""Places in buckets: objects of gs:// and s3://, by tensorstore's key-value stores.

A bucket has no folders: a folder is but the first part of the names of objects, and nothing can be
renamed. So what consists of several objects is written under a name of its own, and exists from the
moment that its commit is there: one object, written last, and only if it is not there yet.

    run/20~1f0c…/tables/tables.json     parts of step 20
    run/begun/20~1f0c…                  they are being written: left-overs are found by this
    run/commits/20.json                 step 20 is there: its root, and sizes and sums of its parts

A `Bucket` has what a `Path` has, as far as the two are used alike; it is no `os.PathLike`, so that
nothing can take it for a local folder named `gs:`.

Input: a URL, names, bytes. Output: objects, or their bytes, which are checked if a commit names
their sums.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import itertools
import os
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import tensorstore as ts

from tpu_embed._checks import is_url, refuse

DRIVERS = {"gs": "gcs", "s3": "s3"}

DEADLINE = 100.0
"""Seconds after which a request that was neither answered nor refused counts as failed."""

_RETRIES = {"max_retries": 6, "initial_delay": "200ms", "max_delay": "8s"}
"""Together about a quarter of a minute; tensorstore's own take a quarter of an hour."""

_BLOCK = 2**26
"""Bytes of one request. A file of more is written in pieces: S3 takes 5 GiB at a time."""

_AHEAD = 3
"""How many pieces are on their way while another one is made or used."""

_NEW = b"\x02"
"""The generation of an object that is not there."""

_REMEDY = "check the network, the credentials, and what they may do in the bucket"


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A place in a bucket.

    Attributes:
      bucket: the URL of the bucket, such as gs://models.
      key: the names of its objects, or the first part of them.
      context: tensorstore's context: retries and credentials.
      parts: size and CRC-32 by key, of what a commit names, and the number of its pieces if it has
        several, `key@0`, `key@1`, …; None: nothing is known.
      written: collects the same of what is put here; None: nobody asks.
    """

    bucket: str
    key: str
    context: ts.Context = dataclasses.field(compare=False, repr=False)
    parts: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False)
    written: dict[str, Any] | None = dataclasses.field(default=None, compare=False)

    def __str__(self) -> str:
        """Return the URL."""
        return f"{self.bucket}/{self.key}"

    def __truediv__(self, name: str) -> Bucket:
        """Return the place of a name in this one."""
        return dataclasses.replace(self, key=f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Bucket:
        """The place above."""
        return dataclasses.replace(self, key=self.key.rpartition("/")[0])

    def absolute(self) -> Bucket:
        """Return itself."""
        return self

    def mkdir(self, **_: Any) -> None:
        """Do nothing: there are no folders."""

    def is_dir(self) -> bool:
        """Return whether a commit names something in this place."""
        return any(key.startswith(f"{self.key}/") for key in self.parts or ())

    def exists(self) -> bool:
        """Return whether there is an object of this name; what a commit names is not asked for."""
        return (
            self.key in self.parts if self.parts is not None else self.get() is not None
        )

    def get(self) -> bytes | None:
        """Return the bytes of the object, whatever a commit says of it; None if there is none."""
        found = wait(self._store.read(self.key), self)
        return found.value if found.state == "value" else None

    def read_bytes(self) -> bytes:
        """Return the bytes of the object.

        Raises:
          FileNotFoundError: there is none.
          OSError: no answer; other bytes than a commit says.
        """
        if self.key in (self.parts or {}):
            whole = io.BytesIO()
            whole.writelines(self.blocks())
            return whole.getvalue()
        return self.bytes_of(self._store.read(self.key))

    def blocks(self) -> Iterator[bytes]:
        """Yield the bytes of an object that a commit names, some at a time.

        Raises:
          FileNotFoundError, OSError: as for `read_bytes`, perhaps after all of them.
        """
        (size, crc32, *count), store = (self.parts or {})[self.key], self._store
        if count:
            reads = (store.read(self._piece(n)) for n in range(count[0]))
        else:
            ranges = (slice(n, min(n + _BLOCK, size)) for n in range(0, size, _BLOCK))
            reads = (store.read(self.key, byte_range=each) for each in ranges)
        waiting, found = collections.deque(itertools.islice(reads, _AHEAD)), [0, 0]
        while waiting:
            some = self.bytes_of(waiting.popleft())
            waiting.extend(itertools.islice(reads, 1))
            found = [found[0] + len(some), zlib.crc32(some, found[1])]
            yield some
        if found != [size, crc32]:
            refuse(
                f"{self}",
                expected=f"size and CRC-32 {[size, crc32]}, as its commit says",
                got=f"{found}",
                error=OSError,
            )

    def put(self, data: bytes, *, new: bool = False) -> None:
        """Write the object.

        Args:
          data: its bytes.
          new: whether it must not be there yet.

        Raises:
          FileExistsError: another writer has put it there.
          OSError: no answer.
        """
        condition = {"if_equal": _NEW} if new else {}
        stamp = wait(self._store.write(self.key, data, **condition), self)
        # An answer may be lost, and the request is repeated: then our own bytes are there.
        if new and not stamp.generation and self.get() != data:
            refuse(
                f"{self}",
                expected="none",
                got="one of another writer",
                remedy="one writer per directory: give another one, or another step",
                error=FileExistsError,
            )
        if self.written is not None:
            self.written[self.key] = [len(data), zlib.crc32(data)]

    def names(self) -> list[str]:
        """Return the names of the objects in this place, sorted."""
        start = len(f"{self.key}/".encode())
        inside = ts.KvStore.KeyRange(f"{self.key}/", f"{self.key}0")
        found = wait(self._store.list(inside, strip_prefix_length=start), self)
        return sorted(name.decode() for name in found)

    def remove(self, kept: Iterable[str] = ()) -> None:
        """Remove all objects in this place, and that of its name.

        Args:
          kept: names in it, of which none is in another one: what is in these places stays.
        """
        # Of a/b in a, what is in [a/, a/b/) and in [a/b0, a0) goes: "0" is the character after "/".
        inside = sorted(f"{self.key}/{name}/" for name in kept)
        begins = [f"{self.key}/", *(f"{one[:-1]}0" for one in inside)]
        for begin, end in zip(begins, [*inside, f"{self.key}0"], strict=True):
            wait(self._store.delete_range(ts.KvStore.KeyRange(begin, end)), self)
        wait(self._store.write(self.key, None), self)

    @property
    def spec(self) -> dict[str, Any]:
        """What tensorstore needs to know of this place."""
        return {**self._root, "path": f"{self.key}/"}

    @property
    def _root(self) -> dict[str, Any]:
        scheme, _, bucket = self.bucket.partition("://")
        spec: dict[str, Any] = {"driver": DRIVERS[scheme], "bucket": bucket}
        if scheme == "s3":
            get = os.environ.get
            given = {
                "endpoint": get("AWS_ENDPOINT_URL_S3") or get("AWS_ENDPOINT_URL"),
                "aws_region": get("AWS_REGION") or get("AWS_DEFAULT_REGION"),
            }
            spec |= {name: value for name, value in given.items() if value}
        return spec

    @property
    def _store(self) -> ts.KvStore:
        return wait(ts.KvStore.open(self._root, context=self.context), self)

    def bytes_of(self, read: ts.Future) -> bytes:
        """Return what a request for an object has brought, of this name or one inside.

        Raises:
          FileNotFoundError, OSError: as for `read_bytes`.
        """
        found = wait(read, self)
        if found.state != "value":
            refuse(f"{self}", expected="an object", got="none", error=FileNotFoundError)
        return found.value

    def _piece(self, number: int) -> str:
        return f"{self.key}@{number}"

    def begin_piece(self, number: int, data: bytes) -> ts.Future:
        """Begin to write a piece of the file."""
        return self._store.write(self._piece(number), data)


@final
class NewFile:
    """Takes the bytes of a file in a bucket: of one object, or of pieces if they are many.

    Args:
      place: of the file.
    """

    def __init__(self, place: Bucket) -> None:
        self._place, self._left, self._pieces = place, bytearray(), list[ts.Future]()
        self._said = [0, 0]

    def __enter__(self) -> NewFile:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Write what is left; after an error, end without it."""
        if kind is None:
            self.close()
        else:
            settle(self._pieces)

    def write(self, data: bytes) -> int:
        """Take more bytes; those of some pieces may be under way."""
        self._left += data
        self._said = [self._said[0] + len(data), zlib.crc32(data, self._said[1])]
        # A commit, whose number of pieces nobody would tell, is one object.
        while len(self._left) > _BLOCK and self._place.written is not None:
            self._begin_piece()
        return len(data)

    def close(self) -> None:
        """Write what is left, and wait until all bytes are there.

        Raises:
          FileExistsError: the file is there, as one object.
          OSError: no answer.
        """
        if not self._pieces:
            self._place.put(bytes(self._left), new=True)
            return
        try:
            self._begin_piece()
            for piece in self._pieces:
                wait(piece, self._place)
        except BaseException:
            settle(self._pieces)
            raise
        assert self._place.written is not None
        self._place.written[self._place.key] = [*self._said, len(self._pieces)]

    def _begin_piece(self) -> None:
        number = len(self._pieces)
        if number >= _AHEAD:
            wait(self._pieces[number - _AHEAD], self._place)
        self._pieces.append(self._place.begin_piece(number, bytes(self._left[:_BLOCK])))
        del self._left[:_BLOCK]


Place = Path | Bucket
"""Where something is written or read."""


def place_of(path: Any, what: str = "path") -> Place:
    """Return the place of a path or URL.

    Args:
      path: a path of a file system, or a URL of gs:// or s3://.
      what: the argument, for messages.

    Raises:
      ValueError: a URL of another scheme, or without a name in the bucket.
    """
    if isinstance(path, Bucket):
        return path
    text = os.fspath(path)
    found = re.fullmatch(r"(gs|s3)://([^/]+)/([^/].*?)/*", text)
    if found is None and is_url(text):
        refuse(
            what,
            expected="a path, or a URL such as gs://bucket/name or s3://bucket/name",
            got=repr(text),
        )
    if found is None:
        return Path(text).absolute()
    scheme, bucket, key = found.groups()
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if emulator and scheme == "gs":
        # tensorstore asks for another name, and neither its specs nor its contexts take an address.
        url = emulator if "://" in emulator else f"http://{emulator}"
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", url)
    context = ts.Context({f"{DRIVERS[scheme]}_request_retries": _RETRIES})
    return Bucket(f"{scheme}://{bucket}", key, context)


def wait(future: ts.Future, place: Place) -> Any:
    """Return the result of a request of tensorstore.

    Raises:
      OSError: of a bucket, no answer, or a refusal.
      Exception: of a file system, whatever tensorstore raises.
    """
    if isinstance(place, Path):
        return future.result()
    try:
        return future.result(timeout=DEADLINE)
    except TimeoutError:
        future.cancel()
        got = f"none in {DEADLINE:.0f} s"
    except Exception as error:
        got = f"{error}"
    refuse(f"{place}", expected="an answer", got=got, remedy=_REMEDY, error=OSError)


def settle(writes: Iterable[ts.Future]) -> None:
    """Wait until no write is under way, after an error: what is there can then be removed."""
    end = time.monotonic() + DEADLINE
    for one in writes:
        with contextlib.suppress(Exception):  # the first error is on its way already
            one.result(timeout=max(0, end - time.monotonic()))

"""File-system helpers: safe file names, writes that survive a crash, errors that name the file.

The system first keeps a written file in memory. Its bytes are on disk once the file is synced
(`fsync`), and its name is on disk once its directory is synced too.

Input: names of tables and slots, paths. Output: file names; files; their bytes and checksums, or an
error that names the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tpu_embed._checks import refuse
from tpu_embed.io.store import Bucket, NewFile, Place

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None

_PLAIN = re.compile("[a-z0-9_][a-z0-9_-]{0,63}")
"""Names that can be used unchanged as file names on every file system."""

_READABLE = 40
"""How many characters of any other name its file name begins with."""

_BLOCK = 2**20
"""Bytes of a file that are held in memory at a time."""


def file_name(name: str) -> str:
    """Return the file name of a table or slot: short, unique, without "/" and ".".

    A name of at most 64 lower-case letters, digits, "_" and "-" is its own file name. For any other
    name it is a readable beginning and 16 digits of the SHA-256, so that names which differ only in
    case also differ on file systems that ignore case.

    Example:
      >>> file_name("films"), file_name("users.v1/eu")
      ('films', 'users-v1-eu~a4480370e732c8e2')
    """
    if _PLAIN.fullmatch(name):
        return name
    readable = re.sub("[^a-z0-9_]+", "-", name.lower())[:_READABLE]
    return f"{readable}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"


# -- writing ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def create(path: Place) -> Iterator[BinaryIO | NewFile]:
    """Open a new file for writing; when the block ends, its bytes are on disk, or in the bucket."""
    if isinstance(path, Bucket):
        with NewFile(path) as new:
            yield new
        return
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents, and sync their names to disk."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other callers waiting, in this process and in others, by the system's lock of a file."""
    with path.open("ab") as file:
        with contextlib.suppress(OSError):  # some file systems have none
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sync(path: Path) -> None:
    """Sync to disk the bytes of a file, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directories(root: Path) -> None:
    """Sync to disk the names in a directory and in all directories below it."""
    for directory, _, _ in os.walk(root):
        sync(Path(directory))


def rename(path: Path, new: Path) -> None:
    """Rename a file or directory within a directory, and sync its new name to disk."""
    path.rename(new)
    sync(new.parent)


# -- reading ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def name_errors(path: Place, remedy: str) -> Iterator[None]:
    """Turn system errors about a file into errors that name the file and a remedy.

    Raises:
      FileNotFoundError: the file is missing.
      ValueError: the file cannot be read, for example because it is a directory.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        refuse(
            f"{path}",
            expected="a file",
            got="none",
            remedy=remedy,
            error=FileNotFoundError,
            cause=error,
        )
    except OSError as error:
        refuse(
            f"{path}",
            expected="a file that can be read",
            got=f"{error.strerror or error}",
            remedy=remedy,
            cause=error,
        )


def read(path: Place, remedy: str) -> bytes:
    """Return the bytes of a file.

    Raises:
      FileNotFoundError: the file is missing.
      ValueError: the file cannot be read.
      OSError: of a bucket, no answer, or other bytes than a commit says.
    """
    if isinstance(path, Bucket):
        return path.read_bytes()  # whose errors say it all
    with name_errors(path, remedy):
        return path.read_bytes()


def checksum(path: Place, remedy: str) -> int:
    """Return the CRC-32 of a file's bytes.

    Raises:
      FileNotFoundError: the file is missing.
      ValueError: the file cannot be read.
    """
    found = 0
    if isinstance(path, Bucket):
        return zlib.crc32(path.read_bytes())
    with name_errors(path, remedy), path.open("rb") as file:
        while block := file.read(_BLOCK):
            found = zlib.crc32(block, found)
    return found

"""The directory of an exported model: names, sizes and order of its files; all or nothing.

Enters: a program, tables, and what `metadata.json` says. Leaves: files, or the same read back and
judged. Called by `export.py` and `served.py`; `delta.py` and `delta_files.py` take its parts.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import urllib.parse
import uuid
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tpu_embed._checks import message
from tpu_embed.core.structure import Structure
from tpu_embed.io import checksums
from tpu_embed.io.stored import Stored

__all__ = [
    "FORMAT",
    "METADATA",
    "check_free",
    "check_size",
    "read_array",
    "read_json",
    "read_metadata",
    "read_program",
    "write",
    "write_arrays",
    "written",
]

FORMAT = 2
"""The version of the directory's form."""

METADATA, PROGRAM = "metadata.json", "model.stablehlo"

_REMEDY = "export the model again, or copy the directory whole"


def check_free(root: Path) -> None:
    """Refuse a path where something is.

    Raises:
      FileExistsError: something is.
    """
    if root.exists() or root.is_symlink():
        remedy = "remove it, or give each version a directory of its own"
        raise FileExistsError(message(f"{root}", expected="nothing", got="a file", remedy=remedy))


@contextlib.contextmanager
def written(root: Path) -> Iterator[Path]:
    """Give a new directory beside `root`; rename it to `root` at the end, or remove it."""
    temporary = root.absolute().parent / f".{root.name}.{uuid.uuid4().hex}"
    temporary.mkdir(parents=True)
    try:
        yield temporary
        check_free(root)
        temporary.rename(root)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write(
    root: Path,
    program: bytes,
    tables: Mapping[str, Stored],
    declared: Structure,
    described: Mapping[str, Any],
) -> None:
    """Write all files of a model.

    Args:
      root: an empty directory.
      program: the serialized one.
      tables: by name, as NumPy arrays.
      declared: the feature configuration.
      described: what else `metadata.json` says.
    """
    (root / PROGRAM).write_bytes(program)
    (root / "tables").mkdir()
    configs = dict(zip(declared.table_names, declared.tables, strict=True))
    metadata = {
        "jax": jax.__version__,
        "program": {"file": PROGRAM, "bytes": len(program), "crc32": zlib.crc32(program)},
        "tables": {
            name: {
                "vocabulary_size": configs[name].vocabulary_size,
                "dim": configs[name].dim,
                "dtype": configs[name].dtype,
                "files": write_arrays(root, name, table.arrays),
            }
            for name, table in tables.items()
        },
        **described,
    }
    checked = {"format": FORMAT, "crc32": checksums.of_json(metadata), **metadata}
    (root / METADATA).write_text(json.dumps(checked, indent=1) + "\n")


def write_arrays(root: Path, name: str, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Write the arrays of one table; return the form of each file.

    Args:
      root: has a directory `tables`.
      name: of the table.
      arrays: by part.
    """
    stem = urllib.parse.quote(name, safe="").replace(".", "%2E")
    files = {}
    for part, array in arrays.items():
        file = f"tables/{stem}.{part}.npy"
        np.save(root / file, array, allow_pickle=False)
        files[part] = {
            "file": file,
            "shape": list(array.shape),
            "dtype": str(array.dtype),
            "bytes": (root / file).stat().st_size,
        }
    return files


def read_metadata(root: Path) -> dict[str, Any]:
    """Return what `metadata.json` of a model says.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is damaged, or of another version.
    """
    metadata = read_json(root / METADATA, FORMAT, _REMEDY)
    what = f"{root / METADATA}"
    if "program" not in metadata:
        remedy = "load_model takes what export_model wrote"
        raise ValueError(message(what, expected="a model", got="none", remedy=remedy))
    said = {key: value for key, value in metadata.items() if key not in ("format", "crc32")}
    if metadata.get("crc32") != checksums.of_json(said):
        expected, got = "what export_model wrote", "something else"
        raise ValueError(message(what, expected=expected, got=got, remedy=_REMEDY))
    return metadata


def read_json(file: Path, version: int, remedy: str) -> dict[str, Any]:
    """Return a JSON object that names the version of its form.

    Args:
      file: the file.
      version: the one that is read.
      remedy: for one that is missing or damaged.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is damaged, or of another version.
    """
    try:
        metadata = json.loads(_bytes(file, remedy))
        found = metadata["format"]
    except (ValueError, TypeError, KeyError) as error:
        expected, got = "a JSON object with its format", "something else"
        raise ValueError(message(f"{file}", expected=expected, got=got, remedy=remedy)) from error
    if found != version:
        expected, remedy = f"{version}", "read it with the tpu_embed that wrote it, or export again"
        raise ValueError(
            message(f"{file}: format", expected=expected, got=f"{found}", remedy=remedy)
        )
    return metadata


def read_program(root: Path, described: Mapping[str, Any]) -> bytes:
    """Return the serialized program.

    Raises:
      FileNotFoundError: it is missing.
      ValueError: its size or checksum is another.
    """
    file = root / described["file"]
    check_size(file, described)
    program = _bytes(file, _REMEDY)
    if zlib.crc32(program) != described["crc32"]:
        expected, got = f"checksum {described['crc32']}", f"{zlib.crc32(program)}"
        raise ValueError(message(f"{file}", expected=expected, got=got, remedy=_REMEDY))
    return program


def read_array(root: Path, described: Mapping[str, Any], remedy: str = _REMEDY) -> np.ndarray:
    """Return one array of a table, memory-mapped.

    Args:
      root: the directory.
      described: the form of its file.
      remedy: for one that is missing or damaged.

    Raises:
      FileNotFoundError: it is missing.
      ValueError: its size, shape or dtype is another.
    """
    file = root / described["file"]
    check_size(file, described, remedy)
    expected = f"{described['dtype']} of shape {tuple(described['shape'])}"
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
        got = f"{array.dtype} of shape {array.shape}"
    except (ValueError, EOFError, OSError) as error:
        got = f"no array ({error})"
        raise ValueError(message(f"{file}", expected=expected, got=got, remedy=remedy)) from error
    if got != expected:
        raise ValueError(message(f"{file}", expected=expected, got=got, remedy=remedy))
    return array


def check_size(file: Path, described: Mapping[str, Any], remedy: str = _REMEDY) -> None:
    """Check the size of a file.

    Raises:
      FileNotFoundError: it is missing.
      ValueError: its size is another.
    """
    size = file.stat().st_size if file.exists() else None
    if size is None:
        raise _missing(file, remedy)
    if size != described["bytes"]:
        expected = f"{described['bytes']} bytes"
        raise ValueError(message(f"{file}", expected=expected, got=f"{size}", remedy=remedy))


def _bytes(file: Path, remedy: str) -> bytes:
    try:
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing(file, remedy) from error


def _missing(file: Path, remedy: str) -> FileNotFoundError:
    return FileNotFoundError(message(f"{file}", expected="a file", got="none", remedy=remedy))

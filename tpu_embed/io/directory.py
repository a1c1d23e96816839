"""A directory of arrays with a `metadata.json` that describes every file: an export or a delta.

The directory is either complete and on disk, or absent. The metadata has the size and checksum of
every file. The place of a file follows from the name of its table: the path in the metadata is
checked but never followed, so that damaged metadata cannot lead to another file.

Input: arrays by table and part, and further metadata. Output: files, or the arrays read back,
memory-mapped and checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import reprlib
import uuid
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from tpu_embed._checks import refuse
from tpu_embed.io import files, schema
from tpu_embed.io.commits import committer
from tpu_embed.io.schema import Json
from tpu_embed.io.store import Bucket, Place
from tpu_embed.vocabulary import DynamicVocabulary

ArrayForms = dict[str, tuple[str, tuple[int, ...]]]
"""By part, the dtype and the shape of an array."""

FORMAT = 4
"""The version of the directory format."""

METADATA = "metadata.json"

_SUM = {"bytes": schema.natural, "crc32": schema.natural}

FILE = schema.record(file=schema.text, **_SUM)
"""The schema of the description of a file."""

ARRAY = schema.record(
    file=schema.text, shape=schema.naturals, dtype=schema.dtype, **_SUM
)
"""The schema of the description of an array."""

TABLE = schema.record(
    vocabulary_size=schema.integer(1, 2**63),
    dim=schema.integer(1),
    dtype=schema.choice("float32", "bfloat16", "float64"),
    unseen=schema.optional(schema.choice("zero", "shared", "initial")),
    files=schema.mapping(ARRAY),
)
"""The schema of the description of a table.

`unseen` is null if its ids are row numbers; otherwise they are keys, and it says what those without
a row get. Its files are listed by part, such as "values".
"""

VERSION = schema.record(
    run=schema.text, step=schema.natural, edits=schema.natural, keys=schema.natural
)
"""The schema of a `Version`."""


def check_free(root: Place) -> None:
    """Check that nothing exists at a path.

    Raises:
      FileExistsError: something does.
    """
    if committer(root).find() is not None or (
        isinstance(root, Path) and root.is_symlink()
    ):
        refuse(
            f"{root}",
            expected="nothing",
            got="a file",
            remedy="remove it, or give each version a directory of its own",
            error=FileExistsError,
        )


@contextlib.contextmanager
def written(root: Place) -> Iterator[Place]:
    """Yield a new temporary directory beside `root`; it appears as `root` at the end.

    After an error the temporary directory is removed instead. Files are synced when they are
    written, and directories before the renaming, so that everything is on disk when this ends; in a
    bucket a commit makes it appear.
    """
    how, token = committer(root), uuid.uuid4().hex
    if isinstance(root, Bucket):
        temporary = how.root(token)
        how.begin(temporary)
    else:
        files.make_directory(root.absolute().parent)
        temporary = root.absolute().parent / f".{root.name[:40]}.{token}"
        temporary.mkdir()
    try:
        yield temporary
        check_free(root)
        how.finish(
            temporary,
            [temporary.written or {}] if isinstance(temporary, Bucket) else [],
        )
    except BaseException:
        how.abandon(temporary)
        raise


# -- files -----------------------------------------------------------------------------------------


def describe_file(root: Place, file: str) -> Json:
    """Return the description of a file for the metadata.

    Args:
      root: the directory.
      file: the path of the file, relative to it.
    """
    path = root / file
    if isinstance(path, Bucket):
        size, crc32, *_ = (path.written or {})[path.key]
        return {"file": file, "bytes": size, "crc32": crc32}
    return {
        "file": file,
        "bytes": path.stat().st_size,
        "crc32": files.checksum(path, ""),
    }


def check_file(
    root: Place, file: str, described: Json, remedy: str, *, whole: bool = True
) -> Any:
    """Check that a file is as the metadata describes it, and return its path.

    Args:
      root: the directory.
      file: the path of the file, relative to it.
      described: its description in the metadata.
      remedy: the remedy for messages about a missing or damaged file.
      whole: whether to read every byte for the checksum; otherwise only the size is compared.

    Raises:
      FileNotFoundError: the file is missing.
      ValueError: its place, size or checksum differs; it is a link that leads out of the directory.
    """
    path = _inside(root, file, remedy)
    if described["file"] != file:
        refuse(
            f"{root / METADATA}: file",
            expected=repr(file),
            got=reprlib.repr(described["file"]),
            remedy=remedy,
        )
    if isinstance(path, Bucket):
        return path  # whoever reads it compares the sum that the commit has
    with files.name_errors(path, remedy):
        size = path.stat().st_size
    if size != described["bytes"]:
        refuse(
            f"{path}",
            expected=f"{described['bytes']} bytes",
            got=f"{size}",
            remedy=remedy,
        )
    got = files.checksum(path, remedy) if whole else described["crc32"]
    if got != described["crc32"]:
        refuse(
            f"{path}",
            expected=f"checksum {described['crc32']}",
            got=f"{got}",
            remedy=remedy,
        )
    return path


def _inside(root: Any, file: str, remedy: str) -> Any:
    """Return the path of a file, after checking that no link leads out of the directory."""
    path = root / file
    if isinstance(path, Bucket):
        return path
    found = os.path.realpath(path)
    if not Path(found).is_relative_to(os.path.realpath(root)):
        refuse(
            f"{path}",
            expected=f"a file inside {root}",
            got=f"a link to {found}",
            remedy=remedy,
        )
    return path


# -- metadata --------------------------------------------------------------------------------------


def write_metadata(root: Place, kind: str, value: Json) -> None:
    """Write the metadata of a kind of directory."""
    schema.write_with_crc(root / METADATA, kind, FORMAT, value, indent=1)


def read_metadata(root: Place, kind: str, form: schema.Form, remedy: str) -> Json:
    """Return the metadata of a directory.

    Args:
      root: the directory.
      kind: the kind of directory that it must be.
      form: the schema that the metadata must match.
      remedy: the remedy for messages about missing or damaged metadata.

    Raises:
      FileNotFoundError: the metadata is missing.
      ValueError: it is damaged, of another format or kind, or does not match the schema.
    """
    return schema.read_with_crc(
        _inside(root, METADATA, remedy), kind, FORMAT, form, remedy
    )


# -- arrays ----------------------------------------------------------------------------------------


def _array_file(name: str, part: str) -> str:
    return f"tables/{files.file_name(name)}.{part}.npy"


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """A table with its declaration: all of its rows, or what has changed.

    Attributes:
      vocabulary_size, dim, dtype: of its `TableConfig`.
      unseen: what keys without a row get; None if its ids are row numbers.
      arrays: NumPy arrays by part, bfloat16 as its bits in uint16.
    """

    vocabulary_size: int
    dim: int
    dtype: str
    unseen: str | None
    arrays: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, described: Json, arrays: Mapping[str, np.ndarray]) -> Table:
        """Return the table that the metadata describes, with its arrays."""
        names = ("vocabulary_size", "dim", "dtype", "unseen")
        return cls(**{name: described[name] for name in names}, arrays=arrays)

    @property
    def has_keys(self) -> bool:
        """Whether its ids are keys."""
        return self.unseen is not None

    @property
    def form(self) -> str:
        """What it is in words: what changes of a table must be, to be applied to it.

        How many keys a table may have is not part of it, because tables may grow.
        """
        size = "keys" if self.has_keys else f"{self.vocabulary_size}"
        return f"{self.dtype} [{size}, {self.dim}]" + (
            f", unseen={self.unseen!r}" if self.has_keys else ""
        )


def rule_without_row(rules: DynamicVocabulary | None) -> str:
    """Return what keys without a row get: by their rules; None: ids of a table on the host."""
    return "initial" if rules is None else rules.unseen


def write_tables(root: Place, tables: Mapping[str, Table]) -> Json:
    """Write the arrays of all tables; return the descriptions of the tables for the metadata.

    Args:
      root: an empty directory.
      tables: by name.
    """
    (root / "tables").mkdir()
    described = {}
    for name, table in tables.items():
        declared = dict(vars(table))
        arrays = write_arrays(root, name, declared.pop("arrays"))
        described[name] = {**declared, "files": arrays}
    return described


def write_arrays(root: Place, name: str, arrays: Mapping[str, np.ndarray]) -> Json:
    """Write the arrays of one table; return their descriptions for the metadata.

    Args:
      root: a directory in which there is one named "tables".
      name: the name of the table.
      arrays: by part.
    """
    described = {}
    for part, array in arrays.items():
        file = _array_file(name, part)
        with files.create(root / file) as opened:
            np.save(opened, array, allow_pickle=False)
        form = {"shape": list(array.shape), "dtype": str(array.dtype)}
        described[part] = describe_file(root, file) | form
    return described


def count_of(files: Json, part: str) -> int:
    """Return the first dimension of an array, as the metadata has it; 0 if there is none."""
    return next(iter(files.get(part, {}).get("shape", ())), 0)


def ascend(numbers: np.ndarray) -> bool:
    """Return whether numbers `[n]` ascend, so that all are different."""
    return bool((numbers[1:] > numbers[:-1]).all())


def read_arrays(
    root: Place,
    name: str,
    described: Json,
    forms: ArrayForms,
    remedy: str,
    *,
    whole: bool = True,
) -> dict[str, np.ndarray]:
    """Return the arrays of one table by part, memory-mapped.

    Args:
      root: the directory.
      name: the name of the table.
      described: their descriptions in the metadata.
      forms: the dtype and shape that each part must have.
      remedy: the remedy for messages about a missing or damaged file.
      whole: as for `check_file`.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: the parts, or the shape or dtype of one, differ; whatever `check_file` refuses.
    """
    said = {
        part: (one["dtype"], tuple(one["shape"])) for part, one in described.items()
    }
    if said != forms:
        refuse(
            f"{root / METADATA}: table {name!r}",
            expected=f"{forms}",
            got=f"{said}",
            remedy=remedy,
        )
    arrays = {}
    for part, one in described.items():
        path = check_file(root, _array_file(name, part), one, remedy, whole=whole)
        arrays[part] = _array(path, *forms[part], remedy)
    return arrays


def _array(path: Any, dtype: str, shape: tuple[int, ...], remedy: str) -> np.ndarray:
    """Return the array of a file, memory-mapped unless it is in a bucket."""
    expected = f"{dtype} of shape {shape}"
    file = BytesIO(files.read(path, remedy)) if isinstance(path, Bucket) else path
    try:
        is_read = isinstance(file, BytesIO)
        array = np.load(file) if is_read else np.lib.format.open_memmap(file, mode="r")
        got = f"{array.dtype} of shape {array.shape}"
    except Exception as error:  # NumPy parses the header as Python
        refuse(
            f"{path}",
            expected=expected,
            got=f"no array ({error})",
            remedy=remedy,
            cause=error,
        )
    if got != expected:
        refuse(f"{path}", expected=expected, got=got, remedy=remedy)
    return array

"""One zarr array of rows on disk, whose every file is known by its checksum.

A table in S shards is an array `[⌈V/S⌉, S, …]` if its rows alternate between shards (MOD), or
`[S, ⌈V/S⌉, …]` if each shard has its rows in one piece (DIV): flattened, both are the rows in
logical order, padding last.

Every chunk is a file that ends with the CRC-32C of its bytes, which tensorstore checks. That shows
a damaged chunk, not one that is whole and stands in the place of another. So whoever writes a chunk
keeps its checksum, and whoever reads it compares the two before its bytes are read.

Input: blocks of rows and their places, or checksums by file name. Output: files and their
checksums, or rows.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from tpu_embed._checks import message
from tpu_embed.io import files

__all__ = ["BLOCK", "RowArray", "RowReader", "RowWriter"]

BLOCK = 2**22
"""Bytes that are written or read at a time."""

AT_ONCE = 4
"""Blocks that are on their way to the disk at a time."""

Place = tuple[slice, slice]
"""A part of an array: of its two first dimensions, those of shards and of rows."""

_METADATA = "zarr.json"
_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
_SUM_BYTES = 4
_KEYS = {"name": "default", "configuration": {"separator": "."}}
"""Of chunks: all of them are files of one directory, `c.0.0.0` and so on."""


@dataclasses.dataclass(frozen=True)
class RowArray:
    """One zarr array of rows.

    Attributes:
      path: its directory.
      shards: S.
      rows_per_shard: ⌈V/S⌉.
      alternate: whether rows alternate between the shards (MOD), or lie in pieces (DIV).
      row: shape of a row.
      dtype: logical.
    """

    path: Path
    shards: int
    rows_per_shard: int
    alternate: bool
    row: tuple[int, ...]
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        size = (self.shards, self.rows_per_shard)
        return (*(size[::-1] if self.alternate else size), *self.row)

    @property
    def block(self) -> int:
        """Rows of a shard that are written or read at a time."""
        return max(1, min(self.rows_per_shard, self._rows_of_block()))

    def _rows_of_block(self) -> int:
        width = int(np.prod(self.row, dtype=np.int64)) * self.dtype.itemsize
        return BLOCK // max(1, width * (self.shards if self.alternate else 1))

    def create(self, shards_together: int) -> ts.TensorStore:
        """Make the array; every process may call it.

        Args:
          shards_together: shards whose rows one process writes, side by side.
        """
        chunk = (self.block, shards_together) if self.alternate else (1, self.block)
        grid = {"name": "regular", "configuration": {"chunk_shape": (*chunk, *self.row)}}
        metadata = self._metadata() | {"chunk_grid": grid, "chunk_key_encoding": _KEYS}
        options = {"open": True, "create": True, "store_data_equal_to_fill_value": True}
        return ts.open(self._spec() | {"metadata": metadata} | options).result()

    def open(self) -> ts.TensorStore:
        """Open the array for reading.

        Raises:
          ValueError: it is not there, or of another form.
        """
        options = {"metadata": self._metadata(), "fill_missing_data_reads": False}
        return ts.open(self._spec() | options).result()

    def _metadata(self) -> dict[str, Any]:
        return {"shape": self.shape, "data_type": self.dtype.name, "codecs": _CODECS}

    def _spec(self) -> dict[str, Any]:
        kvstore = {"driver": "file", "path": f"{self.path}/"}
        return {"driver": "zarr3", "kvstore": kvstore}


class RowWriter:
    """Chunks of an array on their way to the disk, a few at a time.

    Args:
      array: the array; every process may make it.
      shards_together: shards whose rows one process writes, side by side.
    """

    def __init__(self, array: RowArray, shards_together: int) -> None:
        self._array, self._store = array, array.create(shards_together)
        self._writing: collections.deque[tuple[str, Any]] = collections.deque()
        metadata = files.checksum(array.path / _METADATA, "")
        self._checksums = {_METADATA: metadata}

    def write(self, place: Place, rows: np.ndarray) -> None:
        """Write a chunk; wait for an earlier one if there are enough on their way.

        Args:
          place: of the rows, in the two first dimensions; no other process writes to its chunk.
          rows: nothing writes to them before `finish` has returned.
        """
        if len(self._writing) == AT_ONCE:
            self._finish_one()
        (name,) = _chunk_names(self._store, place)
        future = self._store[place].write(rows, can_reference_source_data_indefinitely=True)
        self._writing.append((name, future))

    def finish(self) -> dict[str, int]:
        """Wait for all chunks; return the checksum of every file by its name."""
        while self._writing:
            self._finish_one()
        return self._checksums

    def _finish_one(self) -> None:
        name, future = self._writing.popleft()
        future.result()
        path = self._array.path / name
        self._checksums[name] = _stored_sum(path, _chunk_bytes(self._store))


class RowReader:
    """Rows of an array on disk, out of files that are known to be its own.

    Each file is checked when the first row of it is read.

    Args:
      array: the array.
      checksums: of its files, by name.

    Attributes:
      array: the array.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is another one; the array is of another form.
    """

    def __init__(self, array: RowArray, checksums: dict[str, int]) -> None:
        self.array, self._checksums = array, checksums
        self._checked: set[str] = set()
        self._check(_METADATA, files.checksum(array.path / _METADATA, ""))
        self._store = array.open()

    def read(self, first: int, last: int) -> np.ndarray:
        """Return logical rows `[first, last)`."""
        array = self.array
        if array.alternate:
            begin = first // array.shards
            lines = self._read((slice(begin, -(-last // array.shards)), slice(0, array.shards)))
            flat = lines.reshape(-1, *array.row)
            return flat[first - begin * array.shards : last - begin * array.shards]
        pieces, size = [], array.rows_per_shard
        while first < last:
            shard, inside = divmod(first, size)
            end = min(size, inside + last - first)
            pieces.append(self._read((slice(shard, shard + 1), slice(inside, end)))[0])
            first += end - inside
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def read_lines(self, first: int, last: int, shards: list[int]) -> np.ndarray:
        """Return local rows `[first, last)` of some shards, of rows that alternate: `[n, k, …]`.

        Fewer than last - first where the array ends.
        """
        chosen = slice(shards[0], shards[-1] + 1) if shards else slice(0, 0)
        first, last = (min(row, self.array.rows_per_shard) for row in (first, last))
        lines = self._read((slice(first, last), chosen))
        return lines[:, np.asarray(shards, np.int64) - chosen.start]

    def _read(self, place: Place) -> np.ndarray:
        """Return a part of the array, after a check of the chunks that hold it."""
        for name in _chunk_names(self._store, place):
            if name not in self._checked:
                self._check(name, _stored_sum(self.array.path / name, _chunk_bytes(self._store)))
        return np.asarray(self._store[place].read().result())

    def _check(self, name: str, found: int) -> None:
        """Check that a file has the checksum of the array's own one."""
        expected = self._checksums.get(name)
        if found != expected:
            what, got = f"{self.array.path / name}", f"that of checksum {found}"
            text = f"the file of this place and checkpoint, of checksum {expected}"
            raise ValueError(message(what, expected=text, got=got))
        self._checked.add(name)


def _chunk_names(store: ts.TensorStore, place: Place) -> list[str]:
    """Return the file names of the chunks that a place touches.

    With chunks of 4 rows and 2 shards, rows 3 to 8 of shards 0 and 1 are in c.0.0.0, c.1.0.0 and
    c.2.0.0; the last 0 is the number of the chunk in the row's only dimension.
    """
    sizes = _chunk_shape(store)
    touched = [
        range(part.start // size, -(-part.stop // size))
        for part, size in zip(place, sizes, strict=False)
    ]
    touched += [range(1)] * (len(sizes) - len(place))
    return [".".join(map(str, ("c", *numbers))) for numbers in itertools.product(*touched)]


def _chunk_bytes(store: ts.TensorStore) -> int:
    """Return the size of every chunk's file; those at the edges are as large as the others."""
    size = int(np.prod(_chunk_shape(store), dtype=np.int64))
    return size * store.dtype.numpy_dtype.itemsize + _SUM_BYTES


def _chunk_shape(store: ts.TensorStore) -> tuple[int, ...]:
    shape: Any = store.chunk_layout.read_chunk.shape
    return tuple(shape)


def _stored_sum(path: Path, size: int) -> int:
    """Return the CRC-32C that a chunk's file ends with.

    Raises:
      FileNotFoundError: it is missing.
      ValueError: it is not of this size.
    """
    with files.name_errors(path, ""), path.open("rb") as file:
        found = os.fstat(file.fileno()).st_size
        file.seek(-min(found, _SUM_BYTES), os.SEEK_END)
        stored = file.read()
    if found != size:
        text = message(f"{path}", expected=f"{size} bytes", got=f"{found}")
        raise ValueError(text)
    return int.from_bytes(stored, "little")

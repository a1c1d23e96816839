"""Rows of a table on disk, as one zarr array whose files are all verified by checksum.

A table in S shards is an array `[⌈V/S⌉, S, …]` if its rows alternate between shards (MOD), or
`[S, ⌈V/S⌉, …]` if each shard has a contiguous range of rows (DIV). Flattened, both are the rows in
logical order, padding last. For V = 5 and S = 2, where . is padding:

    MOD  [[0, 1], [2, 3], [4, .]]        DIV  [[0, 1, 2], [3, 4, .]]

Every chunk is a file that ends with the CRC-32C of its bytes, which tensorstore checks. That finds
a damaged chunk, but not an undamaged one that was put in the place of another. So the writer of a
chunk records its checksum, and the reader compares it with the file before using the bytes.

Input: blocks of rows and their places, or checksums by file name. Output: files and their
checksums, or rows.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import os
from typing import Any

import numpy as np
import tensorstore as ts

from tpu_embed._checks import message
from tpu_embed.core.rows import BLOCK, Grid, Ids
from tpu_embed.io import files
from tpu_embed.io.store import Bucket, Place, wait

AT_ONCE = 4
"""The number of blocks that may be waiting to be written."""

_LEAST_RUN = 64
"""Rows that follow each other are read together if runs have about so many of them at least."""

Part = tuple[Any, Any]
"""A part of an array: of its first two dimensions (shards and rows, in either order) a slice or an
array of numbers."""

_METADATA = "zarr.json"
_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
_SUM_BYTES = 4
_KEYS = {"name": "default", "configuration": {"separator": "."}}
"""How zarr names chunks: all are files in one directory, `c.0.0.0` and so on."""


@dataclasses.dataclass(frozen=True)
class RowArray:
    """Where a zarr array of rows is, and its shape.

    Attributes:
      path: its directory.
      shards: S.
      rows_per_shard: ⌈V/S⌉.
      alternate: whether rows alternate between the shards (MOD); otherwise each shard has a
        contiguous range (DIV).
      row: the shape of a row.
      dtype: the logical dtype, for example bfloat16.
    """

    path: Place
    shards: int
    rows_per_shard: int
    alternate: bool
    row: tuple[int, ...]
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        size = (self.shards, self.rows_per_shard)
        return (*(size[::-1] if self.alternate else size), *self.row)

    @property
    def grid(self) -> Grid:
        """Which of its rows are where."""
        return Grid(self.shards, self.rows_per_shard, self.alternate)

    @property
    def block(self) -> int:
        """Rows of a shard that are written or read at a time; at most `BLOCK` bytes in all."""
        return max(1, min(self.rows_per_shard, self._rows_of_block()))

    def _rows_of_block(self) -> int:
        width = int(np.prod(self.row, dtype=np.int64)) * self.dtype.itemsize
        return BLOCK // max(1, width * (self.shards if self.alternate else 1))

    def create(self, shards_together: int) -> ts.TensorStore:
        """Make the array; every process may call this.

        Args:
          shards_together: how many neighbouring shards one process writes.
        """
        # A chunk is what one process writes at a time, so that no two write to the same file.
        chunk = (self.block, shards_together) if self.alternate else (1, self.block)
        grid = {"name": "regular", "configuration": {"chunk_shape": (*chunk, *self.row)}}
        metadata = self._metadata() | {"chunk_grid": grid, "chunk_key_encoding": _KEYS}
        options = {"open": True, "create": True, "store_data_equal_to_fill_value": True}
        return self._opened({"metadata": metadata} | options)

    def open(self, runs: int) -> ts.TensorStore:
        """Open the array for reading.

        Args:
          runs: how many runs of rows are read in turn, of each the last chunk is kept.

        Raises:
          ValueError: the array does not exist, or has another shape or dtype.
        """
        options = {"metadata": self._metadata(), "fill_missing_data_reads": False}
        cache = {"cache_pool": {"total_bytes_limit": (runs + 1) * BLOCK}}
        try:
            return self._opened(options | {"recheck_cached_data": "open"}, cache)
        except ValueError as error:
            expected = f"an array {self.dtype.name}{list(self.shape)}, as the manifest says"
            got = _described(self.path / _METADATA)
            remedy = "copy the checkpoint whole, or use another one"
            text = message(f"{self.path}", expected=expected, got=got, remedy=remedy)
            raise ValueError(text) from error

    def _metadata(self) -> dict[str, Any]:
        return {"shape": self.shape, "data_type": self.dtype.name, "codecs": _CODECS}

    def _opened(self, options: dict[str, Any], context: Any = None) -> ts.TensorStore:
        kvstore, above = {"driver": "file", "path": f"{self.path}/"}, None
        if isinstance(self.path, Bucket):
            kvstore, above = self.path.spec, self.path.context
        spec = {"driver": "zarr3", "kvstore": kvstore, **options}
        # A context of its own: what one restore has read is not what another one gets.
        return wait(ts.open(spec, context=ts.Context(context or {}, above)), self.path)


class RowWriter:
    """Write chunks of an array, a few at a time, and record their checksums.

    Args:
      array: the array to make; every process may do so.
      shards_together: how many neighbouring shards one process writes.
    """

    def __init__(self, array: RowArray, shards_together: int) -> None:
        self._array, self._store = array, array.create(shards_together)
        self._writing: collections.deque[tuple[str, Any]] = collections.deque()
        metadata = files.checksum(array.path / _METADATA, "")
        self._checksums = {_METADATA: metadata}

    def write(self, place: Part, rows: np.ndarray) -> None:
        """Start to write a chunk; wait for an earlier one first if `AT_ONCE` are under way.

        Args:
          place: the place of the rows; no other process may write to the same chunk.
          rows: the rows, which must not change before `finish` has returned.
        """
        if len(self._writing) == AT_ONCE:
            self._finish_one()
        (name,) = _chunk_names(self._store, place)
        future = self._store[place].write(rows, can_reference_source_data_indefinitely=True)
        self._writing.append((name, future))

    def finish(self) -> dict[str, int]:
        """Wait for all chunks; return the checksum of every file by file name."""
        while self._writing:
            self._finish_one()
        return self._checksums

    def _finish_one(self) -> None:
        name, future = self._writing.popleft()
        path = self._array.path / name
        wait(future, path)
        self._checksums[name] = _stored_sum(path, _chunk_bytes(self._store))


def write_column(array: RowArray, rows: np.ndarray) -> dict[str, int]:
    """Write all rows of an alternating array of one shard; return the checksums by file name.

    Args:
      array: the array to make.
      rows: `[n, …]`.
    """
    writer = RowWriter(array, 1)
    for first in range(0, len(rows), array.block):
        part = rows[first : first + array.block]
        writer.write((slice(first, first + len(part)), slice(0, 1)), part[:, None])
    return writer.finish()


class RowReader:
    """Read rows of an array on disk, from files whose checksums are compared.

    Each file is checked when its first row is read.

    Args:
      array: the array.
      checksums: the checksums of its files, by file name.
      runs: how many runs of rows are read in turn; then no file is read twice.

    Attributes:
      array: the array.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is not the one that was written; the array has another shape or dtype.
    """

    def __init__(self, array: RowArray, checksums: dict[str, int], runs: int = 1) -> None:
        self.array, self._checksums = array, checksums
        self._checked: set[str] = set()
        self._check(_METADATA, files.checksum(array.path / _METADATA, ""))
        self._store = array.open(runs)

    def read(self, ids: Ids) -> np.ndarray:
        """Return rows `[n, …]` of ids, which ascend."""
        array = self.array
        if isinstance(ids, range) and ids.step == 1 and array.alternate:
            # Read whole lines of S rows, then cut off what is too much: rows 3 to 6 of S = 2 shards
            # are in lines [2 3] [4 5] [6 7], of which the first and the last row go.
            begin = ids.start // array.shards
            lines = slice(begin, -(-ids.stop // array.shards))
            flat = self._read((lines, slice(0, array.shards))).reshape(-1, *array.row)
            return flat[ids.start - begin * array.shards :][: len(ids)]
        rows = np.empty((len(ids), *array.row), array.dtype)
        if runs := _runs(ids):
            for at, run in runs:
                rows[at] = self.read(run)
            return rows
        for shard, local, at in array.grid.cut(ids):
            one = slice(shard, shard + 1)
            where = (local, one) if array.alternate else (one, local)
            rows[at] = self._read(where).reshape(-1, *array.row)
        return rows

    def _read(self, place: Part) -> np.ndarray:
        """Return a part of the array, after checking the chunks that hold it."""
        for name in _chunk_names(self._store, place):
            if name not in self._checked:
                self._check(name, _stored_sum(self.array.path / name, _chunk_bytes(self._store)))
        return np.asarray(wait(self._store[place].read(), self.array.path))

    def _check(self, name: str, found: int) -> None:
        """Check that the checksum of a file is the recorded one."""
        expected = self._checksums.get(name)
        if found != expected:
            what, got = f"{self.array.path / name}", f"that of checksum {found}"
            text = f"the file of this place and checkpoint, of checksum {expected}"
            raise ValueError(message(what, expected=text, got=got))
        self._checked.add(name)


def _runs(ids: Ids) -> list[tuple[slice, range]]:
    """Return runs of ids that follow each other, and their places; nothing if most are short."""
    if isinstance(ids, range):
        return []
    ends = [0, *(np.flatnonzero(np.diff(ids) != 1) + 1).tolist(), ids.size]
    if len(ends) * _LEAST_RUN > ids.size:
        return []
    return [
        (slice(a, b), range(int(ids[a]), int(ids[b - 1]) + 1)) for a, b in itertools.pairwise(ends)
    ]


def _described(path: Place) -> str:
    """Return what the metadata of an array say of it, in words."""
    try:
        said = json.loads(path.read_bytes())
        return f"{said['data_type']}{said['shape']}"
    except (OSError, ValueError, KeyError):
        return "other metadata"


def _chunk_names(store: ts.TensorStore, place: Part) -> list[str]:
    """Return the file names of the chunks that a place touches.

    With chunks of 4 rows and 2 shards, rows 3 to 8 of shards 0 and 1 are in c.0.0.0, c.1.0.0 and
    c.2.0.0. The last 0 is the number of the chunk along the columns, which are never split.
    """
    sizes = _chunk_shape(store)
    touched: list[Any] = [
        range(part.start // size, -(-part.stop // size))
        if isinstance(part, slice)
        else np.unique(part // size).tolist()
        for part, size in zip(place, sizes, strict=False)
    ]
    touched += [range(1)] * (len(sizes) - len(place))
    return [".".join(map(str, ("c", *numbers))) for numbers in itertools.product(*touched)]


def _chunk_bytes(store: ts.TensorStore) -> int:
    """Return the size in bytes of a chunk's file; zarr pads chunks at the edges to full size."""
    size = int(np.prod(_chunk_shape(store), dtype=np.int64))
    return size * store.dtype.numpy_dtype.itemsize + _SUM_BYTES


def _chunk_shape(store: ts.TensorStore) -> tuple[int, ...]:
    shape: Any = store.chunk_layout.read_chunk.shape
    return tuple(shape)


def _stored_sum(path: Place, size: int) -> int:
    """Return the CRC-32C at the end of a chunk's file.

    Raises:
      FileNotFoundError: the file is missing.
      ValueError: the file does not have this size.
    """
    if isinstance(path, Bucket):  # its reader finds it cut short: the sum does not fit
        return int.from_bytes(path.last_bytes(_SUM_BYTES), "little")
    with files.name_errors(path, ""), path.open("rb") as file:
        found = os.fstat(file.fileno()).st_size
        file.seek(-min(found, _SUM_BYTES), os.SEEK_END)
        stored = file.read()
    if found != size:
        text = message(f"{path}", expected=f"{size} bytes", got=f"{found}")
        raise ValueError(text)
    return int.from_bytes(stored, "little")

"""Rows of a table on disk, as one zarr array whose files are all verified by checksum.

A table in S shards is an array `[⌈V/S⌉, S, …]` if its rows alternate between shards (MOD), or
`[S, ⌈V/S⌉, …]` if each shard has a contiguous range of rows (DIV). Flattened, both are the rows in
logical order, padding last. For V = 5 and S = 2, where . is padding:

    MOD  [[0, 1], [2, 3], [4, .]]        DIV  [[0, 1, 2], [3, 4, .]]

Every chunk is a file that ends with the CRC-32C of its bytes, which tensorstore checks. That finds
a damaged chunk, but not an undamaged one that was put in the place of another. So the writer of a
chunk records its checksum, and the reader compares it with the file before using the bytes. A chunk
in a bucket has its bytes alone, of which the writer records the CRC-32: to fetch it takes one
request, and those of the chunks that follow it are under way meanwhile.

Input: blocks of rows and their places, or checksums by file name. Output: files and their
checksums, or rows.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from tpu_embed._checks import refuse
from tpu_embed.core.rows import BLOCK, Grid, Ids, pieces
from tpu_embed.io import files
from tpu_embed.io.store import Bucket, Place, settle, wait

_AT_ONCE, _AT_ONCE_IN_BUCKET = 4, 16
"""Blocks that are written at once; in a bucket, which takes longer to answer, also read ahead."""

_LEAST_RUN = 64
"""Rows that follow each other are read together if runs have about so many of them at least."""

Part = tuple[slice, slice]
"""A part of an array: slices of its first two dimensions, shards and rows, in either order."""

_METADATA = "zarr.json"
_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
_SUM_BYTES = 4
_KEYS = {"name": "default", "configuration": {"separator": "."}}
"""How zarr names chunks: all are files in one directory, `c.0.0.0` and so on."""


Checksums = dict[str, dict[str, int]]
"""Of files: directory relative to that of the tables -> file name -> checksum."""


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
        side_by_side = self.shards if self.alternate else 1
        width = math.prod(self.row) * self.dtype.itemsize * side_by_side
        return max(1, min(self.rows_per_shard, BLOCK // max(1, width)))

    def create(self, shards_together: int) -> ts.TensorStore:
        """Make the array; every process may call this.

        Args:
          shards_together: how many neighbouring shards one process writes.
        """
        # A chunk is what one process writes at a time, so that no two write to the same file.
        chunk = (self.block, shards_together) if self.alternate else (1, self.block)
        grid = {
            "name": "regular",
            "configuration": {"chunk_shape": (*chunk, *self.row)},
        }
        chunks = {"chunk_grid": grid, "chunk_key_encoding": _KEYS}
        return self._opened(
            chunks, open=True, create=True, store_data_equal_to_fill_value=True
        )

    def open(self) -> ts.TensorStore:
        """Open the array for reading.

        Raises:
          ValueError: the array does not exist, or has another shape or dtype.
        """
        try:
            return self._opened({})
        except ValueError as error:
            refuse(
                f"{self.path}",
                expected=f"an array {self.dtype.name}{list(self.shape)}, as the manifest says",
                got=_described(self.path / _METADATA),
                remedy="copy the checkpoint whole, or use another one",
                cause=error,
            )

    def _opened(self, chunks: Mapping[str, Any], **options: bool) -> ts.TensorStore:
        kvstore, above, codecs = (
            {"driver": "file", "path": f"{self.path}/"},
            None,
            _CODECS,
        )
        if isinstance(self.path, Bucket):
            kvstore, above, codecs = self.path.spec, self.path.context, _CODECS[:1]
        metadata = {
            "shape": self.shape,
            "data_type": self.dtype.name,
            "codecs": codecs,
            **chunks,
        }
        spec = {"driver": "zarr3", "kvstore": kvstore, "metadata": metadata, **options}
        # A context of its own: what one restore has read is not what another one gets.
        return wait(ts.open(spec, context=ts.Context({}, above)), self.path)


class RowWriter:
    """Write chunks of an array, a few at a time, and record their checksums.

    Args:
      array: the array to make; every process may do so.
      shards_together: how many neighbouring shards one process writes.
    """

    def __init__(self, array: RowArray, shards_together: int) -> None:
        self._array, self._store = array, array.create(shards_together)
        self._at_once = (
            _AT_ONCE_IN_BUCKET if isinstance(array.path, Bucket) else _AT_ONCE
        )
        self._writing: collections.deque[tuple[str, Any]] = collections.deque()
        self._checksums = {_METADATA: files.checksum(array.path / _METADATA, "")}

    def __enter__(self) -> RowWriter:
        """Return itself."""
        return self

    def __exit__(self, *_: Any) -> None:
        """Wait for chunks that an error has left under way."""
        settle(future for _, future in self._writing)

    def write(self, place: Part, rows: np.ndarray) -> None:
        """Start to write a chunk; wait for an earlier one first if enough of them are under way.

        Args:
          place: the place of the rows; no other process may write to the same chunk.
          rows: the rows, which must not change before `finish` has returned.
        """
        if len(self._writing) == self._at_once:
            self._finish_one()
        sizes = _chunk_shape(self._store)
        numbers = [part.start // size for part, size in zip(place, sizes, strict=False)]
        name = _chunk_name(self._array, numbers)
        future = self._store[place].write(
            rows, can_reference_source_data_indefinitely=True
        )
        self._writing.append((name, future))
        if isinstance(self._array.path, Bucket):
            sum_of_rows = zlib.crc32(
                np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
            )
            # At the end of the last chunks.
            padding = bytes(_rows_bytes(self._store) - rows.nbytes)
            self._checksums[name] = zlib.crc32(padding, sum_of_rows)

    def finish(self) -> dict[str, int]:
        """Wait for all chunks; return the checksum of every file by file name."""
        while self._writing:
            self._finish_one()
        return self._checksums

    def _finish_one(self) -> None:
        name, future = self._writing.popleft()
        path = self._array.path / name
        wait(future, path)
        if isinstance(path, Path):
            self._checksums[name] = _stored_sum(path, _rows_bytes(self._store))


def column(path: Place, n: int, dtype: Any, row: tuple[int, ...] = ()) -> RowArray:
    """Return an array `[n, 1, …]`: of one shard, whose rows count as alternating."""
    return RowArray(path, 1, n, True, row, np.dtype(dtype))


def write_column(array: RowArray, blocks: Iterable[np.ndarray]) -> dict[str, int]:
    """Write all rows of a column; return the checksums of its files by file name.

    Args:
      array: the array to make; see `column`.
      blocks: rows `[k, …]` in order, `array.block` of them in each but the last.
    """
    first = 0
    with RowWriter(array, 1) as writer:
        for rows in blocks:
            last = first + len(rows)
            writer.write((slice(first, last), slice(0, 1)), rows[:, None])
            first = last
        assert first == array.rows_per_shard, "the blocks are all rows"
        return writer.finish()


def write_all(array: RowArray, rows: np.ndarray) -> dict[str, int]:
    """Write all rows of a column, `[n, …]`; return the checksums of its files by file name."""
    return write_column(array, (rows[at] for at in pieces(len(rows), array.block)))


class RowReader:
    """Read rows of an array on disk, from files whose checksums are compared.

    Each file is checked when its first row is read. In a bucket those that follow it are on their
    way then: up to 64 MiB, 16 blocks.

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

    def __init__(
        self, array: RowArray, checksums: dict[str, int], runs: int = 1
    ) -> None:
        self.array, self._checksums = array, checksums
        self._check(_METADATA, files.checksum(array.path / _METADATA, ""))
        self._store = array.open()
        grids = zip(array.shape, _chunk_shape(self._store)[:2], strict=False)
        self._grids = [Grid(-(-n // size), size, alternate=False) for n, size in grids]
        self._ahead = (
            _AT_ONCE_IN_BUCKET // runs if isinstance(array.path, Bucket) else 0
        )
        # Of each run, the chunks of a block and of those ahead; chunks side by side are a block.
        side_by_side = self._grids[1].shards if array.alternate else 1
        self._room = (runs * (1 + self._ahead) + 1) * side_by_side
        self._chunks: dict[str, Any] = {}  # or what will be one

    def read(self, ids: Ids) -> np.ndarray:
        """Return rows `[n, …]` of ids, which ascend."""
        array = self.array
        if not len(ids):  # they may begin after the last row
            return np.empty((0, *array.row), array.dtype)
        if isinstance(ids, range) and ids.step == 1 and array.alternate:
            # Read whole lines of S rows, then cut off what is too much: rows 3 to 6 of S = 2 shards
            # are in lines [2 3] [4 5] [6 7], of which the first and the last row go.
            begin = ids.start // array.shards
            lines = range(begin, -(-ids.stop // array.shards))
            flat = self._read(lines, range(array.shards))
            return flat[ids.start - begin * array.shards :][: len(ids)]
        rows = np.empty((len(ids), *array.row), array.dtype)
        if runs := _runs(ids):
            for at, run in runs:
                rows[at] = self.read(run)
            return rows
        for shard, local, at in array.grid.cut(ids):
            if isinstance(local, slice):
                local = range(local.start, local.stop, local.step or 1)
            rows[at] = self._read(local, range(shard, shard + 1))
        return rows

    def _read(self, lines: Ids, shards: range) -> np.ndarray:
        """Return local rows of neighbouring shards, `[n, …]`: lines of several, or rows of one."""
        place = (lines, shards) if self.array.alternate else (shards, lines)
        ahead = self._ahead if isinstance(lines, range) else 0
        # A chunk is to an array what a shard is to a table of contiguous ranges.
        cuts = [grid.cut(ids) for grid, ids in zip(self._grids, place, strict=True)]
        found = np.empty((*map(len, place), *self.array.row), self.array.dtype)
        for (i, *rows), (j, *columns) in itertools.product(*cuts):
            (inside, at), (across, to) = rows, columns
            part = self._chunk(i, j, ahead)[inside, across]
            if part.shape == found.shape:
                found = part  # one chunk has it all
            else:
                found[at, to] = part
        return found.reshape(-1, *self.array.row)

    def _chunk(self, i: int, j: int, ahead: int) -> np.ndarray:
        """Return a chunk, after checking its file; have those that follow it read meanwhile."""
        chunks, wanted = self._chunks, _chunk_name(self.array, (i, j))
        for k in range(1 + ahead):
            place = (i + k, j) if self.array.alternate else (i, j + k)
            name = _chunk_name(self.array, place)
            if name in chunks:
                # Those that were wanted lately are the last ones.
                chunks[name] = chunks.pop(name)
            elif name == wanted or name in self._checksums:
                chunks[name] = self._begin(name, place)
        if isinstance(chunks[wanted], ts.Future):
            chunks[wanted] = self._received(wanted)
        for name in [*chunks][: -self._room]:
            del chunks[name]
        return chunks[wanted]

    def _begin(self, name: str, place: tuple[int, int]) -> ts.Future:
        """Begin to read a chunk: on a disk its rows, in a bucket the bytes of the object."""
        if isinstance(self.array.path, Bucket):
            kvstore: Any = self._store.kvstore
            return kvstore.read(name)
        sizes = [grid.size for grid in self._grids]
        ends = zip(place, sizes, self.array.shape, strict=False)
        return self._store[
            tuple(slice(k * n, min(k * n + n, end)) for k, n, end in ends)
        ].read()

    def _received(self, name: str) -> np.ndarray:
        """Return a chunk that is read, after comparing the checksum of its file.

        Raises:
          FileNotFoundError: the file is missing.
          ValueError: it is damaged, or not the one that was written.
        """
        path, future = self.array.path / name, self._chunks[name]
        if isinstance(path, Bucket):
            data = path.bytes_of(future)
            self._check(name, zlib.crc32(data))
            return np.frombuffer(data, self.array.dtype).reshape(
                _chunk_shape(self._store)
            )
        self._check(name, _stored_sum(path, _rows_bytes(self._store)))
        return np.asarray(wait(future, path))

    def _check(self, name: str, found: int) -> None:
        """Check that the checksum of a file is the recorded one."""
        expected = self._checksums.get(name)
        if found != expected:
            refuse(
                f"{self.array.path / name}",
                expected=f"the file of this place and checkpoint, of checksum {expected}",
                got=f"that of checksum {found}",
            )


def _runs(ids: Ids) -> list[tuple[slice, range]]:
    """Return runs of ids that follow each other, and their places; nothing if most are short."""
    if isinstance(ids, range):
        return []
    ends = [0, *(np.flatnonzero(np.diff(ids) != 1) + 1).tolist(), ids.size]
    if len(ends) * _LEAST_RUN > ids.size:
        return []
    return [
        (slice(a, b), range(int(ids[a]), int(ids[b - 1]) + 1))
        for a, b in itertools.pairwise(ends)
    ]


def _described(path: Place) -> str:
    """Return what the metadata of an array say of it, in words."""
    try:
        said = json.loads(path.read_bytes())
        return f"{said['data_type']}{said['shape']}"
    except (OSError, ValueError, KeyError):
        return "other metadata"


def _chunk_name(array: RowArray, numbers: Sequence[int]) -> str:
    """Return the file name of a chunk.

    With chunks of 4 rows and 2 shards, rows 4 to 7 of shards 0 and 1 are in c.1.0.0. The last 0 is
    the number of the chunk along the columns, which are never split.
    """
    return ".".join(map(str, ("c", *numbers, *[0] * len(array.row))))


def _rows_bytes(store: ts.TensorStore) -> int:
    """Return the bytes of a chunk's rows; zarr pads chunks at the edges with zeros to full size."""
    return math.prod(_chunk_shape(store)) * store.dtype.numpy_dtype.itemsize


def _chunk_shape(store: ts.TensorStore) -> tuple[int, ...]:
    shape: Any = store.chunk_layout.read_chunk.shape
    return tuple(shape)


def _stored_sum(path: Path, size: int) -> int:
    """Return the CRC-32C at the end of a chunk's file, after `size` bytes of rows.

    Raises:
      FileNotFoundError: the file is missing.
      ValueError: the file does not have this size.
    """
    with files.name_errors(path, ""), path.open("rb") as file:
        found = file.seek(0, os.SEEK_END)
        file.seek(max(0, found - _SUM_BYTES))
        stored = file.read()
    if found != size + _SUM_BYTES:
        refuse(f"{path}", expected=f"{size + _SUM_BYTES} bytes", got=f"{found}")
    return int.from_bytes(stored, "little")

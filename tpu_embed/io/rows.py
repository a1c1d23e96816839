"""The rows of one table or slot on disk, in logical order: a zarr array, written shard by shard.

Enters: a physical array, or blocks of logical rows. Leaves: files, or rows. Called by `tables.py`;
`manifest.py` asks for the form.

A table in S shards is an array `[⌈V/S⌉, S, …]` if its rows alternate between shards (MOD), or
`[S, ⌈V/S⌉, …]` if each shard has its rows in one piece (DIV): flattened, both are the rows in
logical order, padding last. No process writes a chunk that another one writes, and every chunk
ends with a CRC-32C of its bytes: a damaged or missing one cannot be read.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from tpu_embed.core.fields import Field

__all__ = ["RowArray", "Shards", "row_array", "write_rows"]

BLOCK = 2**22
"""Bytes that are written or read at a time."""

AT_ONCE = 4
"""Blocks that are on their way to the disk at a time."""

_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]


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
        metadata = {
            "shape": self.shape,
            "data_type": self.dtype.name,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": (*chunk, *self.row)},
            },
            "codecs": _CODECS,
        }
        options = {"open": True, "create": True, "store_data_equal_to_fill_value": True}
        return ts.open(self._spec() | {"metadata": metadata} | options).result()

    def open(self) -> ts.TensorStore:
        """Open the array for reading.

        Raises:
          ValueError: it is not there, or of another form.
        """
        metadata = {"shape": self.shape, "data_type": self.dtype.name, "codecs": _CODECS}
        options = {"metadata": metadata, "fill_missing_data_reads": False}
        return ts.open(self._spec() | options).result()

    def _spec(self) -> dict[str, Any]:
        kvstore = {"driver": "file", "path": f"{self.path}/"}
        return {"driver": "zarr3", "kvstore": kvstore}

    def read(self, store: ts.TensorStore, first: int, last: int) -> np.ndarray:
        """Return logical rows `[first, last)`."""
        if self.alternate:
            begin = first // self.shards
            lines = np.asarray(store[begin : -(-last // self.shards)].read().result())
            flat = lines.reshape(-1, *self.row)
            return flat[first - begin * self.shards : last - begin * self.shards]
        pieces, size = [], self.rows_per_shard
        while first < last:
            shard, inside = divmod(first, size)
            end = min(size, inside + last - first)
            pieces.append(np.asarray(store[shard, inside:end].read().result()))
            first += end - inside
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def read_lines(
        self, store: ts.TensorStore, first: int, last: int, shards: list[int]
    ) -> np.ndarray:
        """Return local rows `[first, last)` of some shards, of rows that alternate: `[n, k, …]`.

        Fewer than last - first where the array ends.
        """
        chosen = slice(shards[0], shards[-1] + 1) if shards else slice(0, 0)
        inside = slice(*(min(row, self.rows_per_shard) for row in (first, last)))
        lines = np.asarray(store[inside, chosen].read().result())
        return lines[:, np.asarray(shards, np.int64) - chosen.start]


class Shards:
    """This process's shards of a field: stored rows by shard number, on the host or a device.

    Args:
      field: the field.
      physical: its array, each shard in one piece.
      copied: whether to copy now what may change later.

    Attributes:
      side_by_side: neighbouring shards that every process writes together; 1 where processes have
        unequal numbers of them, or others between.
    """

    def __init__(self, field: Field, physical: jax.Array, *, copied: bool) -> None:
        self.field = field
        size = field.form.array(field.group.rows).shape[0]
        self.side_by_side = _side_by_side(physical, size)
        self._pieces: dict[int, tuple[Any, int]] = {}
        for piece in physical.addressable_shards:
            if piece.replica_id == 0:
                lines = _seen_from_host(piece.data)
                first = (piece.index[0].start or 0) // size
                for n in range(lines.shape[0] // size):
                    self._pieces[first + n] = lines, n * size
        self._copies: dict[int, np.ndarray] = {}
        if copied:
            self._copies = {shard: self._copy(shard) for shard in self.numbers}
            self._pieces.clear()

    @property
    def numbers(self) -> list[int]:
        """The shards' numbers, ascending."""
        return sorted(self._pieces or self._copies)

    def block(self, shard: int, first: int, last: int) -> np.ndarray:
        """Return local rows of a shard, in their logical dtype."""
        if shard in self._copies:
            return self._copies[shard][first:last]
        stored = self.field.form.unpack(self._stored(shard, first, last))
        return np.ascontiguousarray(stored).view(np.dtype(self.field.shape.dtype))

    def _copy(self, shard: int) -> np.ndarray:
        """Return all rows of a shard, on the host; a device gives a block at a time."""
        array = row_array(Path(), self.field)
        rows = np.empty((array.rows_per_shard, *array.row), array.dtype)
        for first in range(0, len(rows), array.block):
            last = min(first + array.block, len(rows))
            rows[first:last] = self.block(shard, first, last)
        return rows

    def _stored(self, shard: int, first: int, last: int) -> np.ndarray:
        """Return rows of the field's table, out of a shard of its stack, as they are packed."""
        (lines, start), form = self._pieces[shard], self.field.form
        first, last = self.field.table.offset + first, self.field.table.offset + last
        if not form.packed:
            return _on_host(lines, start + first, last - first)
        width = lines.shape[1]
        begin, end = first * form.words // width, -(-last * form.words // width)
        words = _on_host(lines, start + begin, end - begin).reshape(-1)
        words = words[first * form.words - begin * width :]
        return words[: (last - first) * form.words].reshape(-1, form.words)


def _seen_from_host(data: jax.Array) -> Any:
    """Return an array of one device as it is, or as NumPy's where that takes no copy."""
    (device,) = data.devices()
    return np.asarray(data) if device.platform == "cpu" else data


def _on_host(array: Any, first: int, n: int) -> np.ndarray:
    """Return lines of a piece on the host; of one on a device, a copy of no more than these."""
    if isinstance(array, np.ndarray):
        return array[first : first + n]
    return np.asarray(jax.lax.dynamic_slice_in_dim(array, first, n))


def row_array(path: Path, field: Field) -> RowArray:
    """Return the array of a field as its layout has it."""
    group, table = field.group, field.table
    return RowArray(
        path=path,
        shards=group.num_shards,
        rows_per_shard=table.rows_per_shard,
        alternate=group.placement != "div",
        row=tuple(field.shape.shape),
        dtype=np.dtype(field.shape.dtype),
    )


def write_rows(array: RowArray, shards: Shards) -> None:
    """Write this process's shards of a field, a block after the other.

    Args:
      array: where to.
      shards: the rows.
    """
    numbers = shards.numbers
    if not numbers:
        return
    together = shards.side_by_side
    store, writing = array.create(together if array.alternate else 1), collections.deque()
    for place, rows in _blocks(array, shards, numbers, together):
        if len(writing) == AT_ONCE:
            writing.popleft().result()
        # Nothing writes to the rows until all is on disk: no need to copy them.
        writing.append(store[place].write(rows, can_reference_source_data_indefinitely=True))
    for last in writing:
        last.result()


def _side_by_side(physical: jax.Array, size: int) -> int:
    """Return how many neighbouring shards, `size` lines each, a chunk holds; equal everywhere."""
    owned: dict[int, list[int]] = {}
    for piece in physical.global_shards:
        if piece.replica_id == 0:
            first, last, _ = piece.index[0].indices(physical.shape[0])
            mine = range(first // size, last // size)
            owned.setdefault(piece.device.process_index, []).extend(mine)
    n = len(next(iter(owned.values())))
    regular = all(
        sorted(mine) == list(range(min(mine), min(mine) + n)) and min(mine) % n == 0
        for mine in owned.values()
    )
    return n if regular else 1


def _blocks(
    array: RowArray, shards: Shards, numbers: list[int], together: int
) -> Iterator[tuple[Any, np.ndarray]]:
    """Yield places in the array, and the rows that go there."""
    for first in range(0, array.rows_per_shard, array.block):
        last = min(first + array.block, array.rows_per_shard)
        if not array.alternate:
            for shard in numbers:
                yield (shard, slice(first, last)), shards.block(shard, first, last)
            continue
        for begin in range(0, len(numbers), together):
            chosen = numbers[begin : begin + together]
            pieces = [shards.block(shard, first, last) for shard in chosen]
            rows = np.stack(pieces, axis=1) if together > 1 else pieces[0][:, None]
            yield (slice(first, last), slice(chosen[0], chosen[0] + together)), rows

"""The rows of one table or slot on disk, in logical order: a zarr array, written shard by shard.

Enters: a physical array, or blocks of logical rows. Leaves: files, or rows. Called by `tables.py`.

A table in S shards is an array `[⌈V/S⌉, S, …]` if its rows alternate between shards (MOD), or
`[S, ⌈V/S⌉, …]` if each shard has its rows in one piece (DIV): flattened, both are the rows in
logical order, padding last. No process writes a chunk that another one writes, and every chunk
ends with a CRC-32C of its bytes: a damaged or missing one cannot be read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from tpu_embed.core.fields import Field

__all__ = ["RowArray", "Shards", "row_array", "write_rows"]

BLOCK = 2**23
"""Bytes that are written or read at a time."""

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
        store = ts.open(self._spec() | {"fill_missing_data_reads": False}).result()
        if store.shape != self.shape or store.dtype.numpy_dtype != self.dtype:
            got = f"{store.dtype.numpy_dtype} of shape {store.shape}"
            raise ValueError(f"expected {self.dtype} of shape {self.shape}, got {got}")
        return store

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


class Shards:
    """This process's shards of a field: stored rows by shard number, on the host or a device.

    Args:
      field: the field.
      physical: its array.
      copied: whether to copy now what may change later.
    """

    def __init__(self, field: Field, physical: jax.Array, *, copied: bool) -> None:
        self.field, self._copied = field, copied
        size = field.form.array(field.group.rows).shape[0]
        self._pieces: dict[int, np.ndarray] = {}
        for piece in physical.addressable_shards:
            first = piece.index[0].start or 0
            shard = first // size
            if piece.replica_id == 0:
                host = np.asarray(piece.data)
                for n, local in enumerate(np.split(host, len(host) // size)):
                    self._pieces[shard + n] = self._mine(local)

    @property
    def numbers(self) -> list[int]:
        """The shards' numbers, ascending."""
        return sorted(self._pieces)

    def _mine(self, local: np.ndarray) -> np.ndarray:
        """Return the rows of the field's table, in their form, out of a shard of its stack."""
        table, form = self.field.table, self.field.form
        rows = form.by_row(local)[table.offset : table.offset + table.rows_per_shard]
        return rows.copy() if self._copied else rows

    def block(self, shard: int, first: int, last: int) -> np.ndarray:
        """Return local rows of a shard, in their logical dtype."""
        stored = self.field.form.unpack(self._pieces[shard][first:last])
        return np.ascontiguousarray(stored).view(np.dtype(self.field.shape.dtype))


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
    together = _side_by_side(numbers, array.shards)
    store, last = array.create(together if array.alternate else 1), None
    for place, rows in _blocks(array, shards, numbers, together):
        writing = store[place].write(rows)
        if last is not None:
            last.result()
        last = writing
    if last is not None:
        last.result()


def _side_by_side(numbers: list[int], shards: int) -> int:
    """Return how many neighbouring shards a chunk holds: all of a process, where that divides."""
    n = len(numbers)
    aligned = shards % n == 0 and numbers[0] % n == 0
    return n if aligned and numbers == list(range(numbers[0], numbers[0] + n)) else 1


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
            rows = np.stack([shards.block(shard, first, last) for shard in chosen], axis=1)
            yield (slice(first, last), slice(chosen[0], chosen[0] + together)), rows

"""Write the rows of a table or slot to disk: each process writes the shards that it holds.

Rows are read from the devices and written block by block, so that little memory is needed. No two
processes write to the same chunk.

Input: a physical array. Output: blocks of logical rows, written to a `RowArray`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tpu_embed.core.state import Field
from tpu_embed.io.checkpoint.row_files import Place, RowArray, RowWriter


class LocalShards:
    """This process's shards of a field: stored rows by shard number, on the host or a device.

    Args:
      field: the field.
      physical: its array, in which every shard is contiguous.
      copied: whether to copy the rows to the host now, because the array may be donated later.

    Attributes:
      side_by_side: how many neighbouring shards every process writes together; 1 if processes have
        different numbers of shards, or shards that are not neighbours.
    """

    def __init__(self, field: Field, physical: jax.Array, *, copied: bool) -> None:
        self.field = field
        # `size` lines of the array hold one shard of the stack; a device may hold several shards.
        size = field.row_format.array(field.stack.num_rows).shape[0]
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
        """The numbers of this process's shards, ascending."""
        return sorted(self._pieces or self._copies)

    def block(self, shard: int, first: int, last: int) -> np.ndarray:
        """Return local rows `[first, last)` of a shard, in their logical dtype."""
        if shard in self._copies:
            return self._copies[shard][first:last]
        stored = self.field.row_format.unpack(self._stored(shard, first, last))
        return np.ascontiguousarray(stored).view(np.dtype(self.field.shape.dtype))

    def _copy(self, shard: int) -> np.ndarray:
        """Return all rows of a shard on the host, copied from the device block by block."""
        array = row_array(Path(), self.field)
        rows = np.empty((array.rows_per_shard, *array.row), array.dtype)
        for first in range(0, len(rows), array.block):
            last = min(first + array.block, len(rows))
            rows[first:last] = self.block(shard, first, last)
        return rows

    def _stored(self, shard: int, first: int, last: int) -> np.ndarray:
        """Return local rows of the field's table as they are stored: packed ones `[n, words]`."""
        (lines, start), row_format = self._pieces[shard], self.field.row_format
        # The tables of a stack follow each other in its rows; this one begins at its offset.
        first, last = self.field.table.offset + first, self.field.table.offset + last
        if not row_format.packed:
            return _on_host(lines, start + first, last - first)
        # With rows of 48 words in lines of 128, rows 3 and 4 are words 144 to 239, in line 1:
        # take the lines that hold any of the words, then cut off those before and after.
        width = lines.shape[1]
        begin, end = first * row_format.words // width, -(-last * row_format.words // width)
        words = _on_host(lines, start + begin, end - begin).reshape(-1)
        words = words[first * row_format.words - begin * width :]
        return words[: (last - first) * row_format.words].reshape(-1, row_format.words)


def _seen_from_host(data: jax.Array) -> Any:
    """Return an array of one device as a NumPy array if that needs no copy, otherwise unchanged."""
    (device,) = data.devices()
    return np.asarray(data) if device.platform == "cpu" else data


def _on_host(array: Any, first: int, n: int) -> np.ndarray:
    """Return n lines of an array on the host; from a device, only these are copied."""
    if isinstance(array, np.ndarray):
        return array[first : first + n]
    return np.asarray(jax.lax.dynamic_slice_in_dim(array, first, n))


def row_array(path: Path, field: Field) -> RowArray:
    """Return where and in which shape a field is saved; the layout decides."""
    stack, table = field.stack, field.table
    return RowArray(
        path=path,
        shards=stack.num_shards,
        rows_per_shard=table.rows_per_shard,
        alternate=stack.placement != "div",
        row=tuple(field.shape.shape),
        dtype=np.dtype(field.shape.dtype),
    )


def write_rows(array: RowArray, shards: LocalShards) -> dict[str, int]:
    """Write this process's shards of a field; return the checksums of the files by file name.

    Args:
      array: where to write.
      shards: the rows.
    """
    numbers = shards.numbers
    if not numbers:
        return {}
    together = shards.side_by_side
    writer = RowWriter(array, together if array.alternate else 1)
    for place, rows in _blocks(array, shards, numbers, together):
        writer.write(place, rows)
    return writer.finish()


def _side_by_side(physical: jax.Array, size: int) -> int:
    """Return how many neighbouring shards of `size` lines a chunk holds, on every process.

    With 4 shards on processes 0 0 1 1 this is 2: process 0 writes shards 0 and 1, process 1 writes
    2 and 3. With processes 0 1 0 1 it is 1, because chunks of 2 shards would have two writers.
    """
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
    array: RowArray, shards: LocalShards, numbers: list[int], together: int
) -> Iterator[tuple[Place, np.ndarray]]:
    """Yield the place of each block in the array, and its rows."""
    for first in range(0, array.rows_per_shard, array.block):
        last = min(first + array.block, array.rows_per_shard)
        if not array.alternate:  # DIV, [S, ⌈V/S⌉, …]: blocks [1, n, …] of one shard
            for shard in numbers:
                rows = shards.block(shard, first, last)[None]
                yield (slice(shard, shard + 1), slice(first, last)), rows
            continue
        # MOD, [⌈V/S⌉, S, …]: blocks [n, together, …] of neighbouring shards
        for begin in range(0, len(numbers), together):
            chosen = numbers[begin : begin + together]
            pieces = [shards.block(shard, first, last) for shard in chosen]
            rows = np.stack(pieces, axis=1) if together > 1 else pieces[0][:, None]
            yield (slice(first, last), slice(chosen[0], chosen[0] + together)), rows

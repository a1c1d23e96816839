"""Write the rows of a table or slot to disk: each process writes the shards that it holds.

Rows are read from the devices and written block by block, so that little memory is needed. No two
processes write to the same chunk.

Input: a state. Output: blocks of logical rows, written to a `RowArray`.
"""

from __future__ import annotations

import jax
import numpy as np

from tpu_embed.core.layout import Layout
from tpu_embed.core.rows import DeviceRows
from tpu_embed.core.state import Field, TableState
from tpu_embed.io.checkpoint.row_files import RowArray, RowWriter
from tpu_embed.io.store import Place


class LocalShards:
    """The rows of a field on the shards that this process saves.

    Args:
      state: the state.
      layout: the engine's layout.
      field: the field.
      copied: whether to copy the rows to the host now, because the state may be donated later.

    Attributes:
      numbers: of the shards, ascending: of several copies of a shard, one is saved.
      side_by_side: how many neighbouring shards every process writes together; 1 if processes have
        different numbers of shards, or shards that are not neighbours.
    """

    def __init__(self, state: TableState, layout: Layout, field: Field, *, copied: bool) -> None:
        self.field = field
        self.rows = DeviceRows(state, layout, field.table.name, [field.part])
        holders = layout.axes.processes_of_parts(field.stack.shard_axes)
        owned: dict[int, list[int]] = {}
        for shard, processes in enumerate(holders):
            owned.setdefault(min(processes), []).append(shard)
        self.numbers = owned.get(jax.process_index(), [])
        self.side_by_side = _side_by_side(owned)
        if copied:
            self.rows.keep(self.numbers)

    def block(self, shards: list[int], first: int, last: int) -> np.ndarray:
        """Return local rows `[first, last)` of neighbouring shards, in their logical dtype.

        Returns:
          `[n, k, …]` of a field whose rows alternate between the shards, otherwise `[k, n, …]`.
        """
        grid = self.rows.grid
        found = self.rows.read_here(grid.ids(shards, first, last))[self.field.part]
        k, n = len(shards), last - first
        rows = found.reshape(n, k, *found.shape[1:]) if grid.alternate else found[None]
        return rows.view(np.dtype(self.field.shape.dtype))


def row_array(path: Place, field: Field) -> RowArray:
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
    if not shards.numbers:
        return {}
    together = shards.side_by_side if array.alternate else 1
    writer = RowWriter(array, together)
    for first in range(0, array.rows_per_shard, array.block):
        lines = slice(first, min(first + array.block, array.rows_per_shard))
        for begin in range(0, len(shards.numbers), together):
            some = shards.numbers[begin : begin + together]
            place = slice(some[0], some[-1] + 1)
            rows = shards.block(some, lines.start, lines.stop)
            writer.write((lines, place) if array.alternate else (place, lines), rows)
    return writer.finish()


def _side_by_side(owned: dict[int, list[int]]) -> int:
    """Return how many neighbouring shards a chunk holds, on every process.

    With 4 shards on processes 0 0 1 1 this is 2: process 0 writes shards 0 and 1, process 1 writes
    2 and 3. With processes 0 1 0 1 it is 1, because chunks of 2 shards would have two writers.
    """
    n = len(next(iter(owned.values())))
    regular = all(
        mine == list(range(mine[0], mine[0] + n)) and mine[0] % n == 0 for mine in owned.values()
    )
    return n if regular else 1

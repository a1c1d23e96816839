"""Statistics of every table and slot, such as norms, without a copy of the table.

Each device reads its own shard, one block of rows at a time, so no temporary array is as large as a
table, however the rows are packed. Sums are taken within each block first and then over pairs of
blocks, which keeps the rounding error of millions of float32 additions small.

Input: a state. Output: a few numbers per table and slot, the same on every device.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tpu_embed._types import Array
from tpu_embed.core.exchange import collectives
from tpu_embed.core.layout import Layout, MeshAxes, Stack
from tpu_embed.core.state.init import rows_of_tables
from tpu_embed.core.state.table_state import TableState, read_rows, rule_slots, slot_format
from tpu_embed.kernels.formats import PACKED_ROWS, RowFormat

TABLE = ""
"""The key of the table itself; the other keys are names of slots."""

BLOCK_ROWS = 32 * PACKED_ROWS
"""Rows that a device reads at a time."""


class RowNorms(NamedTuple):
    """Statistics of the T tables of a stack, or of one of their slots: arrays `[T]`.

    Attributes:
      sums: sum of all numbers in finite rows.
      squares: sum of their squares.
      largest: the largest sum of squares of one finite row.
      finite: how many rows contain no NaN or infinity.
      non_finite: how many rows do.
    """

    sums: Array
    squares: Array
    largest: Array
    finite: Array
    non_finite: Array


@partial(jax.jit, static_argnames="layout")
def of_state(state: TableState, layout: Layout) -> dict[str, dict[str, RowNorms]]:
    """Return the statistics by stack, then by `TABLE` or the name of a slot.

    Slots that a whole stack shares have no rows and are left out.

    Args:
      state: the state.
      layout: the engine's layout.
    """
    found = {}
    for stack in layout.stacks:
        fields = {TABLE: (state.tables[stack.name], stack.row_format)}
        for name, slot in rule_slots(stack).items():
            if slot.per_row:
                fields[name] = (state.slots[stack.name][name], slot_format(stack, slot))
        found[stack.name] = {
            name: _of_field(*field, stack, layout.axes) for name, field in fields.items()
        }
    return found


def _of_field(physical: Array, row_format: RowFormat, stack: Stack, axes: MeshAxes) -> RowNorms:
    """Return the statistics of one physical array."""
    size = min(BLOCK_ROWS, stack.num_rows)
    numbers = np.arange(-(-stack.num_rows // size), dtype=stack.index_dtype)

    def shard(physical):
        # parts: arrays [blocks, T]. `lax.map` runs the blocks one after the other.
        parts = jax.lax.map(
            lambda number: _of_block(physical, number * size, size, row_format, stack), numbers
        )
        mine = RowNorms(
            _in_pairs(parts.sums),
            _in_pairs(parts.squares),
            parts.largest.max(axis=0),
            parts.finite.sum(axis=0, dtype=stack.index_dtype),
            parts.non_finite.sum(axis=0, dtype=stack.index_dtype),
        )
        if not stack.shard_axes:
            return mine
        # Everything adds up over the shards but the largest row, which is a maximum.
        whole = jax.tree.map(lambda part: collectives.psum(part, stack.shard_axes), mine)
        return whole._replace(largest=jax.lax.pmax(mine.largest, stack.shard_axes))

    spec = axes.spec(stack.shard_axes)
    return collectives.per_device(shard, axes, spec, PartitionSpec())(physical)


def _of_block(
    physical: Array, first: Array, size: int, row_format: RowFormat, stack: Stack
) -> RowNorms:
    """Return the statistics of `size` local rows from `first` on, without those past the end."""
    # The last block starts earlier so that it fits. Of 10 rows in blocks of 4, it reads 6-9 and
    # `fresh` leaves out rows 6 and 7, which the block before has counted.
    start = jnp.minimum(first, stack.num_rows - size)
    local = start + jnp.arange(size, dtype=first.dtype)
    table, _, present = rows_of_tables(stack, stack.tables, local)
    values = read_rows(physical, start, size, row_format).reshape(size, -1)
    finite = jnp.isfinite(values).all(axis=1)
    fresh = present & (local >= first)
    counted = fresh & finite
    # Selected, not multiplied with a mask: 0 * NaN would be NaN.
    kept = jnp.where(counted[:, None], values, 0)
    squares = (kept * kept).sum(axis=1)
    counts = counted.astype(kept.dtype), (fresh & ~finite).astype(kept.dtype)
    # One segment sum for four statistics: columns [rows, 4] become [T, 4], then four arrays [T].
    # Rows of one table are adjacent, so their table numbers ascend.
    of_rows = jnp.stack([kept.sum(axis=1), squares, *counts], axis=1)
    by_table = {"num_segments": len(stack.tables), "indices_are_sorted": True}
    sums, total, whole, broken = jax.ops.segment_sum(of_rows, table, **by_table).T
    largest = jnp.maximum(jax.ops.segment_max(squares, table, **by_table), 0)
    return RowNorms(sums, total, largest, whole.astype(jnp.int32), broken.astype(jnp.int32))


def _in_pairs(parts: Array) -> Array:
    """Sum `[n, T]` over the first axis by adding neighbours until one is left, `[T]`."""
    # [a, b, c] is padded to [a, b, c, 0], becomes [a + b, c], then [a + b + c].
    while parts.shape[0] > 1:
        parts = jnp.pad(parts, ((0, parts.shape[0] % 2), (0, 0)))
        parts = parts[0::2] + parts[1::2]
    return parts[0]

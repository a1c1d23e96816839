"""Move rows along routes: fetch rows from their owners, send sums of gradients back.

Each physical row lives on one shard, its owner. For a lookup, a device asks each owner for the
distinct rows it needs there, and gets them back (`fetch`). For an update, a device sends each owner
the partial sums of the gradients of its rows (`send_sums`), and the owner adds up what it receives
for one row (`merge`). Each distinct row is asked for once; each (row, block) partial sum is sent
once.

Which rows these are, and in which order sums are made, is a route. The host computes it for a
placed batch (`host_route.py`), the program itself for ids that are known only there
(`device_route.py`); both give the same numbers. Here only rows move.

Shapes are static: the buffer for each destination has room for `capacity` rows, C.

Input: inside `shard_map`, a route of one device. Output: the rows of the ids, or, on every owner,
the local rows to update with the sums of their gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.exchange import collectives
from tpu_embed.core.layout import (
    MeshAxes,
    Stack,
)
from tpu_embed.kernels import dispatch, rounded
from tpu_embed.kernels.formats import LINE
from tpu_embed.kernels.operands import RowsToSum, SumLayout


class RowSums(NamedTuple):
    """Sums of the gradients of rows, at the owner of the rows.

    Attributes:
      row_ids: `[U]`, distinct local rows, ascending, `PADDING_ID` where there is none.
      sums: `[U, D]`, the whole gradient of each row. Before they are merged `[P, D]`, partial sums,
        float, or bfloat16 as uint16 if the exchange rounds them.
      segments: int32 `[P]`, the row that each partial sum is of, by its place in `row_ids`,
        non-decreasing from 0 on without gaps; U or more for what is left out. None: merged.
      index: int32 `[P]`, the partial sums in the order in which they are added; None: as they are.
      packed: the partial sums packed for SparseCores, if they are so already.
    """

    row_ids: Array
    sums: Array
    segments: Array | None = None
    index: Array | None = None
    packed: Array | None = None


def rows_of_shard(row_ids: Array, stack: Stack) -> Array:
    """Return local rows of this device's shard, `PADDING_ID` for those of others.

    Args:
      row_ids: physical rows, `PADDING_ID` for absent ids.
      stack: the stack.
    """
    if stack.num_shards == 1:
        return row_ids
    # Shard 1 of R = 10 rows has the physical rows 10 to 19. Rows 4 17 -1 become -1 7 -1 there: an
    # absent row is on shard -1.
    here = collectives.axis_index(stack.shard_axes).astype(row_ids.dtype)
    absent = jnp.asarray(PADDING_ID, row_ids.dtype)
    return jnp.where(row_ids // stack.num_rows == here, row_ids % stack.num_rows, absent)


def fetch(rows: RowsToSum, asked: Array | None, stack: Stack) -> RowsToSum:
    """Fetch the row of each id from its owner shard.

    Args:
      rows: this device's shard, R rows in the stack's row format; and with `asked`, the position of
        each id's row among those that come back.
      asked: `[S, C]`, the local rows that the devices ask this owner for, by source. None: every
        row is here.
      stack: the stack.

    Returns:
      The rows as stored, `[M, D]`, and which of them belongs to which id; if the exchange rounds
      them, they are bfloat16 as uint16, and packed if SparseCores sum them.
    """
    table, index, sent_format = rows.source, rows.index, stack.sent_rows_format
    if asked is None and sent_format == stack.row_format:
        # Every row is here, and the physical rows are positions in the table itself.
        if stack.packing == "none":
            return rows
        # SparseCores sum packed rows where they lie, unless they are quantized first. Only of rows
        # that fill whole lines: to unpack others, as the derivative by weights asks, would copy the
        # table.
        whole_lines = sent_format.packed and sent_format.words == stack.dim and not stack.dim % LINE
        if stack.packing == "words" and whole_lines and stack.quantization is None:
            packed = sent_format.by_row(table)
            return rows._replace(source=packed, packed=packed)
    # One shard of packed or rounded rows: read the row of each id, duplicates included, and unpack
    # or round it.
    if asked is None:
        found = _read_as_sent(table, index, stack)
        numbers = jax.lax.iota(index.dtype, index.shape[0])
        index = jnp.where(index < 0, jnp.asarray(PADDING_ID, numbers.dtype), numbers)
    else:
        with jax.named_scope("route"):
            # The owner reads the rows that all sources asked for, [S * C], and sends [S, C, D]
            # back.
            own = _read_as_sent(table, asked.reshape(-1), stack)
            sent = sent_format.for_exchange(own, stack.num_shards)
            found = collectives.all_to_all(sent, stack.shard_axes).reshape(own.shape)
    rounded_words = stack.exchange_dtype is not None and stack.packing == "words"
    packed = found if rounded_words else None
    return rows._replace(source=sent_format.unpack(found), index=index, packed=packed)


def _read_as_sent(table: Array, row_ids: Array, stack: Stack) -> Array:
    """Return rows of a shard in the format in which they are sent, rounded if the exchange does so.

    Args:
      table: the shard.
      row_ids: local rows `[N]`, `PADDING_ID` for absent ones.
      stack: the stack.
    """
    sent_format = stack.sent_rows_format
    if sent_format == stack.row_format:
        return dispatch.read_rows(table, row_ids, stack.row_format)
    return rounded.read_rows(table, row_ids, stack.row_format, sent_format)


def send_sums(sums: Array, stack: Stack, axes: MeshAxes) -> tuple[Array, Array | None]:
    """Send every owner the sums for its rows.

    Args:
      sums: a parcel of C sums for each shard, `[S * C, D]`, float; if the exchange rounds them,
        rounded and in the format of `Stack.sent_sums_format` already.
      stack: the stack.
      axes: the mesh, and which of its axes split the batch.

    Returns:
      The sums that this device received, `[rest * S * C, D]`, in the order of `send_rows`, float,
      or bfloat16 as uint16 if they were rounded; and these packed for SparseCores, if it has some.
    """
    rest, row_format = axes.other_batch_axes(stack.shard_axes), stack.sent_sums_format
    packed = row_format.pack(sums) if stack.exchange_dtype is None else sums
    sums = row_format.for_exchange(packed, stack.num_shards)
    # The all-to-all gives [S, C] from the sources along the shard axes; devices along the other
    # batch axes own copies of the same shard, and the all-gather gives each [rest, S, C].
    sums = collectives.all_gather(collectives.all_to_all(sums, stack.shard_axes), rest)
    received = row_format.by_row(sums)
    packed = received if stack.packing == "words" else None
    return row_format.unpack(received).reshape(-1, stack.dim), packed


def send_rows(row_ids: Array, stack: Stack, axes: MeshAxes) -> Array:
    """Send every owner the rows of the sums that `send_sums` sends it.

    Args:
      row_ids: `[S, C]`, local rows at their owners.
      stack: the stack.
      axes: the mesh.

    Returns:
      The local rows of the sums that this device receives, `[rest * S, C]`.
    """
    rest = axes.other_batch_axes(stack.shard_axes)
    rows = collectives.all_gather(collectives.all_to_all(row_ids, stack.shard_axes), rest)
    return rows.reshape(-1, row_ids.shape[-1])


def merge(given: RowSums) -> RowSums:
    """Add up the partial sums of each row, in the order of the blocks."""
    segments, index = given.segments, given.index
    assert segments is not None, "only partial sums are merged"
    if index is None:
        index = jax.lax.iota(jnp.int32, given.sums.shape[0])
    # Merged sums beyond the last row are not applied, nor are partial sums read that nobody made.
    layout = SumLayout((given.row_ids.shape[0],), filled=False)
    rows = RowsToSum(given.sums, index, segments, packed=given.packed)
    (merged,) = dispatch.gather_sum(rows, layout)
    return RowSums(given.row_ids, merged)

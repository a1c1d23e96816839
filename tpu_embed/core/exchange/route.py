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
    ROW_MULTIPLE,
    MeshAxes,
    Stack,
    sent_rows_format,
    sent_sums_format,
)
from tpu_embed.kernels import dispatch, rounded, storage
from tpu_embed.kernels.formats import LINE
from tpu_embed.kernels.operands import RowsToSum, SumLayout


class RowRoute(NamedTuple):
    """How each id of a device gets its row.

    Attributes:
      asked: `[S, C]`, the local rows that the devices ask this owner for, by source; `PADDING_ID`
        where nothing is asked. None with one shard: every row is here.
      index: `[N]`, the position of each id's row among the `[S * C]` fetched ones (with one shard:
        in the table); out of range for an absent id.
    """

    asked: Array | None
    index: Array


class SumRoute(NamedTuple):
    """How sums of gradients are made: the gradients in order, and the sum that each is added to.

    Attributes:
      index: int32 `[N]`, the bag that each gradient is of.
      gains: `[N]`, what each is multiplied with; None: all ones.
      segments: int32 `[N]`, its sum, non-decreasing; past the last sum for what is left out.
    """

    index: Array
    gains: Array | None
    segments: Array


class MergeRoute(NamedTuple):
    """How an owner merges the partial sums that it has.

    Attributes:
      index: int32 `[P]`, the partial sums in the order in which they are added; None: as they are.
      segments: int32 `[P]`, the merged sum that each is added to, non-decreasing from 0 on without
        gaps; U or more for what is left out. None: the sums are merged already.
      row_ids: `[U]`, the local row of each merged sum, ascending, `PADDING_ID` where there is none.
    """

    index: Array | None
    segments: Array | None
    row_ids: Array


class FetchedRows(NamedTuple):
    """The rows that a device's ids need, as stored, and which of them belongs to which id.

    Attributes:
      source: `[M, D]`, stored rows; if the exchange rounds them, bfloat16 as uint16.
      index: `[N]`, the position in `source` of each id's row; out of range for an absent id.
      packed: the source as it arrived, if it was rounded and SparseCores sum it (`RowsToSum`).
    """

    source: Array
    index: Array
    packed: Array | None = None


class RowSums(NamedTuple):
    """Rows that an owner must update, with the sums of their gradients.

    Attributes:
      row_ids: `[M]`, local row ids, `PADDING_ID` where there is no row.
      sums: `[M, D]`, the summed gradient of each row.
    """

    row_ids: Array
    sums: Array


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


def fetch(table: Array, route: RowRoute, stack: Stack) -> FetchedRows:
    """Fetch the row of each id from its owner shard.

    Args:
      table: this device's shard, R rows in the stack's row format.
      route: how each id gets its row.
      stack: the stack.
    """
    # One shard: every row is here, and the physical rows are positions in the table itself.
    sent_format = sent_rows_format(stack)
    if route.asked is None and stack.packing == "none" and sent_format == stack.row_format:
        return FetchedRows(table, route.index)
    # SparseCores sum packed rows where they lie, unless they are quantized first. Only of rows that
    # fill whole lines: to unpack others, as the derivative by weights asks, would copy the table.
    whole_lines = sent_format.packed and sent_format.words == stack.dim and stack.dim % LINE == 0
    as_stored = stack.packing == "words" and whole_lines and stack.quantization is None
    if route.asked is None and as_stored and sent_format == stack.row_format:
        packed = sent_format.by_row(table)
        return FetchedRows(packed, route.index, packed)
    # One shard of packed or rounded rows: read the row of each id, duplicates included, and unpack
    # or round it.
    if route.asked is None:
        numbers = jax.lax.iota(route.index.dtype, route.index.shape[0])
        index = jnp.where(route.index < 0, jnp.asarray(PADDING_ID, numbers.dtype), numbers)
        found = _read_as_sent(table, route.index, stack)
        return FetchedRows(sent_format.unpack(found), index, _for_sums(found, stack))
    with jax.named_scope("route"):
        # The owner reads the rows that all sources asked for, [S * C], and sends [S, C, D] back.
        found = _read_as_sent(table, route.asked.reshape(-1), stack)
        sent = sent_format.for_exchange(found, stack.num_shards)
        back = collectives.all_to_all(sent, stack.shard_axes).reshape(found.shape)
        return FetchedRows(sent_format.unpack(back), route.index, _for_sums(back, stack))


def _read_as_sent(table: Array, row_ids: Array, stack: Stack) -> Array:
    """Return rows of a shard in the format in which they are sent, rounded if the exchange does so.

    Args:
      table: the shard.
      row_ids: local rows `[N]`, `PADDING_ID` for absent ones.
      stack: the stack.
    """
    sent_format = sent_rows_format(stack)
    if sent_format == stack.row_format:
        return dispatch.read_rows(table, row_ids, stack.row_format)
    return rounded.read_rows(table, row_ids, stack.row_format, sent_format)


def _for_sums(packed: Array, stack: Stack) -> Array | None:
    """Return rounded rows as SparseCores sum them; None if they are not packed for that."""
    suits = stack.exchange_dtype is not None and stack.packing == "words"
    return packed if suits else None


def send_sums(sums: Array, stack: Stack, axes: MeshAxes) -> tuple[Array, Array | None]:
    """Send every owner the sums for its rows.

    Args:
      sums: a parcel of C sums for each shard, `[S * C, D]`, float; if the exchange rounds them,
        rounded and in the format of `sent_sums_format` already.
      stack: the stack.
      axes: the mesh, and which of its axes split the batch.

    Returns:
      The sums that this device received, `[rest * S * C, D]`, in the order of `send_rows`, float,
      or bfloat16 as uint16 if they were rounded; and these packed for SparseCores, if it has some.
    """
    rest, row_format = axes.other_batch_axes(stack.shard_axes), sent_sums_format(stack)
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


def merge(sums: Array, route: MergeRoute, packed: Array | None = None) -> RowSums:
    """Add up the partial sums of each row, in the order of the blocks.

    Args:
      sums: `[P, D]` partial sums, float, or bfloat16 as uint16.
      route: their order, and the merged sum that each is added to.
      packed: the sums packed for SparseCores, if they are so already.

    Returns:
      Distinct rows and their sums, `[U]` and `[U, D]`.
    """
    if route.segments is None:
        return RowSums(route.row_ids, storage.widened(sums))
    index = route.index
    if index is None:
        index = jax.lax.iota(jnp.int32, sums.shape[0])
    # Merged sums beyond the last row are not applied, nor are partial sums read that nobody made.
    layout = SumLayout((route.row_ids.shape[0],), filled=False)
    rows = RowsToSum(sums, index, route.segments, packed=packed)
    (merged,) = dispatch.gather_sum(rows, layout)
    return RowSums(route.row_ids, merged)


def padded(sums: RowSums) -> RowSums:
    """Return the same rows, padded with absent ones to a multiple of `ROW_MULTIPLE`."""
    missing = -sums.row_ids.shape[0] % ROW_MULTIPLE
    return RowSums(
        jnp.pad(sums.row_ids, (0, missing), constant_values=PADDING_ID),
        jnp.pad(sums.sums, ((0, missing), (0, 0))),
    )

"""Move rows along routes, and find a route on the device where the host has not.

Each physical row lives on one shard, its owner. For a lookup, a device asks each owner for the
distinct rows it needs there, and gets them back (`fetch`). For an update, a device sends each owner
the partial sums of the gradients of its rows (`send_sums`), and the owner adds up what it receives
for one row (`merge`). Each distinct row is asked for once; each (row, block) partial sum is sent
once.

Which rows these are, and in which order sums are made, is a route. The host computes it for a
placed batch (`place/router.py`); both give the same numbers. The program sorts ids itself that are
known only when it runs, such as ids that are traced inside a user's jit. And with several processes
no host knows what all of them send to an owner, so the owner routes the merge.

On a TPU a gather or scatter of single numbers costs ten times as much as a sort of as many. So
nothing is indexed here: what belongs to an id takes part in the sort (`dispatch.sort_with`), and a
sort of the distinct rows closes the gaps between them (`dispatch.compact`).

Shapes are static: the buffer for each destination has room for `capacity` rows, C.

Input: inside `shard_map`, a route or the rows of one device. Output: the rows of the ids, or, on
every owner, the local rows to update with the sums of their gradients; or the order of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.exchange import collectives
from tpu_embed.core.layout import (
    ROW_MULTIPLE,
    MeshAxes,
    Stack,
    round_up,
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
    return jnp.where(
        row_ids // stack.num_rows == here, row_ids % stack.num_rows, absent
    )


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
        whole_lines = (
            sent_format.packed
            and sent_format.words == stack.dim
            and not stack.dim % LINE
        )
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
    rows = collectives.all_gather(
        collectives.all_to_all(row_ids, stack.shard_axes), rest
    )
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


# -- runs of sorted rows ---------------------------------------------------------------------------


def number_runs(
    row_ids: Array, absent: int, parts: Array | None = None
) -> tuple[Array, Array]:
    """Number the runs of sorted row ids.

    Args:
      row_ids: integer `[N]` in [0, absent], ascending.
      absent: the id of absent rows.
      parts: integer `[N]`, or None. Entries with the same row id but different parts belong to
        different runs. Entries of the same part must be neighbours among those of a row.

    Returns:
      int32 `[N]`, the number of the run of each entry, from 0; `[N]`, the row id of each run, and
      `absent` after the last run.
    """
    # row_ids 3 7 7 9: first 1 1 0 1, run 0 1 1 2; the first entries of the runs have the ids 3 7 9.
    first = changes(row_ids) if parts is None else changes(row_ids) | changes(parts)
    run = jnp.cumsum(first.astype(jnp.int32)) - 1
    return run, dispatch.compact(row_ids, first, absent)


def changes(x: Array) -> Array:
    """Tell, bool `[N]`, where an entry differs from the one before it; True for the first."""
    return jnp.concatenate([jnp.ones((1,), bool), x[1:] != x[:-1]])


# -- sorts and merges ------------------------------------------------------------------------------


def sort_ids(
    row_ids: Array,
    num_rows: int,
    blocks: Array,
    num_blocks: int,
    bags: Array,
    gains: Array | None,
) -> tuple[Array, Array, Array | None, Array]:
    """Sort ids by row, then by block, and what belongs to them with them.

    Args:
      row_ids: rows `[N]`, `PADDING_ID` for absent ids.
      num_rows: R.
      blocks: int32 `[N]`, in [0, G).
      num_blocks: G.
      bags: int32 `[N]`, non-decreasing.
      gains: `[N]`, or None.

    Returns:
      rows, with R in place of absent ones; bags, those of one row and block in their order; gains;
      blocks.
    """
    # Absent ids sort to the end if their row is the largest number.
    absent, limit = jnp.asarray(num_rows, row_ids.dtype), np.iinfo(row_ids.dtype).max
    rows = jnp.where(row_ids < 0, absent, row_ids)
    if (num_rows + 1) * num_blocks > limit:
        # A key would not fit: sort by block, then, stably, by row.
        blocks, _, carried = dispatch.sort_with(blocks, (rows, bags, gains))
        rows, *carried = carried
        rows, _, (bags, gains, blocks) = dispatch.sort_with(rows, (*carried, blocks))
        return rows, bags, gains, blocks
    # Row 3 in block 1 of 8 has the key 25.
    # Row and block are read back from it, so that they need not take part in the sort.
    keys = rows * num_blocks + blocks.astype(rows.dtype)
    if gains is None:
        keys, bags = dispatch.sort_pairs(keys, bags)
    else:
        keys, _, (bags, gains) = dispatch.sort_with(keys, (bags, gains))
    return keys // num_blocks, bags, gains, (keys % num_blocks).astype(jnp.int32)


def route_merge(
    sums: Array, packed: Array | None, received: Array, stack: Stack, axes: MeshAxes
) -> RowSums:
    """Return the partial sums that an owner receives, with the order to merge them in.

    Args:
      sums: what `route.send_sums` returned.
      packed: likewise.
      received: local rows `[rest * S, C]`, what `route.send_rows` returned.
      stack: the stack.
      axes: the mesh, and which of its axes split the batch.
    """
    # Read the parcels in batch order, so that sums do not depend on the mesh. Where each
    # partial sum really lies goes with it: parcels 0 2 1 of two rows lie at 0 1 4 5 2 3.
    order, size = axes.batch_order(stack.shard_axes), received.shape[-1]
    in_order = bool(np.all(order == np.arange(order.size)))
    rows = received if in_order else received[order]
    # Local rows are 0 to R - 1, so R stands for "absent" here and sorts last.
    rows = jnp.where(rows < 0, stack.num_rows, rows).reshape(-1)
    # What one device sends is sorted by row; only several senders must be sorted together.
    index = None
    if in_order and order.size > 1:
        rows, index = dispatch.sort_rows(rows)
    elif order.size > 1:
        places = (order[:, None] * size + np.arange(size)).astype(np.int32).reshape(-1)
        rows, _, index = dispatch.sort_with(rows, jnp.asarray(places))
    return merge_sorted(sums, rows, index, stack.num_rows)._replace(packed=packed)


def merge_sorted(
    sums: Array, rows: Array, index: Array | None, num_rows: int
) -> RowSums:
    """Return partial sums whose rows are sorted, with the order to merge them in.

    Args:
      sums: partial sums.
      rows: local rows `[P]`, ascending; R for absent ones.
      index: the partial sum of each; None: they are in this order.
      num_rows: R.
    """
    run, run_rows = number_runs(rows, num_rows)
    # There are at most as many distinct rows as partial sums, and as rows in the shard, so there is
    # room for all. Run i is summed into segment i; segment `most` is out of range, so absent ones
    # are left out.
    most = round_up(min(rows.shape[0], num_rows), ROW_MULTIPLE)
    segments = jnp.where(rows < num_rows, run, most)
    run_rows = run_rows[:most]
    missing = (0, most - run_rows.shape[0])
    run_rows = jnp.pad(run_rows, missing, constant_values=num_rows)
    merged = jnp.where(run_rows < num_rows, run_rows, PADDING_ID)
    return RowSums(merged, sums, segments, index)


def only_mine(row_ids: Array, stack: Stack, axes: MeshAxes) -> Array:
    """Return the rows `[S, C]` that this device sends; `PADDING_ID` where another one sends them.

    Along an axis that splits the rows but not the batch, all devices hold the same ids. If all of
    them sent their sums, every gradient would count several times, so each device sends only to
    the shards at its own coordinate.
    """
    # The coordinates of every shard along the shard axes: shard 4 of sizes (2, 3) is at (1, 1).
    coordinates = np.unravel_index(
        np.arange(stack.num_shards),
        [axes.mesh.shape[a] for a in stack.shard_axes] or [1],
    )
    mine = jnp.ones((stack.num_shards,), bool)
    for axis, coordinate in zip(stack.shard_axes, coordinates, strict=False):
        if axis not in axes.batch_axes:
            mine &= coordinate.astype(np.int32) == collectives.axis_index((axis,))
    return jnp.where(mine[:, None], row_ids, PADDING_ID)

"""Route between devices: fetch rows from their owner shards, send gradient sums back to them.

Each physical row lives on one shard, its owner. For a lookup, a device asks each owner for the
distinct rows it needs there, and gets them back (`fetch`). For an update, a device sends each owner
the partial sums of the gradients of its rows (`send`), and the owner adds up what it receives for
one row (`merge`). Each distinct row is asked for once; each (row, block) partial sum is sent once.

Shapes are static: the buffer for each destination has room for `capacity` rows, C. The host, which
knows the ids, computes the exact maximum; a program whose ids are traced uses the worst case, or a
capacity given by the user. `overflow` says that a given capacity was too small, so that nothing is
dropped silently.

Input: inside `shard_map`, the physical row ids of one device. Output: the rows of the ids, or, on
every owner, the local rows to update with the sums of their gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.exchange import collectives, dedup
from tpu_embed.core.layout import ROW_MULTIPLE, MeshAxes, Stack, round_up
from tpu_embed.kernels import dispatch


class Route(NamedTuple):
    """Which rows one device sends to or asks of each shard, and where each id is among them.

    Attributes:
      order: int32 `[N]`, the positions of the ids, sorted by physical row.
      target: int32 `[N]`, the place in the send buffer `[S * C]` of the id at `order[i]`, which is
        destination * C + the rank of its run there; S * C for an absent id.
      row_ids: `[S, C]`, the send buffer: local row ids at the destination, `PADDING_ID` where
        nothing is sent.
      overflow: bool `[]`, whether a destination has more than C runs.
    """

    order: Array
    target: Array
    row_ids: Array
    overflow: Array


class FetchedRows(NamedTuple):
    """The rows that a device's ids need, as stored, and which of them belongs to which id.

    Attributes:
      source: `[M, D]`, stored rows.
      index: `[N]`, the position in `source` of each id's row; out of range for an absent id.
    """

    source: Array
    index: Array


class RowSums(NamedTuple):
    """Rows that an owner must update, with the sums of their gradients.

    Attributes:
      row_ids: `[M]`, local row ids, `PADDING_ID` where there is no row.
      sums: `[M, D]`, the summed gradient of each row.
    """

    row_ids: Array
    sums: Array


def make_route(row_ids: Array, stack: Stack, capacity: int, parts: Array | None = None) -> Route:
    """Sort ids by row, and give every run of equal rows a place in its destination's buffer.

    For example, S = 2 shards of R = 10 rows, C = 2 and the physical rows 13 4 13 7:

        runs.row_ids  4 7 13 13    runs.run  0 1 2 2    runs.run_row_ids  4 7 13 20
        first  0 2 3               (runs 0 and 1 go to shard 0, run 2 to shard 1)
        destination  0 0 1 1       rank  0 1 0 0        target  0 1 2 2
        row_ids  [[4, 7], [3, -1]]

    Args:
      row_ids: physical rows `[N]`, `PADDING_ID` for absent ids.
      stack: the stack.
      capacity: C, the number of runs that each destination has room for.
      parts: integer `[N]`: ids of one row but of different parts are sent separately. None: each
        row is sent once.
    """
    shards, absent = stack.num_shards, stack.physical_rows
    # Absent ids sort to the end if their row is the largest number.
    runs = dedup.find_runs(jnp.where(row_ids < 0, absent, row_ids), absent, parts)
    # Shard s owns the physical rows from s * R to (s + 1) * R; its runs are first[s]:first[s + 1].
    bounds = np.arange(shards + 1, dtype=stack.index_dtype) * stack.num_rows
    first = jnp.searchsorted(runs.run_row_ids, jnp.asarray(bounds)).astype(jnp.int32)
    destination = jnp.minimum(runs.row_ids // stack.num_rows, shards).astype(jnp.int32)
    rank = runs.run - first[destination]
    goes = (runs.row_ids < absent) & (rank < capacity)
    target = jnp.where(goes, destination * capacity + rank, shards * capacity)
    # The send buffer [S, C]: run first[s] + c at [s, c], as long as it belongs to shard s.
    index = first[:-1, None] + jnp.arange(capacity, dtype=jnp.int32)
    asked = runs.run_row_ids.at[index].get(mode="fill", fill_value=absent)
    local = (asked - bounds[:-1, None]).astype(row_ids.dtype)
    sent = jnp.where(index < first[1:, None], local, PADDING_ID)
    return Route(runs.order, target, sent, jnp.any(first[1:] - first[:-1] > capacity))


def fetch(table: Array, row_ids: Array, stack: Stack, capacity: int) -> tuple[FetchedRows, Array]:
    """Fetch the row of each id from its owner shard.

    Args:
      table: this device's shard, R rows in the stack's row format.
      row_ids: physical rows `[N]`, `PADDING_ID` for absent ids.
      stack: the stack.
      capacity: C, the number of distinct rows that each destination has room for.

    Returns:
      The rows and each id's position in them (absent ids get an out-of-range position); and a
      bool `[]`, whether C was too small, in which case rows are missing.
    """
    # One shard: every row is here, and the physical rows are positions in the table itself.
    if stack.num_shards == 1 and stack.packing == "none":
        return FetchedRows(table, row_ids), jnp.asarray(False)
    # One shard of packed rows: read the row of each id, duplicates included, and unpack it.
    if stack.num_shards == 1:
        index = jnp.where(row_ids < 0, PADDING_ID, jax.lax.iota(row_ids.dtype, row_ids.shape[0]))
        found = dispatch.read_rows(table, row_ids, stack.row_format)
        return FetchedRows(stack.row_format.unpack(found), index), jnp.asarray(False)
    with jax.named_scope("route"):
        route = make_route(row_ids, stack, capacity)
        # Row ids [S, C] go to the owners; each owner receives [S, C], one line per source, reads
        # [S * C] rows, and sends [S, C, D] back.
        asked = collectives.all_to_all(route.row_ids, stack.shard_axes)
        found = dispatch.read_rows(table, asked.reshape(-1), stack.row_format)
        sent = stack.row_format.for_exchange(found, stack.num_shards)
        back = collectives.all_to_all(sent, stack.shard_axes).reshape(found.shape)
        # `target` is in sorted order; scatter it so that place[order[i]] = target[i].
        place = dispatch.set_rows(jnp.zeros_like(route.target), route.order, route.target)
        return FetchedRows(stack.row_format.unpack(back), place), route.overflow


def send(route: Route, sums: Array, stack: Stack, axes: MeshAxes) -> RowSums:
    """Send every owner the sums for its rows.

    Args:
      route: the rows and their destinations.
      sums: `[S * C, D]`, in the order of the send buffer.
      stack: the stack.
      axes: the mesh, and which of its axes split the batch.

    Returns:
      The local rows and sums that this device received, ordered by the batch order of the sources.
    """
    row_ids = jnp.where(_is_mine(stack, axes)[:, None], route.row_ids, PADDING_ID)
    rest, row_format = axes.other_batch_axes(stack.shard_axes), stack.sums_format
    sums = row_format.for_exchange(row_format.pack(sums), stack.num_shards)
    # The all-to-all gives [S, C] from the sources along the shard axes; devices along the other
    # batch axes own copies of the same shard, and the all-gather gives each [rest, S, C].
    row_ids = collectives.all_gather(collectives.all_to_all(row_ids, stack.shard_axes), rest)
    sums = collectives.all_gather(collectives.all_to_all(sums, stack.shard_axes), rest)
    sums = row_format.unpack(row_format.by_row(sums))
    # Reorder the sources [rest * S] to batch order, so that sums do not depend on the mesh.
    order = axes.batch_order(stack.shard_axes)
    row_ids, sums = row_ids.reshape(order.size, -1), sums.reshape(order.size, -1, stack.dim)
    if np.any(order != np.arange(order.size)):
        row_ids, sums = row_ids[order], sums[order]
    return RowSums(row_ids.reshape(-1), sums.reshape(-1, stack.dim))


def merge(received: RowSums, stack: Stack, *, in_order: bool) -> RowSums:
    """Add up the partial sums of each row, in the order of the blocks.

    Args:
      received: partial sums in block order; a row may occur once per block.
      stack: the stack.
      in_order: whether the rows are ascending already, with absent ones last.

    Returns:
      Distinct rows and their sums, padded to a multiple of `ROW_MULTIPLE`.
    """
    # Local rows are 0 to R - 1, so R stands for "absent" here and sorts last.
    row_ids = jnp.where(received.row_ids < 0, stack.num_rows, received.row_ids)
    find = dedup.runs_of_sorted if in_order else dedup.find_runs
    runs = find(row_ids, stack.num_rows)
    # There are at most as many distinct rows as entries, and as rows in the shard. Run i is
    # summed into segment i; segment `size` is out of range, so absent entries are left out.
    size = round_up(min(row_ids.shape[0], stack.num_rows), ROW_MULTIPLE)
    segments = jnp.where(runs.row_ids < stack.num_rows, runs.run, size)
    merged = dispatch.gather_sum(received.sums, runs.order, segments, bags=(1,), examples=size)[0]
    run_row_ids = runs.run_row_ids[:size]
    run_row_ids = jnp.pad(
        run_row_ids, (0, size - run_row_ids.shape[0]), constant_values=stack.num_rows
    )
    return RowSums(jnp.where(run_row_ids < stack.num_rows, run_row_ids, PADDING_ID), merged)


def padded(sums: RowSums) -> RowSums:
    """Return the same rows, padded with absent ones to a multiple of `ROW_MULTIPLE`."""
    missing = -sums.row_ids.shape[0] % ROW_MULTIPLE
    return RowSums(
        jnp.pad(sums.row_ids, (0, missing), constant_values=PADDING_ID),
        jnp.pad(sums.sums, ((0, missing), (0, 0))),
    )


def _is_mine(stack: Stack, axes: MeshAxes) -> Array:
    """Tell, bool `[S]`, to which shards this device sends sums.

    Along an axis that splits the rows but not the batch, all devices hold the same ids. If all of
    them sent their sums, every gradient would count several times, so each device sends only to
    the shards at its own coordinate.
    """
    # The coordinates of every shard along the shard axes: shard 4 of sizes (2, 3) is at (1, 1).
    coordinates = np.unravel_index(
        np.arange(stack.num_shards), [axes.mesh.shape[a] for a in stack.shard_axes] or [1]
    )
    mine = jnp.ones((stack.num_shards,), bool)
    for axis, coordinate in zip(stack.shard_axes, coordinates, strict=False):
        if axis not in axes.batch_axes:
            mine &= coordinate.astype(np.int32) == collectives.axis_index((axis,))
    return mine

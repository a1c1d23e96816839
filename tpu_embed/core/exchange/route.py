"""Ids to their owner shards, rows back; partial sums to their owners.

Enters: the physical rows of one device's ids, inside `shard_map`. Leaves: the stored row of every
id (`fetch`), or, on every owner, the rows it must update (`send`) with their summed gradients
(`merge`). Called by `lookup.py` and `sums.py`.

Every distinct row is asked for once, and every (row, block) partial sum is sent once. A destination
has room for `capacity` of them; the host knows the ids and takes the exact maximum, a program that
cannot know it takes the worst case. `overflow` tells when a given capacity was too small; nothing
is ever dropped silently.
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
    """Where the runs of one device's ids go.

    Attributes:
      order: int32 `[N]`, positions of the ids in row order.
      target: int32 `[N]`, place in the send buffer of the id at `order[i]`: destination * C + its
        run's rank there; S * C for an absent id.
      row_ids: `[S, C]`, the local row at the destination, `PADDING_ID` where nothing is sent.
      overflow: bool `[]`, a destination has more runs than C.
    """

    order: Array
    target: Array
    row_ids: Array
    overflow: Array


class FetchedRows(NamedTuple):
    """Where the rows of a device's ids are: rows `[M, D]` as stored, the place of each id `[N]`."""

    source: Array
    index: Array


class RowSums(NamedTuple):
    """What an owner must update.

    Attributes:
      row_ids: `[M]`, local rows, `PADDING_ID` where there is none.
      sums: `[M, D]`, their gradients.
    """

    row_ids: Array
    sums: Array


def make_route(rows: Array, stack: Stack, capacity: int, parts: Array | None = None) -> Route:
    """Sort ids by destination and row, and give every run a place in its destination's buffer.

    Args:
      rows: physical rows `[N]`, `PADDING_ID` for none.
      capacity: C, runs a destination has room for.
      parts: integer `[N]`: ids of one row but of different parts go separately. None: a row goes
        once.
    """
    shards, absent = stack.num_shards, stack.physical_rows
    runs = dedup.find_runs(jnp.where(rows < 0, absent, rows), absent, parts)
    bounds = np.arange(shards + 1, dtype=stack.index_dtype) * stack.num_rows
    first = jnp.searchsorted(runs.run_row_ids, jnp.asarray(bounds)).astype(jnp.int32)
    destination = jnp.minimum(runs.row_ids // stack.num_rows, shards).astype(jnp.int32)
    rank = runs.run - first[destination]
    goes = (runs.row_ids < absent) & (rank < capacity)
    target = jnp.where(goes, destination * capacity + rank, shards * capacity)
    index = first[:-1, None] + jnp.arange(capacity, dtype=jnp.int32)
    asked = runs.run_row_ids.at[index].get(mode="fill", fill_value=absent)
    local = (asked - bounds[:-1, None]).astype(rows.dtype)
    sent = jnp.where(index < first[1:, None], local, PADDING_ID)
    return Route(runs.order, target, sent, jnp.any(first[1:] - first[:-1] > capacity))


def fetch(table: Array, rows: Array, stack: Stack, capacity: int) -> tuple[FetchedRows, Array]:
    """Return where the stored row of every id is, after it has come from where it lives.

    Args:
      table: this device's shard, R rows in the form of the stack.
      rows: physical rows `[N]`, `PADDING_ID` for none.
      capacity: C, distinct rows a destination has room for.

    Returns:
      the rows, with a place outside them for an absent id; bool `[]`, whether C was too small (the
      rows are then incomplete).
    """
    if stack.num_shards == 1 and stack.packing == "none":
        return FetchedRows(table, rows), jnp.asarray(False)
    if stack.num_shards == 1:
        index = jnp.where(rows < 0, PADDING_ID, jax.lax.iota(rows.dtype, rows.shape[0]))
        found = dispatch.read_rows(table, rows, stack.row_format)
        return FetchedRows(stack.row_format.unpack(found), index), jnp.asarray(False)
    with jax.named_scope("route"):
        route = make_route(rows, stack, capacity)
        asked = collectives.all_to_all(route.row_ids, stack.shard_axes)
        found = dispatch.read_rows(table, asked.reshape(-1), stack.row_format)
        sent = stack.row_format.for_exchange(found, stack.num_shards)
        back = collectives.all_to_all(sent, stack.shard_axes).reshape(found.shape)
        place = dispatch.set_rows(jnp.zeros_like(route.target), route.order, route.target)
        return FetchedRows(stack.row_format.unpack(back), place), route.overflow


def send(route: Route, sums: Array, stack: Stack, axes: MeshAxes) -> RowSums:
    """Send every destination its rows and sums; return what came, in batch order of the sources.

    Args:
      route: where they go.
      sums: `[S * C, D]`, in the order of the send buffer.
    """
    rows = jnp.where(_is_mine(stack, axes)[:, None], route.row_ids, PADDING_ID)
    rest, form = axes.other_batch_axes(stack.shard_axes), stack.sums_format
    sums = form.for_exchange(form.pack(sums), stack.num_shards)
    rows = collectives.all_gather(collectives.all_to_all(rows, stack.shard_axes), rest)
    sums = collectives.all_gather(collectives.all_to_all(sums, stack.shard_axes), rest)
    sums = form.unpack(form.by_row(sums))
    order = axes.batch_order(stack.shard_axes)
    rows, sums = rows.reshape(order.size, -1), sums.reshape(order.size, -1, stack.dim)
    if np.any(order != np.arange(order.size)):
        rows, sums = rows[order], sums[order]
    return RowSums(rows.reshape(-1), sums.reshape(-1, stack.dim))


def merge(received: RowSums, stack: Stack, *, in_order: bool) -> RowSums:
    """Sum what came for one row from all blocks, in their order.

    Args:
      received: rows in block order, equal ones not yet merged.
      in_order: the rows are ascending already, absent ones last.

    Returns:
      distinct rows, padded to a multiple of `ROW_MULTIPLE`.
    """
    rows = jnp.where(received.row_ids < 0, stack.num_rows, received.row_ids)
    find = dedup.runs_of_sorted if in_order else dedup.find_runs
    runs = find(rows, stack.num_rows)
    size = round_up(min(rows.shape[0], stack.num_rows), ROW_MULTIPLE)
    segments = jnp.where(runs.row_ids < stack.num_rows, runs.run, size)
    merged = dispatch.gather_sum(received.sums, runs.order, segments, bags=(1,), examples=size)[0]
    run_rows = runs.run_row_ids[:size]
    run_rows = jnp.pad(run_rows, (0, size - run_rows.shape[0]), constant_values=stack.num_rows)
    return RowSums(jnp.where(run_rows < stack.num_rows, run_rows, PADDING_ID), merged)


def padded(sums: RowSums) -> RowSums:
    """Return the same rows, padded with absent ones to a multiple of `ROW_MULTIPLE`."""
    missing = -sums.row_ids.shape[0] % ROW_MULTIPLE
    return RowSums(
        jnp.pad(sums.row_ids, (0, missing), constant_values=PADDING_ID),
        jnp.pad(sums.sums, ((0, missing), (0, 0))),
    )


def _is_mine(stack: Stack, axes: MeshAxes) -> Array:
    """Tell, bool `[S]`, to which shards this device sends.

    Along an axis that splits the rows but not the batch, every device holds the same ids: each
    sends only to the shards at its own coordinate.
    """
    coordinates = np.unravel_index(
        np.arange(stack.num_shards), [axes.mesh.shape[a] for a in stack.shard_axes] or [1]
    )
    mine = jnp.ones((stack.num_shards,), bool)
    for axis, coordinate in zip(stack.shard_axes, coordinates, strict=False):
        if axis not in axes.batch_axes:
            mine &= coordinate.astype(np.int32) == collectives.axis_index((axis,))
    return mine

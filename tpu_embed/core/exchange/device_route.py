"""Compute routes on the device, for what the host cannot know.

Ids that are traced inside a user's jit are known only when the program runs; and with several
processes no host knows what all of them send to an owner. Then the program sorts row ids itself.
The numbers are those that `host_route.py` computes for a placed batch.

On a TPU a gather or scatter of single numbers costs ten times as much as a sort of as many. So
nothing is indexed here: what belongs to an id takes part in the sort (`dispatch.sort_with`), a sort
by position restores the order of the batch (`dispatch.unsort`), and a sort of the distinct rows
closes the gaps between them (`dispatch.compact`).

The capacity is the worst case, or one that the user gave; `overflow` says that a given one was too
small, so that nothing is dropped silently.

Input: inside `shard_map`, the physical row ids of one device. Output: routes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import PADDING_ID, Array, PyTree
from tpu_embed.core.exchange import collectives
from tpu_embed.core.exchange.route import MergeRoute, RowRoute
from tpu_embed.core.exchange.runs import number_runs
from tpu_embed.core.layout import ROW_MULTIPLE, MeshAxes, Stack, round_up
from tpu_embed.kernels import dispatch

MAX_SLICES = 16
"""The most slices that are taken side by side; where there are more shards, in a loop."""


class SortedIds(NamedTuple):
    """The ids of one stack on one device, sorted by physical row.

    Attributes:
      row_ids: `[N]`, ascending; the number of physical rows, S * R, in place of absent ones.
      order: int32 `[N]`, their positions; ids of one row and block are in the order that they had.
      payload: arrays `[N]` in the same order, as they were given.
    """

    row_ids: Array
    order: Array
    payload: PyTree


def sort_ids(
    row_ids: Array,
    stack: Stack,
    payload: PyTree = (),
    blocks: Array | None = None,
    num_blocks: int = 1,
) -> SortedIds:
    """Sort the ids of one device by row, then by block, and what belongs to them with them.

    Args:
      row_ids: physical rows `[N]`, `PADDING_ID` for absent ids.
      stack: the stack.
      payload: a pytree of arrays `[N]`.
      blocks: int32 `[N]`, in [0, num_blocks); None: all are in one.
      num_blocks: G.
    """
    # Absent ids sort to the end if their row is the largest number.
    absent = jnp.asarray(stack.physical_rows, row_ids.dtype)
    rows = jnp.where(row_ids < 0, absent, row_ids)
    if blocks is None:
        return SortedIds(*dispatch.sort_with(rows, payload))
    if (stack.physical_rows + 1) * num_blocks <= np.iinfo(row_ids.dtype).max:
        # Row 3 in block 1 of 8 has the key 25.
        keys, order, payload = dispatch.sort_with(
            rows * num_blocks + blocks.astype(rows.dtype), payload
        )
        return SortedIds(keys // num_blocks, order, payload)
    # The keys would not fit: sort by block, then, stably, by row.
    _, first, (rows, payload) = dispatch.sort_with(blocks, (rows, payload))
    rows, _, (order, payload) = dispatch.sort_with(rows, (first, payload))
    return SortedIds(rows, order, payload)


class Destinations(NamedTuple):
    """Which rows one device sends to or asks of each shard, and where each id is among them.

    Attributes:
      target: int32 `[N]`, the place in the send buffer `[S * C]` of each sorted id, which is
        destination * C + the rank of its run there; S * C for an absent id.
      row_ids: `[S, C]`, the send buffer: local row ids at the destination, `PADDING_ID` where
        nothing is sent.
      overflow: bool `[]`, whether a destination has more than C runs.
    """

    target: Array
    row_ids: Array
    overflow: Array


def find_destinations(
    row_ids: Array, stack: Stack, capacity: int, parts: Array | None = None
) -> Destinations:
    """Give every run of equal rows a place in its destination's buffer.

    For example, S = 2 shards of R = 10 rows, C = 2 and the sorted rows 4 7 13 13:

        run  0 1 2 2    run_row_ids  4 7 13 20
        first  0 2 3               (runs 0 and 1 go to shard 0, run 2 to shard 1)
        destination  0 0 1 1       rank  0 1 0 0        target  0 1 2 2
        row_ids  [[4, 7], [3, -1]]

    Args:
      row_ids: the sorted rows `[N]` of `SortedIds`.
      stack: the stack.
      capacity: C, the number of runs that each destination has room for.
      parts: integer `[N]`, in sorted order: ids of one row but of different parts are sent
        separately. None: each row is sent once.
    """
    shards, absent = stack.num_shards, stack.physical_rows
    runs = number_runs(row_ids, absent, parts)
    # Shard s owns the physical rows from s * R to (s + 1) * R; its runs are first[s]:first[s + 1].
    bounds = jnp.asarray(np.arange(shards + 1, dtype=stack.index_dtype) * stack.num_rows)
    first = _count_below(runs.run_row_ids, bounds)
    destination = jnp.minimum(row_ids // stack.num_rows, shards).astype(jnp.int32)
    rank = runs.run - _pick(first, destination)
    goes = (row_ids < absent) & (rank < capacity)
    target = jnp.where(goes, destination * capacity + rank, shards * capacity)
    # The send buffer [S, C] has the runs from first[s] to first[s + 1] in line s. A line of C runs
    # may reach into the next shard's, or past the end.
    padded = jnp.pad(runs.run_row_ids, (0, capacity), constant_values=absent)
    lines = _slices(padded, first[:-1], capacity)
    local = (lines - bounds[:-1, None]).astype(row_ids.dtype)
    sent = jnp.where(lines < bounds[1:, None], local, jnp.asarray(PADDING_ID, local.dtype))
    return Destinations(target, sent, jnp.any(first[1:] - first[:-1] > capacity))


def has_more_rows(row_ids: Array, stack: Stack, capacity: int) -> Array:
    """Tell, bool `[]`, whether a shard owns more distinct rows of these than it can be asked for.

    This is the `overflow` of `route_rows`, without a route.

    Args:
      row_ids: the sorted rows `[N]` of `SortedIds`.
      stack: the stack.
      capacity: C, the number of distinct rows that each owner can be asked for.
    """
    # S = 2 shards of R = 10 rows, sorted rows 4 7 7 13: first 1 1 0 1, owners 0 0 0 1, counts 2 1.
    # Absent ids have the owner S, which is not counted. [S, N] is computed in a loop, not stored.
    first = jnp.concatenate([jnp.ones((1,), bool), row_ids[1:] != row_ids[:-1]])
    shards = jnp.arange(stack.num_shards, dtype=row_ids.dtype)
    owners = row_ids // stack.num_rows
    mine = first[None] & (owners[None] == shards[:, None])
    return jnp.any(jnp.sum(mine, axis=1, dtype=jnp.int32) > capacity)


def _count_below(rows: Array, bounds: Array) -> Array:
    """Return how many of the rows `[N]` are less than each of a few bounds, int32 `[n]`."""
    return jnp.sum(rows[None] < bounds[:, None], axis=1, dtype=jnp.int32)


def _slices(rows: Array, starts: Array, size: int) -> Array:
    """Return `rows[i : i + size]` for each start i, `[S, size]`."""
    # A program of a slice per shard would grow with the mesh; a loop over all of them is slower.
    together = math.gcd(starts.shape[0], MAX_SLICES)

    def some(starts: Array) -> Array:
        return jnp.stack([jax.lax.dynamic_slice(rows, (i,), (size,)) for i in starts])

    return jax.lax.map(some, starts.reshape(-1, together)).reshape(-1, size)


def _pick(values: Array, index: Array) -> Array:
    """Return `values[index]` of a few int32 values `[n]`; a gather would cost more on a TPU."""
    # [n, N] is computed within one loop over N, never stored.
    numbers = jnp.arange(values.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(index[None] == numbers[:, None], values[:, None], 0), axis=0)


def route_rows(ids: SortedIds, stack: Stack, capacity: int) -> tuple[RowRoute, Array]:
    """Return how each id gets its row, and whether the capacity was too small, bool `[]`.

    Args:
      ids: the ids of this device.
      stack: the stack.
      capacity: C, the number of distinct rows that each owner can be asked for.
    """
    found = find_destinations(ids.row_ids, stack, capacity)
    asked = collectives.all_to_all(found.row_ids, stack.shard_axes)
    return RowRoute(asked, dispatch.unsort(found.target, ids.order)), found.overflow


def route_merge(received: Array, stack: Stack, axes: MeshAxes) -> MergeRoute:
    """Return how an owner merges the partial sums that it receives.

    Args:
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
    runs = number_runs(rows, stack.num_rows)
    # There are at most as many distinct rows as partial sums, and as rows in the shard, so there is
    # room for any that arrive. Run i is summed into segment i; segment `most` is out of range, so
    # absent ones are left out.
    most = round_up(min(rows.shape[0], stack.num_rows), ROW_MULTIPLE)
    segments = jnp.where(rows < stack.num_rows, runs.run, most)
    run_rows = runs.run_row_ids[:most]
    missing = (0, most - run_rows.shape[0])
    run_rows = jnp.pad(run_rows, missing, constant_values=stack.num_rows)
    merged = jnp.where(run_rows < stack.num_rows, run_rows, PADDING_ID)
    return MergeRoute(index, segments, merged)


def only_mine(row_ids: Array, stack: Stack, axes: MeshAxes) -> Array:
    """Return the rows `[S, C]` that this device sends; `PADDING_ID` where another one sends them.

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
    return jnp.where(mine[:, None], row_ids, PADDING_ID)

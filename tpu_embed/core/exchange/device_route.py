"""Compute routes on the device, for what the host cannot know.

Ids that are traced inside a user's jit are known only when the program runs; and with several
processes no host knows what all of them send to an owner. Then the program sorts row ids itself.
The numbers are those that `host_route.py` computes for a placed batch.

The capacity is the worst case, or one that the user gave; `overflow` says that a given one was too
small, so that nothing is dropped silently.

Input: inside `shard_map`, the physical row ids of one device. Output: routes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.exchange import collectives, dedup
from tpu_embed.core.exchange.route import MergeRoute, RowRoute
from tpu_embed.core.layout import ROW_MULTIPLE, MeshAxes, Stack, round_up
from tpu_embed.kernels import dispatch


class Destinations(NamedTuple):
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


def find_destinations(
    row_ids: Array, stack: Stack, capacity: int, parts: Array | None = None
) -> Destinations:
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
    return Destinations(runs.order, target, sent, jnp.any(first[1:] - first[:-1] > capacity))


def route_rows(row_ids: Array, stack: Stack, capacity: int) -> tuple[RowRoute, Array]:
    """Return how each id gets its row, and whether the capacity was too small, bool `[]`.

    Args:
      row_ids: physical rows `[N]`, `PADDING_ID` for absent ids.
      stack: the stack.
      capacity: C, the number of distinct rows that each owner can be asked for.
    """
    if stack.num_shards == 1:
        return RowRoute(None, row_ids), jnp.asarray(False)
    with jax.named_scope("route"):
        found = find_destinations(row_ids, stack, capacity)
        asked = collectives.all_to_all(found.row_ids, stack.shard_axes)
        # `target` is in sorted order; scatter it so that index[order[i]] = target[i].
        index = dispatch.set_rows(jnp.zeros_like(found.target), found.order, found.target)
        return RowRoute(asked, index), found.overflow


def route_merge(received: Array, stack: Stack, axes: MeshAxes) -> MergeRoute:
    """Return how an owner merges the partial sums that it receives.

    Args:
      received: local rows `[rest * S, C]`, what `route.send_rows` returned.
      stack: the stack.
      axes: the mesh, and which of its axes split the batch.
    """
    # Read the parcels in batch order, so that sums do not depend on the mesh. `places` says where
    # each partial sum really lies: parcels 0 2 1 of two rows lie at 0 1 4 5 2 3.
    order, size = axes.batch_order(stack.shard_axes), received.shape[-1]
    places = (order[:, None] * size + np.arange(size)).astype(np.int32).reshape(-1)
    rows = received if np.all(order == np.arange(order.size)) else received[order]
    # Local rows are 0 to R - 1, so R stands for "absent" here and sorts last.
    rows = jnp.where(rows < 0, stack.num_rows, rows).reshape(-1)
    # What one device sends is sorted by row; only several senders must be sorted together.
    find = dedup.runs_of_sorted if order.size == 1 else dedup.find_runs
    runs = find(rows, stack.num_rows)
    # There are at most as many distinct rows as partial sums, and as rows in the shard. Run i is
    # summed into segment i; segment `most` is out of range, so absent ones are left out.
    most = round_up(min(rows.shape[0], stack.num_rows), ROW_MULTIPLE)
    segments = jnp.where(runs.row_ids < stack.num_rows, runs.run, most)
    run_rows = runs.run_row_ids[:most]
    missing = (0, most - run_rows.shape[0])
    run_rows = jnp.pad(run_rows, missing, constant_values=stack.num_rows)
    merged = jnp.where(run_rows < stack.num_rows, run_rows, PADDING_ID)
    index = runs.order if np.all(order == np.arange(order.size)) else places_of(places, runs.order)
    return MergeRoute(index, segments, merged)


def places_of(places: np.ndarray, order: Array) -> Array:
    """Return `places[order]`, int32 `[P]`."""
    return dispatch.gather_rows(jnp.asarray(places), order)


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

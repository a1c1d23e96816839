"""Sort ids that the host has not routed, and route merges, on the device.

Ids that are traced inside a user's jit are known only when the program runs, and so are ids whose
gradients are not summed; then the program sorts them itself. And with several processes no host
knows what all of them send to an owner, so the owner routes the merge.

On a TPU a gather or scatter of single numbers costs ten times as much as a sort of as many. So
nothing is indexed here: what belongs to an id takes part in the sort (`dispatch.sort_with`), and a
sort of the distinct rows closes the gaps between them (`dispatch.compact`).

Input: inside `shard_map`, rows of one device. Output: their order, and routes.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.exchange import collectives
from tpu_embed.core.exchange.route import RowSums
from tpu_embed.core.layout import ROW_MULTIPLE, MeshAxes, Stack, round_up
from tpu_embed.kernels import dispatch

# -- runs of sorted rows ---------------------------------------------------------------------------


def number_runs(row_ids: Array, absent: int, parts: Array | None = None) -> tuple[Array, Array]:
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


def merge_sorted(sums: Array, rows: Array, index: Array | None, num_rows: int) -> RowSums:
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
        np.arange(stack.num_shards), [axes.mesh.shape[a] for a in stack.shard_axes] or [1]
    )
    mine = jnp.ones((stack.num_shards,), bool)
    for axis, coordinate in zip(stack.shard_axes, coordinates, strict=False):
        if axis not in axes.batch_axes:
            mine &= coordinate.astype(np.int32) == collectives.axis_index((axis,))
    return jnp.where(mine[:, None], row_ids, PADDING_ID)

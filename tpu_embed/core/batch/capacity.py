"""Count how much a batch exchanges between devices, so that buffers are large enough.

Buffers have static sizes, and a row that does not fit would be lost. The host knows all ids of its
part of the batch, so it counts exactly: for each pair of a device and a shard, the distinct rows
that the device asks the shard for and the partial sums of gradients that it sends back. The
capacity is the largest count of all pairs.

Input: the packed rows of one batch. Output: its spec, with these capacities.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tpu_embed.core.batch.packing import Part, packed_row_ids, parts
from tpu_embed.core.batch.spec import BatchSpec
from tpu_embed.core.batch.stack_view import StackView, view_stacks
from tpu_embed.core.layout import Layout, Stack


def with_capacities(
    packed: np.ndarray,
    natural: BatchSpec,
    packed_as: BatchSpec,
    layout: Layout,
    replicas: np.ndarray,
) -> BatchSpec:
    """Return the spec that fits a batch exactly: its own spec, with exchange capacities counted.

    Args:
      packed: the batch, int32 `[replicas, L]`.
      natural: the batch's own spec, without exchange capacities.
      packed_as: the spec with which it was packed.
      layout: the engine's layout.
      replicas: int `[replicas]`, the index in the global batch of the replica of each line.
    """
    counted = []
    # With one shard and one replica nothing is exchanged, and both capacities are 0.
    views, places = view_stacks(packed_as, layout), parts(packed_as, layout)
    for view, part, one in zip(views, places, natural.stacks, strict=True):
        num_rows = partials = 0
        if view.stack.num_shards > 1 or layout.axes.replicas > 1:
            num_rows, partials = _count(packed, view, part, replicas)
        counted.append(dataclasses.replace(one, row_capacity=num_rows, partials=partials))
    return dataclasses.replace(natural, stacks=tuple(counted))


def _count(
    packed: np.ndarray, view: StackView, part: Part, replicas: np.ndarray
) -> tuple[int, int]:
    """Return the largest number of distinct rows, and of partial sums, over (device, shard).

    A partial sum is the summed gradient of one row over one block of the batch. So the number of
    partial sums is the number of distinct (row, block) pairs.
    """
    row_ids, examples = packed_row_ids(packed, view, part)
    stack, layout, spec = view.stack, view.layout, view.spec
    batch = spec.local_batch * layout.axes.replicas
    # Without accumulation nothing is summed: the gradient of every id is sent by itself.
    if stack.optimizer is not None and not stack.optimizer.use_gradient_accumulation:
        distinct = _runs_per_shard(np.sort(row_ids, axis=1), stack)
        return distinct, _ids_per_shard(row_ids, stack)
    # If a device's examples are in one block, each distinct row has one partial sum.
    if layout.blocks_per_device(batch) == 1:
        distinct = _runs_per_shard(np.sort(row_ids, axis=1), stack)
        return distinct, distinct
    # Number of an example in the global batch -> its block; see `Layout.blocks`. The examples of
    # padding may lie beyond the last block, so the number of blocks is counted.
    numbers = replicas[:, None].astype(np.int64) * spec.local_batch + examples
    block = numbers * layout.blocks(batch) // batch
    blocks = int(block.max()) + 1
    # One key for (row, block), which sorts by row, then block: row 3, block 1 of 4 is 13. Divided
    # by `blocks` it is the row again. Padding (row -1) has negative keys.
    both = np.sort(row_ids.astype(np.int64) * blocks + block, axis=1)
    partials = _runs_per_shard(both, stack, blocks)
    return _runs_per_shard(both // blocks, stack), partials


def _runs_per_shard(ordered: np.ndarray, stack: Stack, scale: int = 1) -> int:
    """Return the largest number of distinct values of one line that belong to one shard.

    Args:
      ordered: `[replicas, N]`, each line sorted: physical rows, or row · scale + block.
      stack: the stack.
      scale: the factor of the rows.
    """
    # With R = 10, S = 2: the line -1 4 7 7 13 has the distinct values -1 4 7 13. The bounds
    # 0 10 20 stand at 1 3 4 among them, so 2 and 1 values belong to the shards; -1 to none.
    bounds = np.arange(stack.num_shards + 1, dtype=np.int64) * (stack.num_rows * scale)
    most = 0
    for line in ordered:
        starts = np.flatnonzero(line[1:] != line[:-1]) + 1
        distinct = np.concatenate([line[:1], line[starts]])
        most = max(most, int(np.diff(np.searchsorted(distinct, bounds)).max()))
    return most


def _ids_per_shard(row_ids: np.ndarray, stack: Stack) -> int:
    """Return the largest number of ids of one line that belong to one shard, with duplicates."""
    most = 0
    for line in row_ids:
        shard = line[line >= 0] // stack.num_rows
        most = max(most, int(np.bincount(shard, minlength=1).max()))
    return most

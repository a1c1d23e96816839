"""Exact exchange capacities of a batch: nothing is ever dropped, and shapes stay static.

Enters: the packed rows of one batch. Leaves: how many distinct rows, and how many partial sums, the
fullest (device, shard) pair exchanges. Called by `place.py`.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tpu_embed.core.batch.packing import packed_rows
from tpu_embed.core.batch.spec import BatchSpec
from tpu_embed.core.layout import Layout, Stack


def with_capacities(
    packed: np.ndarray,
    natural: BatchSpec,
    packed_as: BatchSpec,
    layout: Layout,
    replicas: np.ndarray,
) -> BatchSpec:
    """Return the exact spec of a batch: its own forms and ids, and the exchange capacities counted.

    Args:
      packed: the batch, int32 `[replicas, L]`.
      natural: its own forms and numbers of ids.
      packed_as: the spec it was packed in.
      layout: the engine's.
      replicas: the number of every line's replica in the global batch.
    """
    counted = []
    for g, (stack, one) in enumerate(zip(layout.stacks, natural.stacks, strict=True)):
        rows = partials = 0
        if stack.num_shards > 1 or layout.axes.replicas > 1:
            rows, partials = _count(packed, packed_as, layout, g, replicas)
        counted.append(dataclasses.replace(one, row_capacity=rows, partials=partials))
    return dataclasses.replace(natural, stacks=tuple(counted))


def _count(
    packed: np.ndarray, spec: BatchSpec, layout: Layout, g: int, replicas: np.ndarray
) -> tuple[int, int]:
    """Return the largest number of distinct rows, and of partial sums, over (device, shard)."""
    rows, examples = packed_rows(packed, spec, layout, g)
    stack, batch = layout.stacks[g], spec.local_batch * layout.axes.replicas
    if stack.optimizer is not None and not stack.optimizer.use_gradient_accumulation:
        distinct = _runs_per_shard(np.sort(rows, axis=1), stack)
        return distinct, _ids_per_shard(rows, stack)
    if layout.blocks_per_device(batch) == 1:
        distinct = _runs_per_shard(np.sort(rows, axis=1), stack)
        return distinct, distinct
    numbers = replicas[:, None].astype(np.int64) * spec.local_batch + examples
    block = numbers * layout.blocks(batch) // batch
    blocks = int(block.max()) + 1  # padding lies after the last
    both = np.sort(rows.astype(np.int64) * blocks + block, axis=1)
    partials = _runs_per_shard(both, stack, blocks)
    return _runs_per_shard(both // blocks, stack), partials


def _runs_per_shard(ordered: np.ndarray, stack: Stack, scale: int = 1) -> int:
    """Return the most runs that fall to one shard, of sorted `[replicas, N]` rows times `scale`."""
    bounds = np.arange(stack.num_shards + 1, dtype=np.int64) * (stack.num_rows * scale)
    most = 0
    for line in ordered:
        starts = np.flatnonzero(line[1:] != line[:-1]) + 1
        distinct = np.concatenate([line[:1], line[starts]])
        most = max(most, int(np.diff(np.searchsorted(distinct, bounds)).max()))
    return most


def _ids_per_shard(rows: np.ndarray, stack: Stack) -> int:
    """Return the most ids, duplicates counted, of one device that fall to one shard."""
    most = 0
    for line in rows:
        shard = line[line >= 0] // stack.num_rows
        most = max(most, int(np.bincount(shard, minlength=1).max()))
    return most

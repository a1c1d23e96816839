"""Update a row once for every occurrence of its id: the way without gradient accumulation.

If an id occurs three times in a batch, the optimizer's rule runs three times on its row, in order
of sums. To do many rows at a time, occurrences are taken in rounds: round k has the k-th occurrence
of every row that has one, so the rows of a round are all different. A round is applied in chunks of
fixed size. The work is proportional to the number of occurrences, plus one chunk per round.

Input: ids sorted by row, in the order of sums, and the gradients of their bags. Output: the updated
shard.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_embed._types import PADDING_ID, Array, ArrayLike
from tpu_embed.core.batch import LocalIds
from tpu_embed.core.exchange import RowSums, device_route
from tpu_embed.core.layout import ROW_MULTIPLE, Stack
from tpu_embed.core.state import StackShard
from tpu_embed.core.update.apply import apply_rule
from tpu_embed.kernels import dispatch
from tpu_embed.kernels.operands import RowsToSum, SumLayout

CHUNK = 4 * ROW_MULTIPLE
"""Rows that are updated at a time."""


def apply_each(
    held: StackShard,
    ids: LocalIds,
    gradients: Array,
    stack: Stack,
    step: Array,
    learning_rate: ArrayLike,
) -> StackShard:
    """Return the shard after one update per occurrence.

    Args:
      held: this device's shard.
      ids: sorted by row, in the order of sums; their rows are local ones.
      gradients: of the bags, `[bags, D]`.
      stack: the stack.
      step: int32 `[]`, t, the same for all occurrences.
      learning_rate: scalar.
    """
    ordered = _by_round(ids, stack)
    count = jnp.sum(ordered[1].index < stack.num_rows, dtype=jnp.int32)
    # Padded by one chunk, so that a slice that starts at the last occurrence stays inside.
    # What is beyond it belongs to no round, whatever its numbers.
    ordered = jax.tree.map(lambda x: jnp.pad(x, (0, CHUNK)), ordered)
    one_each = jax.lax.iota(jnp.int32, CHUNK)

    def one_chunk(carry: tuple[Array, StackShard]) -> tuple[Array, StackShard]:
        start, held = carry
        number, here = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, start, CHUNK), ordered
        )
        # Apply the entries of the first one's round, and start the next chunk after them: rounds
        # (0, 0, 0, 1, 1) in chunks of 4 are applied as (0, 0, 0), then (1, 1).
        now = (number == number[0]) & (start + one_each < count)
        rows = RowsToSum(gradients, here.bags, one_each, here.gains)
        (values,) = dispatch.gather_sum(rows, SumLayout((CHUNK,)))
        chosen = RowSums(jnp.where(now, here.index, PADDING_ID), values)
        updated = apply_rule(held, chosen, stack, step, learning_rate)
        return start + jnp.sum(now, dtype=jnp.int32), updated

    return jax.lax.while_loop(lambda carry: carry[0] < count, one_chunk, (jnp.int32(0), held))[1]


def _by_round(ids: LocalIds, stack: Stack) -> tuple[Array, LocalIds]:
    """Return occurrences in the order in which they are applied: by round, then by row.

    Returns:
      int32 `[M]`, the round of each; the occurrences, with R for absent rows, which come last.
    """
    # Rows (3, 7, 7, 7): their runs start at 0 and 1, so the rounds are position - start = (0, 0, 1,
    # 2): each row's occurrences, counted.
    rows = jnp.where(ids.index < 0, stack.num_rows, ids.index)
    positions = jnp.arange(rows.size, dtype=jnp.int32)
    starts = jax.lax.cummax(jnp.where(device_route.changes(rows), positions, 0))
    rounds = jnp.where(rows < stack.num_rows, positions - starts, rows.size)
    leaves, structure = jax.tree.flatten((rounds, LocalIds(rows, ids.bags, ids.gains)))
    return structure.unflatten(jax.lax.sort(leaves, num_keys=2, is_stable=True))

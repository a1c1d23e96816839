"""Update a row once for every occurrence of its id: the way without gradient accumulation.

If an id occurs three times in a batch, the optimizer's rule runs three times on its row, in order
of sums. To do many rows at a time, occurrences are taken in rounds: round k has the k-th occurrence
of every row that has one, so the rows of a round are all different. A round is applied in chunks of
fixed size. The work is proportional to the number of occurrences, plus one chunk per round.

Input: ids sorted by row, in the order of sums, and the gradients of their bags. Output: the updated
shard.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tpu_embed._types import PADDING_ID, Array, ArrayLike
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
    ids: device_route.SortedIds,
    gradients: Array,
    stack: Stack,
    step: Array,
    learning_rate: ArrayLike,
) -> StackShard:
    """Return the shard after one update per occurrence.

    Args:
      held: this device's shard.
      ids: local rows.
      gradients: of the bags, `[bags, D]`.
      stack: the stack.
      step: int32 `[]`, t, the same for all occurrences.
      learning_rate: scalar.
    """
    ordered = _by_round(ids, stack)
    count = jnp.sum(ordered.row_ids < stack.num_rows, dtype=jnp.int32)
    # Padded by one chunk, so that a slice that starts at the last occurrence stays inside.
    # What is beyond it belongs to no round, whatever its numbers.
    ordered = jax.tree.map(lambda x: jnp.pad(x, (0, CHUNK)), ordered)
    one_each = jax.lax.iota(jnp.int32, CHUNK)

    def one_chunk(carry: tuple[Array, StackShard]) -> tuple[Array, StackShard]:
        start, held = carry
        here: _Rounds = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, start, CHUNK), ordered
        )
        # Apply the entries of the first one's round, and start the next chunk after them: rounds
        # (0, 0, 0, 1, 1) in chunks of 4 are applied as (0, 0, 0), then (1, 1).
        now = (here.number == here.number[0]) & (start + one_each < count)
        rows = RowsToSum(gradients, here.bags, one_each, here.gains)
        (values,) = dispatch.gather_sum(rows, SumLayout((CHUNK,)))
        chosen = RowSums(jnp.where(now, here.row_ids, PADDING_ID), values)
        updated = apply_rule(held, chosen, stack, step, learning_rate)
        return start + jnp.sum(now, dtype=jnp.int32), updated

    return jax.lax.while_loop(lambda carry: carry[0] < count, one_chunk, (jnp.int32(0), held))[1]


class _Rounds(NamedTuple):
    """Occurrences in the order in which they are applied: by round, then by row.

    Attributes:
      number: int32 `[M]`, the round of each.
      row_ids: local rows `[M]`; the number of all rows for absent ones, which come last.
      bags: int32 `[M]`.
      gains: float `[M]`; None: all ones.
    """

    number: Array
    row_ids: Array
    bags: Array
    gains: Array | None


def _by_round(ids: device_route.SortedIds, stack: Stack) -> _Rounds:
    """Return the occurrences in their rounds."""
    # Rows (3, 7, 7, 7): their runs start at 0 and 1, so the rounds are position - start = (0, 0, 1,
    # 2): each row's occurrences, counted.
    rows = jnp.where(ids.row_ids < 0, stack.num_rows, ids.row_ids)
    positions = jnp.arange(rows.size, dtype=jnp.int32)
    starts = jax.lax.cummax(jnp.where(device_route.changes(rows), positions, 0))
    rounds = jnp.where(rows < stack.num_rows, positions - starts, rows.size)
    given = _Rounds(rounds, rows, ids.bags, ids.gains)
    leaves, structure = jax.tree.flatten(given)
    return structure.unflatten(jax.lax.sort(leaves, num_keys=2, is_stable=True))

"""Update a row once for every occurrence of its id: the way without gradient accumulation.

If an id occurs three times in a batch, the optimizer's rule runs three times on its row, in order
of sums. To do many rows at a time, occurrences are taken in rounds: round k has the k-th occurrence
of every row that has one, so the rows of a round are all different. A round is applied in chunks of
fixed size. The work is proportional to the number of occurrences, plus one chunk per round.

Input: rows with one gradient per occurrence, in the order of sums. Output: the updated shard.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_embed._types import PADDING_ID, Array, ArrayLike
from tpu_embed.core.exchange import RowSums, number_runs
from tpu_embed.core.layout import ROW_MULTIPLE, Stack
from tpu_embed.core.state import StackShard
from tpu_embed.core.update.apply import apply_rule
from tpu_embed.kernels import dispatch

CHUNK = 4 * ROW_MULTIPLE
"""Rows that are updated at a time."""


def apply_each(
    held: StackShard, received: RowSums, stack: Stack, step: Array, learning_rate: ArrayLike
) -> StackShard:
    """Return the shard after one update per occurrence.

    Args:
      held: this device's shard.
      received: local rows `[M]` in the order of sums, one entry per occurrence; gradients `[M, D]`.
      stack: the stack.
      step: int32 `[]`, t, the same for all occurrences.
      learning_rate: scalar.
    """
    rounds, row_ids, order = _by_round(
        jnp.where(received.row_ids < 0, stack.num_rows, received.row_ids), stack
    )
    count = jnp.sum(row_ids < stack.num_rows, dtype=jnp.int32)
    # Padded by one chunk, so that a slice that starts at the last occurrence stays inside. Round -1
    # belongs to no occurrence.
    rounds = jnp.pad(rounds, (0, CHUNK), constant_values=-1)
    row_ids = jnp.pad(row_ids, (0, CHUNK), constant_values=stack.num_rows)
    order = jnp.pad(order, (0, CHUNK))

    def one_chunk(carry: tuple[Array, StackShard]) -> tuple[Array, StackShard]:
        start, held = carry
        here, there, sources = (
            jax.lax.dynamic_slice_in_dim(x, start, CHUNK) for x in (rounds, row_ids, order)
        )
        # Apply the entries of the first one's round, and start the next chunk after them: rounds
        # (0, 0, 0, 1, 1) in chunks of 4 are applied as (0, 0, 0), then (1, 1).
        now = (here == here[0]) & (there < stack.num_rows)
        chosen = RowSums(jnp.where(now, there, PADDING_ID), received.sums[sources])
        updated = apply_rule(held, chosen, stack, step, learning_rate)
        return start + jnp.sum(now, dtype=jnp.int32), updated

    return jax.lax.while_loop(lambda carry: carry[0] < count, one_chunk, (jnp.int32(0), held))[1]


def _by_round(row_ids: Array, stack: Stack) -> tuple[Array, Array, Array]:
    """Return round, row and position of every occurrence, sorted by round, then by row.

    Args:
      row_ids: local rows `[M]` in the order of sums; `stack.num_rows` for absent ones, which come
        last.
      stack: the stack.
    """
    # Rows (7, 3, 7, 7) sort to (3, 7, 7, 7) from positions (1, 0, 2, 3). Their runs start at 0 and
    # 1, so the rounds are position - start = (0, 0, 1, 2): each row's occurrences, counted.
    ordered, order = dispatch.sort_rows(row_ids)
    runs = number_runs(ordered, stack.num_rows)
    positions = jnp.arange(row_ids.shape[0], dtype=jnp.int32)
    size = row_ids.shape[0]
    starts = jnp.full((size,), size, jnp.int32).at[runs.run].min(positions)
    rounds = jnp.where(ordered < stack.num_rows, positions - starts[runs.run], size)
    return jax.lax.sort((rounds, ordered, order), num_keys=2, is_stable=True)  # type: ignore[return-value]

"""Without gradient accumulation: every occurrence of an id updates its row by itself.

Enters: rows with one gradient an occurrence, in batch order. Leaves: the updated shard. Called by
`update.py`.

Occurrences are taken in rounds, the k-th round holding each row's k-th; a round is applied in
chunks of distinct rows. The work is proportional to the occurrences, plus a chunk a round.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_embed._types import PADDING_ID, Array, ArrayLike
from tpu_embed.core.exchange import RowSums, dedup
from tpu_embed.core.layout import ROW_MULTIPLE, Stack
from tpu_embed.core.state import StackShard
from tpu_embed.core.update.apply import apply_rule

CHUNK = 4 * ROW_MULTIPLE
"""Rows updated at a time."""


def apply_each(
    held: StackShard, received: RowSums, stack: Stack, step: Array, learning_rate: ArrayLike
) -> StackShard:
    """Apply one update an occurrence.

    Args:
      held: this device's shard.
      received: rows `[M]` in batch order, a row as often as it occurs; gradients `[M, D]`.
      stack: the stack.
      step: int32 `[]`, t, the same for all.
      learning_rate: scalar.
    """
    rounds, rows, order = _by_round(
        jnp.where(received.row_ids < 0, stack.num_rows, received.row_ids), stack
    )
    count = jnp.sum(rows < stack.num_rows, dtype=jnp.int32)
    rounds = jnp.pad(rounds, (0, CHUNK), constant_values=-1)
    rows = jnp.pad(rows, (0, CHUNK), constant_values=stack.num_rows)
    order = jnp.pad(order, (0, CHUNK))

    def one_chunk(carry: tuple[Array, StackShard]) -> tuple[Array, StackShard]:
        start, held = carry
        here, there, sources = (
            jax.lax.dynamic_slice_in_dim(x, start, CHUNK) for x in (rounds, rows, order)
        )
        now = (here == here[0]) & (there < stack.num_rows)
        chosen = RowSums(jnp.where(now, there, PADDING_ID), received.sums[sources])
        updated = apply_rule(held, chosen, stack, step, learning_rate)
        return start + jnp.sum(now, dtype=jnp.int32), updated

    return jax.lax.while_loop(lambda carry: carry[0] < count, one_chunk, (jnp.int32(0), held))[1]


def _by_round(rows: Array, stack: Stack) -> tuple[Array, Array, Array]:
    """Return round, row and position of every occurrence, by round, then row; absent ones last."""
    runs = dedup.find_runs(rows, stack.num_rows)
    positions = jnp.arange(rows.shape[0], dtype=jnp.int32)
    size = rows.shape[0]
    starts = jnp.full((size,), size, jnp.int32).at[runs.run].min(positions)
    rounds = jnp.where(runs.row_ids < stack.num_rows, positions - starts[runs.run], size)
    return jax.lax.sort((rounds, runs.row_ids, runs.order), num_keys=2, is_stable=True)  # type: ignore[return-value]

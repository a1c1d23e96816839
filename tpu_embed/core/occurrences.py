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
from tpu_embed.core import dedup
from tpu_embed.core.apply import TableRows, apply_rule
from tpu_embed.core.layout import ROW_MULTIPLE, Group
from tpu_embed.core.route import RowSums

CHUNK = 4 * ROW_MULTIPLE
"""Rows updated at a time."""


def apply_each(
    held: TableRows, received: RowSums, group: Group, step: Array, learning_rate: ArrayLike
) -> TableRows:
    """Apply one update an occurrence.

    Args:
      held: this device's shard.
      received: rows `[M]` in batch order, a row as often as it occurs; gradients `[M, D]`.
      group: the stack.
      step: int32 `[]`, t, the same for all.
      learning_rate: scalar.
    """
    rounds, rows, order = _by_round(jnp.where(received.rows < 0, group.rows, received.rows), group)
    count = jnp.sum(rows < group.rows, dtype=jnp.int32)
    rounds = jnp.pad(rounds, (0, CHUNK), constant_values=-1)
    rows = jnp.pad(rows, (0, CHUNK), constant_values=group.rows)
    order = jnp.pad(order, (0, CHUNK))

    def one_chunk(carry: tuple[Array, TableRows]) -> tuple[Array, TableRows]:
        start, held = carry
        here, there, sources = (
            jax.lax.dynamic_slice_in_dim(x, start, CHUNK) for x in (rounds, rows, order)
        )
        now = (here == here[0]) & (there < group.rows)
        chosen = RowSums(jnp.where(now, there, PADDING_ID), received.sums[sources])
        updated = apply_rule(held, chosen, group, step, learning_rate)
        return start + jnp.sum(now, dtype=jnp.int32), updated

    return jax.lax.while_loop(lambda carry: carry[0] < count, one_chunk, (jnp.int32(0), held))[1]


def _by_round(rows: Array, group: Group) -> tuple[Array, Array, Array]:
    """Return round, row and position of every occurrence, by round, then row; absent ones last."""
    runs = dedup.find_runs(rows, group.rows)
    positions = jnp.arange(rows.shape[0], dtype=jnp.int32)
    size = rows.shape[0]
    starts = jnp.full((size,), size, jnp.int32).at[runs.run].min(positions)
    rounds = jnp.where(runs.rows < group.rows, positions - starts[runs.run], size)
    return jax.lax.sort((rounds, runs.rows, runs.order), num_keys=2, is_stable=True)  # type: ignore[return-value]

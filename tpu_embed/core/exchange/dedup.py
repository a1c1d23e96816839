"""Find duplicate row ids by sorting: equal ids become neighbours, a "run".

A row that occurs many times in a batch should cross the network once. With the row ids 7 3 7 9,
where 9 stands for "absent":

    order        1 0 2 3     positions in sorted order
    row_ids      3 7 7 9     the sorted row ids
    run          0 1 1 2     the run of each sorted entry
    run_row_ids  3 7 9 9     the row id of each run, then `absent`

Input: row ids `[N]`; an absent row has the id `absent`, which is larger than every other. Output:
`Runs`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from tpu_embed._types import Array
from tpu_embed.kernels import dispatch


class Runs(NamedTuple):
    """Runs of equal row ids.

    Attributes:
      order: int32 `[N]`, the positions of the entries, sorted by row id; equal ids stay in their
        order of appearance.
      row_ids: `[N]`, the row ids in that order.
      run: int32 `[N]`, the number of the run of each sorted entry, from 0.
      run_row_ids: `[N]`, the row id of each run; `absent` after the last run.
    """

    order: Array
    row_ids: Array
    run: Array
    run_row_ids: Array


def find_runs(row_ids: Array, absent: int, parts: Array | None = None) -> Runs:
    """Sort row ids and number their runs.

    Args:
      row_ids: integer `[N]` in [0, absent].
      absent: the id of absent rows; they come last.
      parts: integer `[N]`, or None. Entries with the same row id but different parts belong to
        different runs. Entries of the same part must be neighbours among those of a row.
    """
    # The sort is stable, so parts that are in order in the batch are in order within each row.
    ordered, order = dispatch.sort_rows(row_ids)
    return _number_runs(ordered, order, absent, None if parts is None else parts[order])


def runs_of_sorted(row_ids: Array, absent: int) -> Runs:
    """Number the runs of row ids that are in ascending order already."""
    return _number_runs(row_ids, jnp.arange(row_ids.shape[0], dtype=jnp.int32), absent, None)


def _number_runs(ordered: Array, order: Array, absent: int, parts: Array | None) -> Runs:
    # ordered 3 7 7 9: first 1 1 0 1, run 0 1 1 2, run_row_ids 3 7 9 9. Entries of one run write
    # the same row id to the same place.
    first = _changes(ordered) if parts is None else _changes(ordered) | _changes(parts)
    run = jnp.cumsum(first.astype(jnp.int32)) - 1
    run_row_ids = jnp.full_like(ordered, absent).at[run].set(ordered, indices_are_sorted=True)
    return Runs(order, ordered, run, run_row_ids)


def _changes(x: Array) -> Array:
    """Tell, bool `[N]`, where an entry differs from the one before it; True for the first."""
    return jnp.concatenate([jnp.ones((1,), bool), x[1:] != x[:-1]])

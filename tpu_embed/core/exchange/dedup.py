"""Duplicate rows become one: runs of equal rows in sorted order.

Enters: rows `[N]`, absent ones numbered `absent`, the largest number. Leaves: the runs. Called by
`route.py` for the ids of one device, and again for the partial sums that reach an owner; by
`occurrences.py` to number the occurrences of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from tpu_embed._types import Array
from tpu_embed.kernels import dispatch


class Runs(NamedTuple):
    """Runs of equal rows.

    Attributes:
      order: int32 `[N]`, the position of every entry in row order; equal rows in their order of
        appearance.
      row_ids: `[N]`, the rows in that order.
      run: int32 `[N]`, the run of every entry, from 0.
      run_row_ids: `[N]`, the row of every run, `absent` after the last one.
    """

    order: Array
    row_ids: Array
    run: Array
    run_row_ids: Array


def find_runs(rows: Array, absent: int, parts: Array | None = None) -> Runs:
    """Sort rows and number their runs.

    Args:
      rows: integer `[N]` in [0, absent].
      absent: the number of absent rows; they come last.
      parts: integer `[N]`, or None: entries of one row but of different parts are different runs.
    """
    ordered, order = dispatch.sort_rows(rows)
    return _number_runs(ordered, order, absent, None if parts is None else parts[order])


def runs_of_sorted(rows: Array, absent: int) -> Runs:
    """Number the runs of rows that are in ascending order already."""
    return _number_runs(rows, jnp.arange(rows.shape[0], dtype=jnp.int32), absent, None)


def _number_runs(ordered: Array, order: Array, absent: int, parts: Array | None) -> Runs:
    first = _changes(ordered) if parts is None else _changes(ordered) | _changes(parts)
    run = jnp.cumsum(first.astype(jnp.int32)) - 1
    run_rows = jnp.full_like(ordered, absent).at[run].set(ordered, indices_are_sorted=True)
    return Runs(order, ordered, run, run_rows)


def _changes(x: Array) -> Array:
    return jnp.concatenate([jnp.ones((1,), bool), x[1:] != x[:-1]])

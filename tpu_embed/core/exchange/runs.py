"""Number the runs of sorted row ids: equal ids are neighbours there, a "run".

A row that occurs many times in a batch should cross the network once. With the sorted row ids
3 7 7 9, where 9 stands for "absent":

    run          0 1 1 2     the run of each entry
    run_row_ids  3 7 9 9     the row id of each run, then `absent`

Input: sorted row ids `[N]`; an absent row has the id `absent`, which is larger than every other.
Output: `Runs`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from tpu_embed._types import Array
from tpu_embed.kernels import dispatch


class Runs(NamedTuple):
    """Runs of equal row ids.

    Attributes:
      run: int32 `[N]`, the number of the run of each entry, from 0.
      run_row_ids: `[N]`, the row id of each run; `absent` after the last run.
    """

    run: Array
    run_row_ids: Array


def number_runs(row_ids: Array, absent: int, parts: Array | None = None) -> Runs:
    """Number the runs of sorted row ids.

    Args:
      row_ids: integer `[N]` in [0, absent], ascending.
      absent: the id of absent rows.
      parts: integer `[N]`, or None. Entries with the same row id but different parts belong to
        different runs. Entries of the same part must be neighbours among those of a row.
    """
    # row_ids 3 7 7 9: first 1 1 0 1, run 0 1 1 2; the first entries of the runs have the ids 3 7 9.
    first = _changes(row_ids) if parts is None else _changes(row_ids) | _changes(parts)
    run = jnp.cumsum(first.astype(jnp.int32)) - 1
    return Runs(run, dispatch.compact(row_ids, first, absent))


def _changes(x: Array) -> Array:
    """Tell, bool `[N]`, where an entry differs from the one before it; True for the first."""
    return jnp.concatenate([jnp.ones((1,), bool), x[1:] != x[:-1]])

"""Put rows together that several processes have read, each those on its devices or at home in it.

Input: the rows that this process has read. Output: those of all processes, in every process.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from tpu_embed.core.layout import MeshAxes
from tpu_embed.core.state import Field
from tpu_embed.processes import gather_bytes
from tpu_embed.storage import RowField


def gather_rows(
    what: str,
    fields: Mapping[str, RowField],
    n: int,
    mine: np.ndarray,
    read: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Return n rows, `[n, …]` by field, of which each process has read some.

    Args:
      what: the call, for messages.
      fields: what a row has.
      n: how many rows there are.
      mine: int64 `[m]`, which of them this process has read.
      read: these, `[m, …]` by field.
    """
    rows = {part: np.empty((n, *one.shape), one.dtype) for part, one in fields.items()}
    said = gather_bytes(
        what, b"".join([mine.tobytes(), *(read[part].tobytes() for part in fields)])
    )
    width = 8 + sum(one.nbytes for one in fields.values())
    for some in said:
        # The numbers of m rows, then one field of all m after the other.
        m = len(some) // width
        at, end = np.frombuffer(some, np.int64, m), 8 * m
        for part, one in fields.items():
            values = np.frombuffer(some[end : end + m * one.nbytes], one.dtype)
            rows[part][at], end = values.reshape(m, *one.shape), end + m * one.nbytes
    return rows


def rows_to_send(axes: MeshAxes, f: Field, rows: np.ndarray) -> np.ndarray | None:
    """Return which rows this process reads for all, int64 `[m]`; None: each process has all rows.

    Of several processes that hold a row, the first one does.

    Args:
      axes: the mesh.
      f: the table, or a slot of it.
      rows: int64 `[n]`, logical rows on the devices.
    """
    holders = axes.processes_of_parts(f.stack.shard_axes)
    if len(frozenset.intersection(*holders)) == len(frozenset.union(*holders)):
        return None
    first = np.array([min(processes) for processes in holders])
    shards = f.stack.physical(rows, f.table) // f.stack.num_rows
    return np.flatnonzero(first[shards] == jax.process_index())

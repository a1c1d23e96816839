"""Sort rows by the shard that has them, so that each device gets a parcel with its own.

Few sizes are used, so that few programs are compiled: the parcels of a stack have room for a
rounded number of rows each, and what is left over is marked as absent.

Input: logical rows by table. Output: arrays `[S, m, …]`, one line per shard.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.layout.rounding import ROW_MULTIPLE
from tpu_embed.core.layout.stacks import Stack

_HALF = np.uint64(32)


class Parcels:
    """Where each of some rows of a stack stands in parcels for its shards.

    Args:
      stack: the stack.
      rows: int64 `[n]` by table, its logical rows, all different.

    Attributes:
      size: m, the rows that a parcel has room for.
      counts: n by table, in the order of the stack's tables.
    """

    def __init__(self, stack: Stack, rows: Mapping[str, np.ndarray]) -> None:
        self._stack = stack
        chosen = [(i, t) for i, t in enumerate(stack.tables) if t.name in rows]
        self.counts = {t.name: rows[t.name].size for _, t in chosen}
        physical = [np.zeros(0, np.int64), *(stack.physical(rows[t.name], t) for _, t in chosen)]
        numbers = [np.full(rows[t.name].size, i, np.uint64) for i, t in chosen]
        self._numbers = np.concatenate([np.zeros(0, np.uint64), *numbers])
        # Physical rows 1 6 4 of shards with 4 rows: shard 0 gets 1, shard 1 the local rows 0 2.
        whole = np.concatenate(physical)
        self._order = np.argsort(whole)
        self._shards, self._local = np.divmod(whole[self._order], stack.num_rows)
        counts = np.bincount(self._shards, minlength=stack.num_shards)
        self._places = np.arange(whole.size) - np.repeat(np.cumsum(counts) - counts, counts)
        self.size = _bucket(int(counts.max()))

    def packed(self, values: np.ndarray, fill: int = 0) -> np.ndarray:
        """Return `[S, m, …]`: values `[n, …]`, given table after table, in the parcels."""
        made = np.full((self._stack.num_shards, self.size, *values.shape[1:]), fill, values.dtype)
        made[self._shards, self._places] = values[self._order]
        return made

    def unpacked(self, parcels: np.ndarray) -> dict[str, np.ndarray]:
        """Return what parcels `[S, m, …]` have of each table, `[n, …]` in the order given."""
        values = np.empty((self._order.size, *parcels.shape[2:]), parcels.dtype)
        values[self._order] = parcels[self._shards, self._places]
        ends = np.cumsum([0, *self.counts.values()])
        named = zip(self.counts, ends, ends[1:], strict=False)
        return {name: values[first:last] for name, first, last in named}

    def rows(self) -> np.ndarray:
        """Return the local rows, ascending, uint32 `[S, 2, m]` in two halves; absent: all bits."""
        return self._halves([self._local.astype(np.uint64)])

    def keyed(self, keys: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return local rows, numbers of tables and keys, uint32 `[S, 5, m]`; see `open_keyed`.

        Args:
          keys: uint64 `[n]` by table.
        """
        some = np.concatenate([np.zeros(0, np.uint64), *(keys[name] for name in self.counts)])
        local, number = self._local.astype(np.uint64), self._numbers[self._order]
        made = self._halves([local, some[self._order]])
        tables = np.full((len(made), 1, self.size), PADDING_ID).astype(np.uint32)
        tables[self._shards, 0, self._places] = number
        return np.concatenate([made[:, :2], tables, made[:, 2:]], axis=1)

    def _halves(self, columns: list[np.ndarray]) -> np.ndarray:
        """Return uint32 `[S, 2 · columns, m]`, the low and the high half of each column."""
        shape = self._stack.num_shards, 2 * len(columns), self.size
        made = np.full(shape, PADDING_ID).astype(np.uint32)
        halves = [half for column in columns for half in (column, column >> _HALF)]
        for i, half in enumerate(halves):
            made[self._shards, i, self._places] = half & np.uint64(2**32 - 1)
        return made


def open_rows(halves: Array, stack: Stack) -> Array:
    """Return local rows `[m]` from their halves, uint32 `[2, m]`; `PADDING_ID` for none."""
    low, high = halves
    if stack.index_dtype == np.int32:
        return jax.lax.bitcast_convert_type(low, jnp.int32)
    return jax.lax.bitcast_convert_type(jnp.stack([low, high], axis=-1), jnp.int64)


def _bucket(n: int) -> int:
    """Return a size that has room for n rows."""
    # 1, 2, 3, 4, 6, 8, 12, … times `ROW_MULTIPLE`.
    units = max(1, -(-n // ROW_MULTIPLE))
    power = 1 << (units - 1).bit_length()
    return ROW_MULTIPLE * (power * 3 // 4 if power >= 4 and units <= power * 3 // 4 else power)

"""Rows that are sent to the devices: sorted by the shard that has them, each device's in a parcel.

Few sizes are used, so that few programs are compiled: the parcels of a stack have room for a
rounded number of rows each, and what is left over is marked as absent. With several processes, each
fills the lines of its own shards; they agree on the size.

A training batch brings the rows of tables on the host that it gives places on the devices. They are
read from home straight to where they stand in the parcels: nothing is copied between. A batch that
is only looked up moves nothing. It brings its rows along (`Visits`).

Input: logical rows by table; what the maps did with a batch. Output: arrays `[S, m, …]`, one line
per shard.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

from tpu_embed._types import Array
from tpu_embed.core.layout.stacks import ROW_MULTIPLE, Stack
from tpu_embed.storage import Homes, Room, RowGroups
from tpu_embed.vocabulary import NewOwners, Taken

BY_ID = np.uint32(2**31)
"""Added to the number of a table: the row is that of an id, not of a key."""

_HALF = np.uint64(32)
_ABSENT = np.uint32(2**32 - 1)
_LINE = 64
"""Bytes: arrays that begin at a multiple of this are not copied on their way to a CPU device."""


class Parcels:
    """Where each of some rows of a stack stands in parcels for its shards.

    Args:
      stack: the stack.
      rows: int64 `[n]` by table, its logical rows, all different.
      least: m is what this many rows in one parcel need, at least.

    Attributes:
      size: m, the rows that a parcel has room for.
      at: int64 `[n]`, the place of each row, table after table, among the S · m of all parcels.
      parts: by table, which of the n rows are its own.
    """

    def __init__(
        self, stack: Stack, rows: Mapping[str, np.ndarray], least: int = 0
    ) -> None:
        self._stack = stack
        chosen = [(i, t) for i, t in enumerate(stack.tables) if t.name in rows]
        physical = [
            np.zeros(0, np.int64),
            *(stack.physical(rows[t.name], t) for _, t in chosen),
        ]
        self._numbers = [(i, rows[t.name].size) for i, t in chosen]
        ends = np.cumsum([0, *(n for _, n in self._numbers)]).tolist()
        self.parts = {
            t.name: slice(*ends[i : i + 2]) for i, (_, t) in enumerate(chosen)
        }
        # Physical rows 1 6 4 of shards with 4 rows: shard 0 gets 1, shard 1 the local rows 0 2.
        whole = np.concatenate(physical)
        order = np.argsort(whole)  # all are different
        self.at = np.empty(whole.size, np.int64)
        firsts = np.arange(stack.num_shards + 1) * stack.num_rows
        begins = np.searchsorted(whole[order], firsts)
        counts = np.diff(begins)
        self.size, self._local = (
            _bucket(max(int(counts.max()), least)),
            whole % stack.num_rows,
        )
        # Of the rows in order, those of shard s, from begins[s] on, have the places s · m, ….
        shift = np.arange(stack.num_shards) * self.size - begins[:-1]
        self.at[order] = np.arange(whole.size) + np.repeat(shift, counts)

    def room(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array `[S, m, …]` for rows of a shape, of which no number is set."""
        return aligned_empty(
            (self._stack.num_shards, self.size, *shape), np.dtype(dtype)
        )

    def packed(self, values: np.ndarray) -> np.ndarray:
        """Return `[S, m, …]`: values `[n, …]`, given table after table, in the parcels."""
        made = np.zeros(
            (self._stack.num_shards, self.size, *values.shape[1:]), values.dtype
        )
        lines(made)[self.at] = values
        return made

    def unpacked(self, parcels: np.ndarray) -> dict[str, np.ndarray]:
        """Return what parcels `[S, m, …]` have of each table, `[n, …]` in the order given."""
        values = lines(parcels)[self.at]
        return {name: values[part] for name, part in self.parts.items()}

    def rows(self, chosen: Any = slice(None)) -> np.ndarray:
        """Return the local rows, ascending, uint32 `[S, 2, m]` in two halves; absent: all bits.

        Args:
          chosen: bool `[n]`, which rows are not absent; by default all.
        """
        return self._columns(_halves(self._local[chosen]), self.at[chosen])

    def keyed(
        self, keys: Mapping[str, np.ndarray], by_id: Mapping[str, np.ndarray | None]
    ) -> np.ndarray:
        """Return local rows, numbers of tables and keys, uint32 `[S, 5, m]`; see `open_keyed`.

        Args:
          keys: uint64 `[n]` by table.
          by_id: bool `[n]` by table, which of them are ids; None: all.
        """
        some = np.concatenate(
            [np.zeros(0, np.uint64), *(keys[name] for name in self.parts)]
        )
        number = np.concatenate(
            [
                np.zeros(0, np.uint32),
                *(np.full(n, i, np.uint32) for i, n in self._numbers),
            ]
        )
        for name, part in self.parts.items():
            chosen = by_id[name]
            number[part] += BY_ID if chosen is None else chosen * BY_ID
        return self._columns([*_halves(self._local), number, *_halves(some)], self.at)

    def _columns(self, columns: list[np.ndarray], at: np.ndarray) -> np.ndarray:
        """Return uint32 `[S, columns, m]`, columns `[n]` in the parcels, the rest absent."""
        shape = self._stack.num_shards, len(columns), self.size
        made = aligned_empty(shape, np.dtype(np.uint32))
        made.fill(_ABSENT)
        shard, place = np.divmod(at, self.size)
        for number, column in enumerate(columns):
            made[shard, number, place] = column
        return made


def lines(parcels: np.ndarray) -> np.ndarray:
    """Return parcels `[S, m, …]` as one line `[S · m, …]`, to which `Parcels.at` points."""
    return parcels.reshape(-1, *parcels.shape[2:])


def send_lines(array: np.ndarray, sharding: jax.sharding.Sharding) -> Array:
    """Send each device its line of an array `[S, …]`; those of other processes may be anything.

    The array must not change afterwards: a CPU device may use its memory.
    """
    # Faster than `device_put`, which copies the array first.
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def parcel_operand(parcels: np.ndarray, sharding: NamedSharding) -> Any:
    """Return parcels as an operand of a program: one device takes its line from the host itself.

    Along an explicit axis the operand has to say how it is split, also over one device.
    """
    from_host = (
        sharding.num_devices == 1 and AxisType.Explicit not in sharding.mesh.axis_types
    )
    return parcels if from_host else send_lines(parcels, sharding)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array that is not copied on its way to a CPU device, with arbitrary numbers."""
    size = math.prod(shape) * dtype.itemsize
    whole = np.empty(size + _LINE, np.uint8)
    first = -whole.ctypes.data % _LINE
    return whole[first : first + size].view(dtype).reshape(shape)


def fetch_parcels(parcels: Array) -> np.ndarray:
    """Return parcels `[S, …]` from the devices; lines of other processes may be anything."""
    if parcels.is_fully_addressable:
        return np.asarray(parcels)
    whole = np.empty(parcels.shape, parcels.dtype)
    for shard in parcels.addressable_shards:
        whole[shard.index] = shard.data
    return whole


def most_per_shard(stack: Stack, rows: Mapping[str, np.ndarray]) -> int:
    """Return how many of some logical rows, by table, the shard has that has most of them."""
    counts = np.zeros(stack.num_shards, np.int64)
    for table in stack.tables:
        if table.name in rows:
            shards = stack.physical(rows[table.name], table) // stack.num_rows
            counts += np.bincount(shards, minlength=stack.num_shards)
    return int(counts.max())


def open_rows(halves: Array, stack: Stack) -> Array:
    """Return local rows `[m]` from their halves, uint32 `[2, m]`; `PADDING_ID` for none."""
    low, high = halves
    if stack.index_dtype == np.int32:
        return jax.lax.bitcast_convert_type(low, jnp.int32)
    return jax.lax.bitcast_convert_type(jnp.stack([low, high], axis=-1), jnp.int64)


def _halves(numbers: np.ndarray) -> list[np.ndarray]:
    """Return the low and the high 32 bits of numbers of 64 bits, uint32 `[n]` each."""
    bits = numbers.view(np.uint64)
    return [bits.astype(np.uint32), (bits >> _HALF).astype(np.uint32)]


def _bucket(n: int) -> int:
    """Return a size that has room for n rows."""
    # 1, 2, 3, 4, 6, 8, 12, … times `ROW_MULTIPLE`.
    units = max(1, -(-n // ROW_MULTIPLE))
    power = 1 << (units - 1).bit_length()
    return ROW_MULTIPLE * (
        power * 3 // 4 if power >= 4 and units <= power * 3 // 4 else power
    )


class Arrival(NamedTuple):
    """The rows of one stack.

    Attributes:
      parcels: where they stand, whether they come from home or are drawn; the same in all
        processes.
      fields: `[S, m, …]` by field, those that come from home; the rest is arbitrary.
    """

    parcels: Parcels
    fields: dict[str, np.ndarray]


class Agreed(NamedTuple):
    """What several processes agree on of the rows that a batch brings to one stack.

    Attributes:
      from_home: whether one of them has such a row at home.
      drawn: the most rows that one of them draws for a shard.
    """

    from_home: bool
    drawn: int


class NewKeys(NamedTuple):
    """Rows of one table that are made new.

    Attributes:
      keys: uint64 `[a]`; of a table on the host, ids among them.
      rows: int64 `[a]`, their logical rows.
      by_id: bool `[a]`, of a table on the host, which are ids; None: all.
    """

    keys: np.ndarray
    rows: np.ndarray
    by_id: np.ndarray | None = None


def drawn_keys(
    row_groups: RowGroups, taken: Taken, found: np.ndarray, owners: NewOwners | None
) -> NewKeys:
    """Return the rows of a table on the host that this process draws, each once.

    Args:
      row_groups: of the table.
      taken: what the map did with a training batch.
      found: bool `[n]`, which of the new rows that are at home in this process came from there.
      owners: which ids got new keys; None: they have none.
    """
    mine = row_groups.at_home(taken.new_keys)
    keys, rows = taken.new_keys[mine][~found], taken.new_rows[mine][~found]
    if owners is None:
        return NewKeys(keys, rows)
    # A new key's row is drawn by the key; the row that unseen keys share, by its id.
    ids = owners.taken.new_rows.view(np.uint64)
    nobodys = ~np.isin(keys, ids)
    mine = row_groups.at_home(ids)
    by_id = np.concatenate([np.zeros(mine.sum(), bool), np.ones(nobodys.sum(), bool)])
    return NewKeys(
        np.concatenate([owners.taken.new_keys[mine], keys[nobodys]]),
        np.concatenate([owners.rows[mine], rows[nobodys]]),
        by_id,
    )


def arrivals_of(
    stacks: Sequence[Stack], homes: Homes | None, taken: Mapping[str, Taken]
) -> dict[str, Arrival]:
    """Return room for the new rows of each stack of tables on the host, by its name.

    Args:
      stacks: of the engine.
      homes: of its tables on the host; None without them.
      taken: what the maps did with a training batch.
    """
    found = {}
    for stack in stacks:
        if homes is not None and stack.is_on_host:
            mine = {table.name: taken[table.name] for table in stack.tables}
            # Free places go first, then those of other rows, in the order in which these leave.
            for one in mine.values():
                first = one.new_rows.size - one.evicted_rows.size
                assert np.array_equal(one.new_rows[first:], one.evicted_rows)
            parcels = Parcels(stack, {name: one.new_rows for name, one in mine.items()})
            fields = homes.tables[stack.tables[0].name].fields
            room = {
                name: parcels.room(one.shape, one.dtype) for name, one in fields.items()
            }
            found[stack.name] = Arrival(parcels, room)
    return found


def rooms_in(
    arrivals: Mapping[str, Arrival], homes: Homes | None, taken: Mapping[str, Taken]
) -> dict[str, Room]:
    """Return where the rows of each table that are at home in this process are to be read to."""
    rooms = {}
    for one in arrivals.values():
        assert homes is not None, "tables on the host have homes"
        rows = {name: lines(field) for name, field in one.fields.items()}
        for table, part in one.parcels.parts.items():
            mine = homes.tables[table].row_groups.at_home(taken[table].new_keys)
            rooms[table] = Room(rows, one.parcels.at[part][mine])
    return rooms


class Visits(NamedTuple):
    """Rows that a batch brings along which is only looked up: those of tables on the host.

    It brings the rows that have no place on the devices, and the lookup reads a small table instead
    of the large one, with the rows of this batch alone. Of the rows 7, 8 and 9, of which the
    devices hold 8,

        cached      small row 1 <- the large table's place of 8
        stored      small row 0 <- 7, as it is at home
        drawn       small row 2 <- 9, which no training batch has had

    Attributes:
      cached: `[S, R]`, by local row of the small stack, the local row of the large one; -1: none.
      places: uint32 `[S, 2, e]`, the local rows that come from home (`Parcels.rows`).
      stored: `[S, e, D]`, their values as they are stored.
      drawn: uint32 `[S, 5, d]`, the rows that are drawn (`Parcels.keyed`).
    """

    cached: Array
    places: Array
    stored: Array
    drawn: Array

"""The rows of tables on the host that a training batch brings to the devices.

They are read from home straight to where they stand in the parcels that are sent: nothing is copied
between.

Input: what the maps did with a batch. Output: parcels with room for the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tpu_embed.core.layout.parcels import Parcels, lines
from tpu_embed.core.layout.stacks import Stack
from tpu_embed.storage import Homes, Room, RowGroups
from tpu_embed.vocabulary import NewOwners, Taken


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
            room = {name: parcels.room(one.shape, one.dtype) for name, one in fields.items()}
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

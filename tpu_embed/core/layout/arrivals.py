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
from tpu_embed.storage import Homes, Room
from tpu_embed.vocabulary import Taken


class Arrival(NamedTuple):
    """The rows of one stack.

    Attributes:
      parcels: where they stand, whether they come from home or are drawn.
      fields: `[S, m, …]` by field, those that come from home; the rest is arbitrary.
    """

    parcels: Parcels
    fields: dict[str, np.ndarray]


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


def rooms_in(arrivals: Mapping[str, Arrival]) -> dict[str, Room]:
    """Return where the rows of each table are to be read to."""
    return {
        table: Room(
            {name: lines(field) for name, field in one.fields.items()}, one.parcels.at[part]
        )
        for one in arrivals.values()
        for table, part in one.parcels.parts.items()
    }

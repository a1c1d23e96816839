"""Bring the rows of tables on the host along with a batch that is only looked up.

Input: the keys of a batch, and their rows on the devices. Output: rows of small tables, and what
these are made of (`core/layout/arrivals.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from tpu_embed._types import PADDING_ID
from tpu_embed.core.layout import (
    ROW_MULTIPLE,
    Layout,
    Parcels,
    Stack,
    TableSlice,
    Visits,
    most_per_shard,
    send_lines,
)
from tpu_embed.storage import VALUES, Homes, RowGroups

NOBODY = np.uint64(2**64 - 1)
"""Stands for a key that has no row, at home or on the devices."""


Guests = dict[str, list[tuple[np.ndarray, np.ndarray]]]
"""By table on the host: keys, uint64 `[n]`, and int32 `[n]`, their rows on the devices, or -1."""


def visit(
    layout: Layout, homes: Homes, given: Mapping[str, Mapping[int, np.ndarray]], every: Guests
) -> tuple[int, dict[int, np.ndarray], Callable[[], tuple[np.ndarray, dict[str, Visits]]] | None]:
    """Return the small tables of a batch; 0, nothing and None if the devices hold all of its rows.

    Args:
      layout: the engine's layout.
      homes: of its tables on the host.
      given: by table on the host, then by feature: the keys of this process's part, uint64 `[n]`.
      every: the keys of all processes' parts, perhaps repeated.

    Returns:
      R, the rows that each shard has of each small table; by feature, int32 `[n]`, the row in its
      small table of each of its keys, -1 for `NOBODY`; and a function that returns what each small
      stack is made of (`Batch.visits`). The batches before this one must be admitted then.
    """
    if all(
        ((rows >= 0) | (keys == NOBODY)).all() for some in every.values() for keys, rows in some
    ):
        return 0, {}, None
    seats = {
        table.name: _seats(stack, table, every[table.name], homes.tables[table.name].row_groups)
        for stack, table in layout.on_host
    }
    most = max(int(index.max(initial=0)) + 1 for *_, index in seats.values())
    # A power of two, because lookups are compiled for each size.
    rows = max(ROW_MULTIPLE // 8, 1 << (most - 1).bit_length())
    guests, of_features = {}, {}
    for stack, table in layout.on_host:
        keys, large, shards, index = seats[table.name]
        logical = stack.logical_in(shards, index, rows)
        guests[table.name] = keys, large, logical
        # `NOBODY` is past all keys, where -1 stands.
        found = np.append(logical, PADDING_ID).astype(np.int32)
        of_features |= {f: found[np.searchsorted(keys, x)] for f, x in given[table.name].items()}

    def make():
        # Before rows are read, because another thread may replace some meanwhile.
        replaced, stacks = np.array(homes.replaced, np.int32), {}
        for large, small in zip(layout.stacks, layout.visiting(rows).stacks, strict=True):
            if small.is_on_host:
                made = _stack(large, small, guests, homes)
                split = layout.axes.sharding(small.shard_axes)
                stacks[small.name] = Visits(*(send_lines(one, split) for one in made))
        return replaced, stacks

    return rows, of_features, make


def _seats(
    stack: Stack,
    table: TableSlice,
    every: Sequence[tuple[np.ndarray, np.ndarray]],
    row_groups: RowGroups,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Choose a shard for each distinct key of a table: the one that has its row, if one has.

    The others are on shards of the processes where they are at home.

    Returns:
      uint64 `[n]`, the keys, ascending; and int64 `[n]` their rows on the devices, -1 for none, the
      shard that has, or gets, each row, and the number of each row among those of its shard.
    """
    all_keys, rows = map(np.concatenate, zip(*every, strict=True))
    keys, first = np.unique(all_keys, return_index=True)
    end = np.searchsorted(keys, NOBODY)  # the largest of all
    keys, large = keys[:end], rows[first[:end]].astype(np.int64)
    held = large >= 0
    shards = np.zeros(keys.size, np.int64)
    shards[held] = stack.physical(large[held], table) // stack.num_rows
    counts = np.bincount(shards[held], minlength=stack.num_shards)
    owner = row_groups.of(keys) % row_groups.num_owners
    for number in range(row_groups.num_owners):
        own = np.flatnonzero(np.asarray(row_groups.owners) == number)
        away = np.flatnonzero(~held & (owner == number))
        # Of 2 shards that have 3 and 0 of 5 rows, each gets room for 3; the other two fill it up.
        room = max(-(-(away.size + counts[own].sum()) // own.size), int(counts[own].max()))
        shards[away] = np.repeat(own, room - counts[own])[: away.size]
    order = np.argsort(shards, kind="stable")
    whole = np.bincount(shards, minlength=stack.num_shards)
    index = np.empty(keys.size, np.int64)
    index[order] = np.arange(keys.size) - np.repeat(np.cumsum(whole) - whole, whole)
    return keys, large, shards, index


def _stack(
    large: Stack,
    small: Stack,
    guests: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]],
    homes: Homes,
) -> tuple[np.ndarray, ...]:
    """Return what a small stack is made of: the fields of its `Visits`.

    Args:
      large: the stack on the devices.
      small: the small one.
      guests: by table, its distinct keys, their rows on the devices (-1: none) and in `small`.
      homes: the rows at home.
    """
    cached = np.full((small.num_shards, small.num_rows), PADDING_ID, large.index_dtype)
    stored, drawn, ids, values, away = {}, {}, {}, [], {}
    for old, new in zip(large.tables, small.tables, strict=True):
        name = old.name
        keys, rows, seats = guests[name]
        held = rows >= 0
        # A physical row counts through all shards.
        local = large.physical(rows[held], old) % large.num_rows
        cached.reshape(-1)[small.physical(seats[held], new)] = local
        away[name] = seats[~held]
        mine = ~held & homes.tables[name].row_groups.at_home(keys)
        at_home, found = homes.visit(name, keys[mine])
        stored[name], drawn[name] = seats[mine][found], seats[mine][~found]
        ids[name] = keys[mine][~found]
        values.append(at_home[VALUES][found])
    # Other processes do not know which of them were found.
    least = 0 if jax.process_count() == 1 else most_per_shard(small, away)
    from_home, to_draw = Parcels(small, stored, least), Parcels(small, drawn, least)
    # Rows of keys are at home; what has no row there yet is drawn by its id.
    keyed = to_draw.keyed(ids, dict.fromkeys(ids))
    return cached, from_home.rows(), from_home.packed(np.concatenate(values)), keyed

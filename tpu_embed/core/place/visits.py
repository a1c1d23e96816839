"""Bring the rows of tables on the host along with a batch that is only looked up.

Input: the keys of a batch, and their rows on the devices. Output: rows of small tables, and what
these are made of (`core/layout/visits.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

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


class Visit(NamedTuple):
    """The small tables of one batch.

    Attributes:
      rows: R, the rows that each shard has of each small table.
      of_features: int32 `[n]` by feature, the row in its small table of each of its keys; -1 for
        `NOBODY`.
      make: returns what each small stack is made of (`Batch.visits`). The batches before this one
        must be admitted then.
    """

    rows: int
    of_features: dict[int, np.ndarray]
    make: Callable[[], tuple[np.ndarray, dict[str, Visits]]]


Given = Mapping[str, Sequence[tuple[np.ndarray, np.ndarray]]]
"""By table on the host: keys, uint64 `[n]`, and their rows on the devices, int32 `[n]`."""


class _Guests(NamedTuple):
    """The distinct keys of one table.

    Attributes:
      keys: uint64 `[n]`, ascending.
      large: int64 `[n]`, their rows on the devices; -1: none.
      shards: int64 `[n]`, the shard that has, or gets, each row.
      index: int64 `[n]`, the number of each row among those of its shard.
    """

    keys: np.ndarray
    large: np.ndarray
    shards: np.ndarray
    index: np.ndarray


def visit(
    layout: Layout, homes: Homes, given: Mapping[str, Mapping[int, np.ndarray]], every: Given
) -> Visit | None:
    """Return the small tables of a batch; None if the devices hold all of its rows.

    Args:
      layout: the engine's layout.
      homes: of its tables on the host.
      given: by table on the host, then by feature: the keys of this process's part, uint64 `[n]`.
      every: the keys of all processes' parts, perhaps repeated.
    """
    if all(
        ((rows >= 0) | (keys == NOBODY)).all() for some in every.values() for keys, rows in some
    ):
        return None
    tables = {table.name: (stack, table) for stack, table in layout.on_host}
    guests = {
        name: _guests(*tables[name], every[name], homes.tables[name].row_groups) for name in tables
    }
    most = max(int(one.index.max(initial=0)) + 1 for one in guests.values())
    # A power of two, because lookups are compiled for each size.
    rows = max(ROW_MULTIPLE // 8, 1 << max(0, most - 1).bit_length())
    of_features: dict[int, np.ndarray] = {}
    for name, one in guests.items():
        logical = tables[name][0].logical_in(one.shards, one.index, rows)
        for f, keys in given[name].items():
            at = np.searchsorted(one.keys, keys)
            somebody = keys != NOBODY
            of_features[f] = np.full(keys.size, -1, np.int32)
            of_features[f][somebody] = logical[at[somebody]]

    def make() -> tuple[np.ndarray, dict[str, Visits]]:
        # Before rows are read, because another thread may replace some meanwhile.
        replaced, stacks = np.array(homes.replaced, np.int32), {}
        for large, small in zip(layout.stacks, layout.visiting(rows).stacks, strict=True):
            if small.is_on_host:
                made = _stack(large, small, guests, homes)
                split = layout.axes.sharding(small.shard_axes)
                stacks[small.name] = Visits(*(send_lines(one, split) for one in made))
        return replaced, stacks

    return Visit(rows, of_features, make)


def _guests(
    stack: Stack,
    table: TableSlice,
    every: Sequence[tuple[np.ndarray, np.ndarray]],
    row_groups: RowGroups,
) -> _Guests:
    """Return the distinct keys of a table, each on the shard that has its row, if one has.

    The others are on shards of the processes where they are at home.
    """
    all_keys = np.concatenate([np.zeros(0, np.uint64), *(keys for keys, _ in every)])
    rows = np.concatenate([np.zeros(0, np.int64), *(rows for _, rows in every)])
    keys, first = np.unique(all_keys, return_index=True)
    if keys.size and keys[-1] == NOBODY:  # the largest of all
        keys, first = keys[:-1], first[:-1]
    large = rows[first].astype(np.int64)
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
    return _Guests(keys, large, shards, index)


def _stack(
    large: Stack, small: Stack, guests: Mapping[str, _Guests], homes: Homes
) -> tuple[np.ndarray, ...]:
    """Return what a small stack is made of: the fields of its `Visits`."""
    cached = np.full((small.num_shards, small.num_rows), PADDING_ID, large.index_dtype)
    stored, drawn, values, away = {}, {}, [], {}
    for old, new in zip(large.tables, small.tables, strict=True):
        one = guests[old.name]
        held = one.large >= 0
        local = large.physical(one.large[held], old) % large.num_rows
        cached[one.shards[held], new.offset + one.index[held]] = local
        logical = small.logical_in(one.shards, one.index, new.rows_per_shard)
        away[old.name] = logical[~held]
        mine = ~held & homes.tables[old.name].row_groups.at_home(one.keys)
        rows, found = homes.visit(old.name, one.keys[mine])
        stored[old.name] = logical[mine][found]
        drawn[old.name] = logical[mine][~found], one.keys[mine][~found]
        values.append(rows[VALUES][found])
    # Other processes do not know which of them were found.
    least = 0 if jax.process_count() == 1 else most_per_shard(small, away)
    from_home = Parcels(small, stored, least)
    to_draw = Parcels(small, {name: rows for name, (rows, _) in drawn.items()}, least)
    # Rows of keys are at home; what has no row there yet is drawn by its id.
    ids = {name: keys for name, (_, keys) in drawn.items()}
    keyed = to_draw.keyed(ids, dict.fromkeys(ids))
    return cached, from_home.rows(), from_home.packed(np.concatenate(values)), keyed

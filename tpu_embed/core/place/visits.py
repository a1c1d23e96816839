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
from tpu_embed.core.layout import ROW_MULTIPLE, Layout, Parcels, Stack, TableSlice, Visits
from tpu_embed.storage import VALUES, Homes

NOBODY = np.uint64(2**64 - 1)
"""Stands for a key that has no row, at home or on the devices."""


class Visit(NamedTuple):
    """The small tables of one batch.

    Attributes:
      rows: R, the rows that each shard has of each small table.
      of_features: int32 `[n]` by feature, the row in its small table of each of its keys; -1 for
        `NOBODY`.
      make: returns what each small stack is made of, by name. The batches before this one must be
        admitted then.
    """

    rows: int
    of_features: dict[int, np.ndarray]
    make: Callable[[], dict[str, Visits]]


class _Guests(NamedTuple):
    """The distinct keys of one table.

    Attributes:
      keys: uint64 `[n]`.
      large: int64 `[n]`, their rows on the devices; -1: none.
      shards: int64 `[n]`, the shard that has, or gets, each row.
      index: int64 `[n]`, the number of each row among those of its shard.
      inverse: int64, for every key of every feature, its number among these; -1 for `NOBODY`.
    """

    keys: np.ndarray
    large: np.ndarray
    shards: np.ndarray
    index: np.ndarray
    inverse: np.ndarray


def visit(
    layout: Layout, homes: Homes, given: Mapping[str, Sequence[tuple[int, np.ndarray, np.ndarray]]]
) -> Visit | None:
    """Return the small tables of a batch; None if the devices hold all of its rows.

    Args:
      layout: the engine's layout.
      homes: of its tables on the host.
      given: by table on the host: a feature, its keys, uint64 `[n]`, and their rows, int32 `[n]`.
    """
    every = [one for some in given.values() for one in some]
    if all(((rows >= 0) | (keys == NOBODY)).all() for _, keys, rows in every):
        return None
    tables = {table.name: (stack, table) for stack, table in layout.on_host}
    guests = {name: _guests(*tables[name], given[name]) for name in tables}
    most = max(int(one.index.max(initial=0)) + 1 for one in guests.values())
    # A power of two, because lookups are compiled for each size.
    rows = max(ROW_MULTIPLE // 8, 1 << max(0, most - 1).bit_length())
    of_features: dict[int, np.ndarray] = {}
    for name, one in guests.items():
        logical = tables[name][0].logical_in(one.shards, one.index, rows)
        logical = np.append(logical, -1)[one.inverse]
        ends = np.cumsum([keys.size for _, keys, _ in given[name]])[:-1]
        parts = zip(given[name], np.split(logical.astype(np.int32), ends), strict=True)
        of_features |= {f: part for (f, _, _), part in parts}

    def make() -> dict[str, Visits]:
        stacks = {}
        for large, small in zip(layout.stacks, layout.visiting(rows).stacks, strict=True):
            if small.is_on_host:
                made = _stack(large, small, guests, homes)
                split = layout.axes.sharding(small.shard_axes)
                stacks[small.name] = Visits(*jax.device_put(made, split))
        return stacks

    return Visit(rows, of_features, make)


def _guests(
    stack: Stack, table: TableSlice, given: Sequence[tuple[int, np.ndarray, np.ndarray]]
) -> _Guests:
    """Return the distinct keys of a table, each on the shard that has its row, if one has."""
    every = np.concatenate([np.zeros(0, np.uint64), *(keys for _, keys, _ in given)])
    rows = np.concatenate([np.zeros(0, np.int64), *(rows for _, _, rows in given)])
    keys, first, inverse = np.unique(every, return_index=True, return_inverse=True)
    if keys.size and keys[-1] == NOBODY:  # the largest of all
        inverse = np.where(inverse == keys.size - 1, -1, inverse)
        keys, first = keys[:-1], first[:-1]
    large = rows[first].astype(np.int64)
    held = large >= 0
    shards = np.zeros(keys.size, np.int64)
    shards[held] = stack.physical(large[held], table) // stack.num_rows
    counts = np.bincount(shards[held], minlength=stack.num_shards)
    # Of 2 shards that have 3 and 0 of 5 rows, each gets room for 3; the other two rows fill it up.
    room = max(-(-keys.size // stack.num_shards), int(counts.max()))
    shards[~held] = np.repeat(np.arange(stack.num_shards), room - counts)[: np.sum(~held)]
    order = np.argsort(shards, kind="stable")
    whole = np.bincount(shards, minlength=stack.num_shards)
    index = np.empty(keys.size, np.int64)
    index[order] = np.arange(keys.size) - np.repeat(np.cumsum(whole) - whole, whole)
    return _Guests(keys, large, shards, index, inverse.reshape(-1))


def _stack(
    large: Stack, small: Stack, guests: Mapping[str, _Guests], homes: Homes
) -> tuple[np.ndarray, ...]:
    """Return what a small stack is made of: the fields of its `Visits`."""
    cached = np.full((small.num_shards, small.num_rows), PADDING_ID, large.index_dtype)
    stored, drawn, values = {}, {}, []
    for old, new in zip(large.tables, small.tables, strict=True):
        one = guests[old.name]
        held = one.large >= 0
        local = large.physical(one.large[held], old) % large.num_rows
        cached[one.shards[held], new.offset + one.index[held]] = local
        logical = small.logical_in(one.shards, one.index, new.rows_per_shard)
        rows, found = homes.visit(old.name, one.keys[~held])
        stored[old.name] = logical[~held][found]
        drawn[old.name] = logical[~held][~found], one.keys[~held][~found]
        values.append(rows[VALUES][found])
    from_home = Parcels(small, stored)
    to_draw = Parcels(small, {name: rows for name, (rows, _) in drawn.items()})
    # Rows of keys are at home; what has no row there yet is drawn by its id.
    ids = {name: keys for name, (_, keys) in drawn.items()}
    keyed = to_draw.keyed(ids, dict.fromkeys(ids))
    return cached, from_home.rows(), from_home.packed(np.concatenate(values)), keyed

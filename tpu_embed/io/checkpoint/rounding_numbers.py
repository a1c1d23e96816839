"""The numbers that stand for rows when updates round them at random, made anew from the maps.

A state keeps them by row where a map decides which row a key has. A checkpoint of a table that was
rounded to nearest lacks them, and one of a table on the devices whose ids are row numbers, too.

Input: tables, and the maps of a checkpoint. Output: the numbers, uint32; or a state that has them.
"""

from __future__ import annotations

import numpy as np

from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.layout import NUMBERS_SLOT, TableSlice
from tpu_embed.core.rows import DeviceRows
from tpu_embed.core.state import TableState, fields
from tpu_embed.io.checkpoint.manifest import SavedTables
from tpu_embed.kernels.stochastic import number_ids


def numbers_of(found: SavedTables, table: TableSlice, ids: np.ndarray) -> np.ndarray:
    """Return the numbers of rows of a table, uint32 `[n]`: of their keys, where they have some.

    Args:
      found: what was saved.
      table: a table with a map.
      ids: uint64 `[n]`, ids at home of a table on the host; otherwise rows.
    """
    whole = ids.copy()
    if table.key_rules is not None and found.maps is not None:
        states = found.maps.states
        known = (states.ids if table.is_on_host else states.maps)[table.name]
        if known.rows.size:
            # Keys 70 90 in the rows 0 2; of the ids 0 1 2 the first and the last have a key.
            at = np.searchsorted(known.rows, ids.view(np.int64)).clip(max=known.rows.size - 1)
            here = known.rows[at] == ids.view(np.int64)
            whole[here] = known.keys[at[here]]
    return number_ids(whole)


def with_rounding_numbers(
    state: TableState, engine: EmbeddingEngine, found: SavedTables
) -> TableState:
    """Return the state with the numbers of tables on the devices that were not saved, in place.

    Args:
      state: tables and slots that were read.
      engine: its engine.
      found: what was saved.
    """
    for f in fields(engine.layout):
        is_made = f.slot == NUMBERS_SLOT and not f.table.is_on_host
        if not is_made or found.form(f) is not None or f.table.name not in found.tables:
            continue
        assert found.maps is not None, "the vocabulary of the table lives"
        # The rows of keys, and the last one, which keys without a row may share.
        known = found.maps.states.maps[f.table.name].rows
        rows = np.union1d(known, [f.table.vocabulary_size - 1])
        numbers = numbers_of(found, f.table, rows.view(np.uint64))
        made = DeviceRows(state, engine.layout, f.table.name, [f.part])
        made.write(rows, {f.part: numbers})
        state = made.state
    return state

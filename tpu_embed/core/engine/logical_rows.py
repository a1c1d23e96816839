"""Read and replace logical tables, slots and rows: what users see of a state.

Rows are read wherever they are: on the devices, at home on the host, or not drawn yet.

Input: a state, names of tables and slots, ids of rows. Output: arrays; or a new state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import message
from tpu_embed._types import Array, ArrayLike, Tracer
from tpu_embed.core.layout import Layout
from tpu_embed.core.state import (
    Field,
    RowDrawer,
    RowMover,
    TableState,
    check_own,
    field,
    first_rows,
    logical,
)
from tpu_embed.kernels import storage
from tpu_embed.processes import gather_bytes, raise_on_all
from tpu_embed.storage import VALUES, Homes, slot_field
from tpu_embed.vocabulary import Vocabularies


class LogicalRows:
    """The part of an engine that reads and replaces rows.

    Args:
      layout: the engine's layout.
      vocabularies: its maps, which know the rows of tables on the host; None without them.
    """

    def __init__(self, layout: Layout, vocabularies: Vocabularies | None) -> None:
        self._layout, self._maps = layout, vocabularies
        self._mover, self._drawer = RowMover(layout), RowDrawer(layout)

    def tables(self, state: TableState) -> dict[str, Array]:
        """Return the logical tables `[V, D]` by name, in their dtype; copies all of them."""
        return logical.tables(state, self._layout)

    def slots(self, state: TableState) -> dict[str, dict[str, Array]]:
        """Return the logical slots by table name, then slot name; copies all of them.

        A slot is `[V, D]`, or `[V]` for one number per row, or the array that a whole stack shares.
        """
        return logical.slots(state, self._layout)

    def rows(
        self, state: TableState, name: str, ids: ArrayLike, *, slot: str | None = None
    ) -> np.ndarray:
        """Return some rows of a table or slot, `[n, …]`, from the devices or from home.

        Args:
          state: the state; with tables on the host the newest one.
          name: the table.
          ids: integers `[n]` in [0, V).
          slot: the slot, or None for the table itself.

        Raises:
          ValueError: an unknown name, or a bad id.
        """
        check_own(state, self._layout)
        f = field(self._layout, name, slot)
        if not f.shape.per_row:
            expected, got = "a slot with values per row", "one array that the whole stack shares"
            raise ValueError(message(f.label, expected=expected, got=got, remedy="engine.slots"))
        distinct, inverse = np.unique(self._checked(f, ids), return_inverse=True)
        part = VALUES if slot is None else slot_field(slot)
        if f.table.is_on_host:
            stored = self._of_host(state, f, distinct.view(np.uint64))[part]
        else:
            stored = self._on_devices(state, f, distinct, part)
        return stored.view(jnp.dtype(f.shape.dtype))[inverse.reshape(-1)]

    def held_rows(self, state: TableState, name: str, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return rows that the devices hold with their slots, as they are stored.

        Args:
          state: the state.
          name: a table.
          rows: int64 `[n]`, different rows of those that the devices hold; at least one.

        Returns:
          `[n, …]` by field (`storage.VALUES` and `slot_field(slot)` for each slot).
        """
        return self._mover.read(state, {name: rows})[name]

    def stored_rows(self, state: TableState, name: str, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Return rows with their slots, as they are stored, from wherever they are.

        Args:
          state: the state; with tables on the host the newest one.
          name: a table.
          ids: int64 `[n]`, different rows of those in [0, V) that are in this process; at least
            one.

        Returns:
          `[n, …]` by field, as `held_rows` does.
        """
        f = field(self._layout, name, None)
        if f.table.is_on_host:
            return self._of_here(state, f, ids.view(np.uint64))
        return self.held_rows(state, name, ids)

    def drawn_rows(
        self, vocabulary: Mapping[str, Array], name: str, keys: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return first rows of a table on the host with their slots, as they are stored.

        Args:
          vocabulary: that of a state, which holds the random key.
          name: the table.
          keys: uint64 `[n]`.
        """
        stack, table = self._layout.table(name)
        return self._drawer.draw(vocabulary, table, stack, keys)

    def first_rows(self, state: TableState, name: str) -> Callable[[Array], Array]:
        """Return a function that draws the first rows of ids of a table on the host.

        It runs in a jit, too: it takes uint32 `[n, 2]`, the low and the high halves of the ids, and
        returns `[n, D]` in the table's dtype (bfloat16 as its bits in uint16). Nobody has trained
        these rows.

        Args:
          state: a state, which holds the random key.
          name: a table on the host without a vocabulary.

        Raises:
          ValueError: it is no such table.
        """
        self._of(name)
        stack, table = self._layout.table(name)
        if table.key_table is not None or state.vocabulary is None:
            expected, got = "a table on the host whose ids are row numbers", f"{name!r}"
            raise ValueError(message("table", expected=expected, got=got))
        return first_rows(state.vocabulary, table, stack)

    def touched(self, name: str) -> np.ndarray:
        """Return the ids of a table on the host that training batches had, int64, ascending.

        With a living vocabulary, ids are the rows that `engine.vocabularies.keys` tells.
        """
        homes, maps = self._of(name)
        ids = np.union1d(maps.held(name).keys, homes[name].ids())
        said = gather_bytes(f"engine.touched: table {name!r}", ids.tobytes())
        every = [np.frombuffer(some, np.uint64) for some in said]
        return np.unique(np.concatenate(every)).view(np.int64)

    def set_rows(
        self,
        state: TableState,
        name: str,
        rows: ArrayLike,
        values: ArrayLike,
        *,
        slot: str | None = None,
    ) -> TableState:
        """Return the state with some rows of a table, or of one of its slots, replaced.

        Args:
          state: the state.
          name: the table.
          rows: row ids, integers `[n]`, all different; a jit does not write those outside [0, V).
          values: `[n, D]` (`[n]` for a slot of one number per row).
          slot: the slot, or None for the table itself.

        Of a table on the host, rows are written at home, too, so states from before see them.
        Batches placed before to be looked up only keep what they brought along.

        Raises:
          ValueError: an unknown name, a bad or repeated row id, a wrong shape; of a table on the
            host also an older state, or batches that are placed and not admitted.
        """
        if self._layout.table(name)[1].is_on_host:
            return self._set_on_host(state, name, rows, values, slot)
        return logical.set_rows(state, self._layout, name, rows, values, slot=slot)

    def load(
        self,
        state: TableState,
        name: str,
        blocks_of_rows: Iterable[ArrayLike],
        *,
        slot: str | None = None,
    ) -> TableState:
        """Return the state with a whole table, or one of its slots, replaced.

        Args:
          state: the state.
          name: the table.
          blocks_of_rows: arrays `[n, D]`, which together are rows 0 … V - 1; read one by one.
          slot: the slot, or None for the table itself.

        Raises:
          ValueError: an unknown name, a block of a wrong shape, or not V rows in all.
        """
        return logical.load(state, self._layout, name, blocks_of_rows, slot=slot)

    def load_arrays(
        self,
        state: TableState,
        tables: Mapping[str, ArrayLike],
        slots: Mapping[str, Mapping[str, ArrayLike]] | None = None,
    ) -> TableState:
        """Return the state with whole tables and slots replaced; all are checked first.

        Args:
          state: the state.
          tables: `[V, D]` by table name.
          slots: by table name, then slot name, as `slots` returns them.

        Raises:
          ValueError: an unknown name, or a wrong shape.
        """
        return logical.load_arrays(state, self._layout, tables, slots or {})

    def _checked(self, f: Field, ids: ArrayLike) -> np.ndarray:
        """Return row ids, int64 `[n]`.

        Raises:
          ValueError: they are no integers `[n]` in [0, V).
        """
        given, size = np.asarray(ids), f.table.declared_size
        if given.ndim != 1 or given.dtype.kind not in "iu":
            expected, got = "integers of shape (n,)", f"{given.dtype} of shape {given.shape}"
            raise ValueError(message(f"{f.label}: ids", expected=expected, got=got))
        outside = given[(given < 0) | (given >= size)]
        if outside.size:
            expected, got = f"ids in [0, {size})", f"{outside[0]}"
            raise ValueError(message(f"{f.label}: ids", expected=expected, got=got))
        return given.astype(np.int64)

    def _of_host(self, state: TableState, f: Field, keys: np.ndarray) -> dict[str, np.ndarray]:
        """Return stored rows of a table on the host, `[n, …]` by field, for distinct keys.

        With several processes all of them call this, and each reads what is at home in it.
        """
        homes, maps = self._of(f.table.name)
        refuse_traced("rows", state)
        maps.check_newest(state)
        row_groups = homes.tables[f.table.name].row_groups
        if row_groups.is_whole:
            return self._of_here(state, f, keys)
        mine = np.flatnonzero(row_groups.at_home(keys))
        what = f"engine.rows: table {f.table.name!r}"
        read = raise_on_all(what, Path(), lambda: self._of_here(state, f, keys[mine]))
        fields = homes.tables[f.table.name].fields
        rows = {part: np.empty((keys.size, *one.shape), one.dtype) for part, one in fields.items()}
        said = gather_bytes(what, b"".join([mine.tobytes(), *(read[p].tobytes() for p in fields)]))
        width = 8 + sum(one.nbytes for one in fields.values())
        for some in said:
            # The numbers of n keys, then one field of all n after the other.
            n = len(some) // width
            at, end = np.frombuffer(some, np.int64, n), 8 * n
            for part, one in fields.items():
                values = np.frombuffer(some[end : end + n * one.nbytes], one.dtype)
                rows[part][at], end = values.reshape(n, *one.shape), end + n * one.nbytes
        return rows

    def _of_here(self, state: TableState, f: Field, keys: np.ndarray) -> dict[str, np.ndarray]:
        """Return stored rows, `[n, …]` by field, for distinct keys that are at home here."""
        name = f.table.name
        homes, maps = self._of(name)
        places = maps.rows(name, keys, maps.admitted).astype(np.int64)
        here = places >= 0
        held = self._mover.read(state, {name: places[here]})[name] if here.any() else {}
        at_home, found = homes.visit(name, keys[~here])
        drawn = {}
        if not found.all():
            assert state.vocabulary is not None, "checked"
            drawn = self.drawn_rows(state.vocabulary, name, keys[~here][~found])
        rows = {}
        for part, away in at_home.items():
            rows[part] = np.empty((keys.size, *away.shape[1:]), away.dtype)
            if drawn:
                away[~found] = drawn[part]
            rows[part][~here] = away
            if held:
                rows[part][here] = held[part]
        return rows

    def _set_on_host(
        self, state: TableState, name: str, ids: ArrayLike, values: ArrayLike, slot: str | None
    ) -> TableState:
        """Return the state with rows of a table on the host replaced, wherever they are."""
        check_own(state, self._layout)
        homes, maps = self._of(name)
        refuse_traced("set_rows", state, ids, values)
        maps.check_newest(state)
        refuse_placed_ahead("set_rows", maps)
        f, *arrays = logical.checked_rows(self._layout, name, ids, values, slot=slot)
        chosen, given = map(np.asarray, arrays)
        keys = chosen.astype(np.int64).view(np.uint64)
        mine = homes.tables[name].row_groups.at_home(keys)
        part = VALUES if slot is None else slot_field(slot)

        def write() -> None:
            whole = self._of_here(state, f, keys[mine])
            stored = given[mine].astype(jnp.dtype(f.shape.dtype))
            whole[part] = stored.view(whole[part].dtype)
            homes[name].write(keys[mine], whole)

        raise_on_all(f"set_rows: table {name!r}", Path(), write)
        places = maps.rows(name, keys, maps.admitted).astype(np.int64)
        here = places >= 0
        if not here.any():
            return state
        return logical.write_rows(state, self._layout, f, places[here], given[here])

    def _on_devices(self, state: TableState, f: Field, rows: np.ndarray, part: str) -> np.ndarray:
        """Return stored rows, `[n, …]`, for distinct logical rows that the devices hold."""
        if not rows.size:
            return np.zeros((0, *f.shape.shape), storage.stored_dtype(f.shape.dtype))
        name = f.table.name
        return self._mover.read(state, {name: rows})[name][part]

    def _of(self, name: str) -> tuple[Homes, Vocabularies]:
        """Return the homes and the maps that know a table on the host.

        Raises:
          ValueError: it is no such table.
        """
        maps = self._maps
        if maps is None or maps.homes is None or name not in maps.homes.tables:
            expected, got = "a table with storage=HostStorage(…)", f"{name!r}"
            raise ValueError(message("table", expected=expected, got=got))
        return maps.homes, maps


def refuse_traced(what: str, *given: Any) -> None:
    """Refuse tracers, where rows at home are to be read or written."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(given)):
        expected, got = "a call outside a jit, for a table on the host", "tracers"
        raise ValueError(message(what, expected=expected, got=got, remedy="call it before the jit"))


def refuse_placed_ahead(what: str, maps: Vocabularies) -> None:
    """Refuse training batches that were placed, and not admitted.

    Raises:
      ValueError: there are some.
    """
    if maps.placed != maps.admitted:
        expected, got = "no batch placed ahead", f"{maps.placed - maps.admitted}"
        remedy = "admit them first, or engine.vocabularies.rewind(state) forgets them"
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))

"""Read and replace logical tables, slots and rows: what users see of a state.

Rows are read wherever they are: on the devices, at home on the host, or not drawn yet.

Input: a state, names of tables and slots, ids of rows. Output: arrays; or a new state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import message
from tpu_embed._types import Array, ArrayLike
from tpu_embed.core.engine.admitter import version_after
from tpu_embed.core.engine.rows_by_key import (
    RowsByKey,
    check_none_ahead,
    join_blocks,
    refuse_traced,
)
from tpu_embed.core.layout import Layout
from tpu_embed.core.rows import DeviceRows, Ids, logical
from tpu_embed.core.state import (
    Field,
    RowDrawer,
    TableState,
    check_own,
    field,
)
from tpu_embed.processes import gather_bytes, raise_on_all
from tpu_embed.storage import Homes, NewRows, Replacement, RowField
from tpu_embed.vocabulary import Vocabularies


class LogicalRows:
    """The part of an engine that reads and replaces rows.

    Args:
      layout: the engine's layout.
      vocabularies: its maps, which know the rows of tables on the host; None without them.
    """

    def __init__(self, layout: Layout, vocabularies: Vocabularies | None) -> None:
        self._layout, self._maps = layout, vocabularies
        self._drawer = RowDrawer(layout)
        self._by_key = RowsByKey(layout, vocabularies, self._of_here)

    def tables(self, state: TableState) -> dict[str, Array]:
        """Return the logical tables `[V, D]` by name, in their dtype; copies all of them."""
        return logical.tables(state, self._layout)

    def slots(self, state: TableState) -> dict[str, dict[str, Array]]:
        """Return the logical slots by table name, then slot name; copies all of them.

        A slot is `[V, D]`, or `[V]` for one number per row, or the array that a whole stack shares.
        """
        return logical.slots(state, self._layout)

    def rows(
        self,
        state: TableState,
        name: str,
        ids: ArrayLike | None = None,
        *,
        keys: Any = None,
        slot: str | None = None,
    ) -> np.ndarray:
        """Return some rows of a table or slot, `[n, …]`, from the devices or from home.

        With several processes all of them call this, with the same rows.

        Args:
          state: the state; with tables on the host the newest one.
          name: the table.
          ids: integers `[n]` in [0, V).
          keys: in place of ids, of a living vocabulary: integers or strings `[n]` as its features
            take them, though -1 is a key here. The state is the newest one, and the call outside a
            jit.
          slot: the slot, or None for the table itself.

        Raises:
          ValueError: an unknown name, a bad id, or a key without a row, the first of which is
            named; `vocabularies.find` tells which keys have one.
          TypeError: neither ids nor keys, or both; keys that are neither integers nor strings.
        """
        check_own(state, self._layout)
        _check_one("rows", "ids", ids, keys)
        if keys is not None:
            ids = self._by_key.find("rows", state, name, keys)
        assert ids is not None, "checked"
        f = field(self._layout, name, slot)
        if not f.shape.per_row:
            expected, got = "a slot with values per row", "one array that the whole stack shares"
            raise ValueError(message(f.label, expected=expected, got=got, remedy="engine.slots"))
        distinct, inverse = np.unique(self._checked(f, ids), return_inverse=True)
        stored = self.stored_rows(state, name, distinct, [f.part])[f.part]
        return stored.view(jnp.dtype(f.shape.dtype))[inverse.reshape(-1)]

    def held_rows(self, state: TableState, name: str, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return rows that this process's devices hold with their slots, as they are stored.

        Args:
          state: the state.
          name: a table.
          rows: int64 `[n]`, different rows of those that its devices hold.

        Returns:
          `[n, …]` by field (`storage.VALUES` and `slot_field(slot)` for each slot).
        """
        return DeviceRows(state, self._layout, name).read_here(rows)

    def stored_rows(
        self, state: TableState, name: str, ids: Ids, parts: Collection[str] | None = None
    ) -> dict[str, np.ndarray]:
        """Return rows with their slots, as they are stored, from wherever they are.

        With several processes all of them call this, with the same rows.

        Args:
          state: the state; with tables on the host the newest one.
          name: a table.
          ids: different rows of those in [0, V).
          parts: of a row; None: all.

        Returns:
          `[n, …]` by field, as `held_rows` does.
        """
        if self._layout.table(name)[1].is_on_host:
            return self._of_host(state, name, np.asarray(ids, np.int64).view(np.uint64))
        return DeviceRows(state, self._layout, name, parts).read(ids)

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

    def touched(self, name: str) -> np.ndarray:
        """Return the ids of a table on the host that training batches had, int64, ascending.

        With a living vocabulary, ids are the rows that `engine.vocabularies.keys` tells.
        """
        homes, maps = self._of(name)
        # Those on the devices first: what leaves them meanwhile is on its way home by then.
        ids = np.union1d(maps.held(name).keys, homes.ids(name))
        said = gather_bytes(f"engine.touched: table {name!r}", ids.tobytes())
        every = [np.frombuffer(some, np.uint64) for some in said]
        return np.unique(np.concatenate(every)).view(np.int64)

    def set_rows(
        self,
        state: TableState,
        name: str,
        rows: ArrayLike | None = None,
        values: ArrayLike | None = None,
        *,
        keys: Any = None,
        slot: str | None = None,
    ) -> TableState:
        """Return the state with some rows of a table, or of one of its slots, replaced.

        Args:
          state: the state.
          name: the table.
          rows: row ids, integers `[n]`, all different; a jit does not write those outside [0, V).
          values: `[n, D]` (`[n]` for a slot of one number per row).
          keys: in place of rows, of a living vocabulary: integers or strings `[n]`, all different,
            as its features take them, though -1 is a key here.
          slot: the slot, or None for the table itself.

        With keys, the call is one step of the maps, admitted at once: it is as if a training batch
        of these keys were placed, in which every key is admitted whatever `admit_after` says. Keys
        without a row get one, by eviction if need be, with fresh slots; then the values are
        written. Call it outside a jit with the newest state, and go on with the one returned. It
        copies the table, and for new keys its slots too. All processes call it alike.

        Of a table on the host, rows are written at home, too, so states from before see them.
        Batches for lookups that were placed before, with rows from home, are refused after it.

        Raises:
          ValueError: an unknown name, a bad or repeated row id or key, a wrong shape; not enough
            rows for all keys; of keys, and of a table on the host, also an older state, or batches
            that are placed and not admitted. Nothing has changed then.
          TypeError: neither rows nor keys, or both, or no values; keys that are neither integers
            nor strings.

        Example:
          >>> import jax, numpy as np, tpu_embed
          >>> words = tpu_embed.DynamicVocabulary(admit_after=3)
          >>> table = tpu_embed.TableConfig(8, 2, name="word", vocabulary=words)
          >>> engine = tpu_embed.EmbeddingEngine(tpu_embed.FeatureConfig(table))
          >>> state = engine.init(jax.random.key(0))
          >>> vectors = np.array([[1, 2], [3, 4]])
          >>> state = engine.set_rows(state, "word", keys=["red", "green"], values=vectors)
          >>> engine.rows(state, "word", keys=["green"])
          array([[3., 4.]], dtype=float32)
        """
        _check_one("set_rows", "rows", rows, keys)
        if values is None:
            raise TypeError(message("set_rows", expected="values", got="none"))
        if keys is not None:
            return self._by_key.set_rows(state, name, keys, values, slot)
        assert rows is not None, "checked"
        if self._layout.table(name)[1].is_on_host:
            return self._set_on_host(state, name, rows, values, slot)
        return logical.set_rows(state, self._layout, name, rows, values, slot=slot)

    def load(
        self,
        state: TableState,
        name: str,
        blocks_of_rows: Iterable[ArrayLike],
        *,
        keys: Any = None,
        slot: str | None = None,
    ) -> TableState:
        """Return the state with a whole table, or one of its slots, replaced.

        Args:
          state: the state.
          name: the table.
          blocks_of_rows: arrays `[n, D]`, which together are rows 0 … V - 1; read one by one.
          keys: of a living vocabulary, whose rows the blocks are then together: `set_rows` of these
            keys, after all blocks were read. Other keys keep their rows and values.
          slot: the slot, or None for the table itself.

        Raises:
          ValueError: an unknown name, a block of a wrong shape, or not V rows in all (as many as
            there are keys); with keys, what `set_rows` refuses.
          TypeError: keys that are neither integers nor strings.
        """
        if keys is not None:
            values = join_blocks(f"load: table {name!r}", blocks_of_rows)
            return self._by_key.set_rows(state, name, keys, values, slot)
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

    def _of_host(self, state: TableState, name: str, keys: np.ndarray) -> dict[str, np.ndarray]:
        """Return stored rows of a table on the host, `[n, …]` by field, for distinct keys.

        With several processes all of them call this, and each reads what is at home in it.
        """
        homes, maps = self._of(name)
        refuse_traced("rows", state)
        maps.check_newest(state)
        home = homes.tables[name]
        if home.row_groups.is_whole:
            return self._of_here(state, name, keys)
        mine = np.flatnonzero(home.row_groups.at_home(keys))
        what = f"engine.rows: table {name!r}"
        read = raise_on_all(what, Path(), lambda: self._of_here(state, name, keys[mine]))
        return _gather_rows(what, home.fields, keys.size, mine, read)

    def _of_here(self, state: TableState, name: str, keys: np.ndarray) -> dict[str, np.ndarray]:
        """Return stored rows, `[n, …]` by field, for distinct keys that are at home here."""
        homes, maps = self._of(name)
        places = maps.rows(name, keys, maps.admitted).astype(np.int64)
        here = places >= 0
        held = self.held_rows(state, name, places[here])
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
            rows[part][~here], rows[part][here] = away, held[part]
        return rows

    def _set_on_host(
        self, state: TableState, name: str, ids: ArrayLike, values: ArrayLike, slot: str | None
    ) -> TableState:
        """Return the state with rows of a table on the host replaced, wherever they are."""
        check_own(state, self._layout)
        homes, maps = self._of(name)
        refuse_traced("set_rows", state, ids, values)
        maps.check_newest(state)
        check_none_ahead("set_rows", maps)
        f, *arrays = logical.checked_rows(self._layout, name, ids, values, slot=slot)
        chosen, given = map(np.asarray, arrays)
        keys = chosen.astype(np.int64).view(np.uint64)
        mine = homes.tables[name].row_groups.at_home(keys)

        def make() -> NewRows:
            whole = self._of_here(state, name, keys[mine])
            whole[f.part] = given[mine].astype(f.shape.dtype).view(whole[f.part].dtype)
            return NewRows(keys[mine], whole)

        places = maps.rows(name, keys, maps.admitted).astype(np.int64)
        here, at_home = places >= 0, Replacement(homes[name], make)
        if here.any():
            state = logical.write_rows(state, self._layout, f, places[here], given[here])
        version = version_after(state, self._layout, {}, {}, maps.now, at_home.number)
        state = dataclasses.replace(state, vocabulary=version)
        try:
            raise_on_all(f"set_rows: table {name!r}", Path(), at_home.write)
        except BaseException:
            at_home.undo()  # Ctrl-C, or an error in another process, may come when it is written
            raise
        return state

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


def _check_one(what: str, name: str, numbers: Any, keys: Any) -> None:
    """Check that either row numbers or keys are given.

    Raises:
      TypeError: neither or both are.
    """
    if (numbers is None) == (keys is None):
        got = "neither" if keys is None else "both"
        raise TypeError(message(what, expected=f"either {name} or keys", got=got))


def _gather_rows(
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

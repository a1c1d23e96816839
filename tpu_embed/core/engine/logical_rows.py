"""Read and replace logical tables, slots and rows: what users see of a state.

The state stores physical arrays: tables stacked, sharded, padded, perhaps packed. A user knows only
logical tables `[V, D]`, row 0 first, and their rows, wherever these are: on the devices, at home on
the host, or not drawn yet. Every name, shape and dtype is checked before anything is computed.

Keys get rows and values in one step of the maps, in turn with the training batches: whatever room a
batch of these keys would find, they find, and at once. The step is admitted before the call
returns:

    maps of step 5  --take the keys-->  placed 6, admitted 5
    a copy of the arrays: new keys' rows are drawn, then values are written
    rows at home are written
    admitted 6; or, if anything was refused, the step is undone, and the given state is as it was

Another engine's state is brought into the layout of this one without a file (`prepare_adoption`).
It is what a save and a restore do, with blocks of rows on the host in the place of files. Of each
table, whose rows have ids in both engines:

    from                     to            which rows
    a static table           anywhere      all; of one on the host, those that were touched
    a dynamic vocabulary      anywhere      those of the keys that stay, and the shared one

A stack that both engines lay out alike, on the same devices, is copied there as a whole. With
several processes, all of them adopt together: each tells the others the rows that it has, one block
after the other, and writes those of all. The other engine and its state stay as they are.

Input: a state, names of tables and slots, ids or keys of rows, and perhaps new rows. Output:
arrays; or a new state.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import check_type, refuse
from tpu_embed._types import Array, ArrayLike, Tracer, as_array, snapshot
from tpu_embed.core.engine.admitter import version_after
from tpu_embed.core.ids import refuse_masked
from tpu_embed.core.layout import (
    NUMBERS_SLOT,
    ROUNDING_SLOTS,
    Layout,
    NewKeys,
    Stack,
)
from tpu_embed.core.rows import (
    DeviceRows,
    Ids,
    Rows,
    as_stored,
    blocks_of,
    copy_rows,
    read_field,
    write_copy,
)
from tpu_embed.core.state import (
    Field,
    NewRowWriter,
    TableState,
    blank_arrays,
    check_arrays,
    check_own,
    check_state,
    field,
    fields,
    init_tables,
    matched_counters,
    open_key,
    put_everywhere,
    random_key,
    slot_shapes,
    vocabulary_of_maps,
)
from tpu_embed.kernels import storage
from tpu_embed.kernels.stochastic import number_ids
from tpu_embed.processes import gather_bytes, gather_from_all, raise_on_all
from tpu_embed.storage import Homes, HostRows, NewRows, Replacement, slot_field
from tpu_embed.vocabulary import (
    MapState,
    Moves,
    RowMoves,
    Vocabularies,
    fit_rows,
    read_keys,
    states_to_load,
)

copy_arrays = jax.jit(lambda arrays: jax.tree.map(jnp.copy, arrays))
"""Returns copies that may be donated."""

_WHERE = "a TPUEmbedding has one, embedding.engine, and a layer: layer.engine"


class LogicalRows:
    """The part of an engine that reads and replaces rows.

    Args:
      layout: the engine's layout.
      vocabularies: its maps, which know the rows of keys and of tables on the host; None without
        them.
    """

    def __init__(self, layout: Layout, vocabularies: Vocabularies | None) -> None:
        self.layout, self.vocabularies = layout, vocabularies
        self.storage = None if vocabularies is None else vocabularies.homes
        self._writer = NewRowWriter(layout)

    def tables(self, state: TableState) -> dict[str, Array]:
        """Return the logical tables `[V, D]` by name, in their dtype; copies all of them."""
        self.layout.check_on_devices("tables")
        check_own(state, self.layout)
        return _tables(state, self.layout)

    def slots(self, state: TableState) -> dict[str, dict[str, Array]]:
        """Return the logical slots by table name, then slot name; copies all of them.

        A slot is `[V, D]`, or `[V]` for one number per row, or the array that a whole stack shares.
        """
        self.layout.check_on_devices("slots")
        check_own(state, self.layout)
        check_arrays(state, self.layout, slots=True)
        return _slots(state, self.layout)

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
          keys: in place of ids, of a dynamic vocabulary: integers or strings `[n]` as its features
            take them, though -1 is a key here. The state is the newest one, and the call outside a
            jit.
          slot: the slot, or None for the table itself.

        Raises:
          ValueError: an unknown name, a bad id, or a key without a row, the first of which is
            named; `vocabularies.find` tells which keys have one.
          TypeError: neither ids nor keys, or both; keys that are neither integers nor strings.
        """
        check_own(state, self.layout)
        _check_one("rows", "ids", ids, keys)
        if keys is not None:
            maps = self._maps_of("rows", name)
            refuse_traced("rows", state, keys)
            maps.check_newest(state)
            ids = maps.rows_of(name, keys)
        f, numbers = _field_of_rows(self.layout, name, slot), np.asarray(ids)
        _check_ids(f, "ids", numbers)
        distinct, inverse = np.unique(numbers.astype(np.int64), return_inverse=True)
        stored = self.stored_rows(state, name, distinct, [f.part])[f.part]
        return stored.view(jnp.dtype(f.shape.dtype))[inverse.reshape(-1)]

    def stored_rows(
        self,
        state: TableState,
        name: str,
        ids: Ids,
        parts: Collection[str] | None = None,
    ) -> Rows:
        """Return rows with their slots, as they are stored, from wherever they are.

        With several processes all of them call this, with the same rows.

        Args:
          state: the state; with tables on the host the newest one.
          name: a table.
          ids: different rows of those in [0, V).
          parts: of a row; None: all.

        Returns:
          `[n, …]` by field (`storage.VALUES` and `slot_field(slot)` for each slot).
        """
        if self.layout.table(name)[1].is_on_host:
            return self._of_host(state, name, np.asarray(ids, np.int64).view(np.uint64))
        return DeviceRows(state, self.layout, name, parts).read(ids)

    def drawn_rows(
        self, vocabulary: Mapping[str, Array], name: str, keys: np.ndarray
    ) -> Rows:
        """Return first rows of a table on the host with their slots, as they are stored.

        Args:
          vocabulary: that of a state, which holds the random key.
          name: the table.
          keys: uint64 `[n]`.
        """
        stack, table = self.layout.table(name)
        return self._writer.draw(vocabulary, table, stack, keys)

    def touched(self, name: str) -> np.ndarray:
        """Return the ids of a table on the host that training batches had, int64, ascending.

        With a dynamic vocabulary, ids are the rows that `engine.vocabularies.keys` tells.
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
          keys: in place of rows, of a dynamic vocabulary: integers or strings `[n]`, all different,
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
            refuse("set_rows", expected="values", got="none", error=TypeError)
        if keys is not None:
            maps = self._maps_of("set_rows", name)
            refuse_traced("set_rows", state, values, keys)
            check_own(state, self.layout)
            return maps.order.run(
                lambda: self._set_by_key(maps, state, name, keys, values, slot)
            )
        check_own(state, self.layout)
        f = _field_of_rows(self.layout, name, slot)
        if not f.table.is_on_host:
            chosen, given = _checked_rows(f, rows, values)
            return f.write(
                state, write_copy(f.read(state), chosen, given, f, self.layout.axes)
            )
        _, maps = self._of(name)
        refuse_traced("set_rows", state, rows, values)
        maps.check_newest(state)
        check_none_ahead("set_rows", maps)
        ids, given = map(np.asarray, _checked_rows(f, rows, values))
        ids = ids.astype(np.int64)
        return self._replace(maps, state, f, ids.view(np.uint64), given, ids)

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
          keys: of a dynamic vocabulary, whose rows the blocks are then together: `set_rows` of
            these keys, after all blocks were read. Other keys keep their rows and values.
          slot: the slot, or None for the table itself.

        Raises:
          ValueError: an unknown name, a block of a wrong shape, or not V rows in all (as many as
            there are keys); with keys, what `set_rows` refuses.
          TypeError: keys that are neither integers nor strings.
        """
        if keys is not None:
            values = _join_blocks(f"load: table {name!r}", blocks_of_rows)
            return self.set_rows(state, name, values=values, keys=keys, slot=slot)
        self.layout.check_on_devices("load", [name])
        check_own(state, self.layout)
        f = _field_of_rows(self.layout, name, slot)
        # One copy of the array, then every block is written into that copy in place. The given
        # state stays as it was, also when a later block is refused.
        copied = f.write(state, copy_arrays(f.read(state)))
        rows = DeviceRows(copied, self.layout, name, [f.part])
        start, size = 0, f.table.vocabulary_size
        for block in blocks_of_rows:
            refuse_masked(f.label, block)
            values = np.asarray(block)
            end = start + len(values) if values.ndim else size
            if not values.ndim or values.shape[1:] != f.shape.shape or end > size:
                shape = ", ".join(map(str, ("n", *f.shape.shape)))
                refuse(
                    f.label,
                    expected=f"blocks of shape ({shape}) that have {size} rows in all",
                    got=f"shape {values.shape} from row {start} on",
                )
            _check_numbers(f.label, values)
            rows.write(range(start, end), {f.part: as_stored(values, f)})
            start = end
        if start != size:
            refuse(f.label, expected=f"{size} rows in all", got=f"{start}")
        return rows.state

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
        check_own(state, self.layout)
        # The first loop validates everything, the second writes: an error leaves nothing half
        # loaded.
        given = [
            (field(self.layout, name, None), one)
            for name, one in _items("tables", tables)
        ]
        for name, by_slot in _items("slots", slots or {}):
            named = _items(f"slots of table {name!r}", by_slot)
            given += [(field(self.layout, name, slot), array) for slot, array in named]
        self.layout.check_on_devices("load", [f.table.name for f, _ in given])
        for f, array in given:
            rows = (f.table.vocabulary_size,) if f.shape.per_row else ()
            _checked_values(f, rows, array)
        for f, array in given:
            if f.shape.per_row:
                state = self.load(state, f.table.name, [array], slot=f.slot)
            else:
                whole = storage.encode(as_array(array), f.shape.dtype)
                sharding = self.layout.axes.sharding(())
                # The state may be donated later, so it must not share memory with the user's array.
                state = f.write(state, jax.device_put(whole, sharding, may_alias=False))
        return state

    def _of_host(self, state: TableState, name: str, keys: np.ndarray) -> Rows:
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
        read = raise_on_all(
            what, Path(), lambda: self._of_here(state, name, keys[mine])
        )
        rows = DeviceRows(state, self.layout, name).empty(keys.size)
        for said in gather_bytes(what, pickle.dumps((mine, read))):
            _put_rows(rows, *pickle.loads(said))
        return rows

    def _of_here(self, state: TableState, name: str, keys: np.ndarray) -> Rows:
        """Return stored rows, `[n, …]` by field, for distinct keys that are at home here."""
        homes, maps = self._of(name)
        places = maps.rows(name, keys, maps.admitted).astype(np.int64)
        here = places >= 0
        at_home, found = homes.visit(name, keys[~here])
        if not found.all():
            assert state.vocabulary is not None, "checked"
            drawn = self.drawn_rows(state.vocabulary, name, keys[~here][~found])
            _put_rows(at_home, ~found, drawn)
        held = DeviceRows(state, self.layout, name)
        rows = held.empty(keys.size)
        _put_rows(rows, here, held.read_here(places[here]))
        _put_rows(rows, ~here, at_home)
        return rows

    def _set_by_key(
        self,
        maps: Vocabularies,
        state: TableState,
        name: str,
        keys: Any,
        values: ArrayLike,
        slot: str | None,
    ) -> TableState:
        """Return the state in which keys have rows with values; in turn with the batches."""
        what = f"set_rows: table {name!r}"

        def read():
            label = f"table {name!r}: keys"
            numbers = read_keys(label, keys)
            # Which of two values of a key is written would depend on the device's order of writes.
            distinct, counts = np.unique(numbers, return_counts=True)
            if distinct.size < numbers.size:
                twice = np.flatnonzero(numbers == distinct[counts.argmax()])
                refuse(
                    label,
                    expected="each key once",
                    got=f"the keys at {twice[0]} and {twice[1]} are the same",
                )
            f = _field_of_rows(self.layout, name, slot)
            given = np.asarray(_checked_values(f, numbers.shape, snapshot(values)))
            # A row that is on its way home would be written after the one that is given now.
            if self.storage is not None:
                self.storage.flush()
            return f, numbers, given.astype(jnp.dtype(f.shape.dtype))

        f, numbers, given = raise_on_all(what, Path(), read)
        if jax.process_count() > 1:
            content = hashlib.sha256(numbers.tobytes() + given.tobytes()).hexdigest()
            if len(set(gather_from_all(what, f"{slot} {content}"))) > 1:
                refuse(
                    what,
                    expected="the same keys and values in every process",
                    got="others",
                    remedy="read them in every process, in the same order",
                )
        maps.check_newest(state)
        check_none_ahead("set_rows", maps)
        return self._replace(maps, state, f, numbers, given)

    def _replace(
        self,
        maps: Vocabularies,
        state: TableState,
        f: Field,
        keys: np.ndarray,
        values: np.ndarray,
        ids: np.ndarray | None = None,
    ) -> TableState:
        """Return the state in which rows that maps place have values, wherever they are.

        Args:
          maps: the maps.
          state: the newest state.
          f: the table or slot.
          keys: uint64 `[n]`, all different.
          values: `[n, …]`, real numbers.
          ids: of a table on the host, int64 `[n]`, the rows' own, which are the keys then. None:
            keys get rows, in one step of the maps.
        """
        name, before, at_home = f.table.name, maps.admitted, None
        step = before if ids is not None else before + 1
        moves, new = Moves({}, {}), NewKeys(keys[:0], keys[:0].view(np.int64))
        # Until it is written at home, last and in one piece, all can be undone: arrays are copied,
        # not donated, and a step is not admitted before.
        try:
            if ids is None:
                moves = maps.take_keys(name, keys)
                taken = moves.of_keys(name)
                new = NewKeys(taken.new_keys, taken.new_rows)
                # In this step every key has a row; that of the state is one step behind.
                ids = maps.find(name, keys)
            rows = ids
            if f.table.is_on_host:
                homes, _ = self._of(name)
                make = functools.partial(
                    self._rows_at_home, state, f, keys, ids, values, new.keys
                )
                at_home, rows = (
                    Replacement(homes[name], make),
                    maps.rows(name, ids, step),
                )
            if name in moves.owners:
                # Ids that the devices hold, of old keys or of new ones, are written on both sides.
                # All processes know all of these, so each fills the lines of all shards alike.
                places = moves.owners[name].rows
                held = places >= 0
                new = NewKeys(new.keys[held], places[held], np.zeros(held.sum(), bool))
            here = rows >= 0
            written = self._on_devices(state, f, new, rows[here], values[here])
            number = None if at_home is None else at_home.number
            version = version_after(state, self.layout, *moves, maps.at(step), number)
            raise_on_all(
                f"set_rows: table {name!r}", Path(), lambda: at_home and at_home.write()
            )
            if step > before:
                maps.note_admitted(step)
        except BaseException:
            # An interrupt may come when the step is admitted already: then it stays.
            if maps.admitted == before:
                try:
                    if at_home is not None:
                        at_home.undo()  # an error in another process may come when it is written
                finally:  # where the disk is full, it may be for `undo`, too
                    if step > before:
                        maps.undo(before)
            raise
        return dataclasses.replace(written, vocabulary=version)

    def _on_devices(
        self,
        state: TableState,
        f: Field,
        new: NewKeys,
        rows: np.ndarray,
        values: np.ndarray,
    ) -> TableState:
        """Return the state with rows of new keys drawn and values written, in copies of arrays."""
        if not rows.size:
            return state
        stack = f.stack.name
        # The row of a new key is drawn with its slots into memory that is donated, so all arrays of
        # the stack are copied; for keys that had rows the one that is written is enough.
        if new.keys.size:
            table, slots = copy_arrays((state.tables[stack], state.slots[stack]))
            tables = {**state.tables, stack: table}
            state = dataclasses.replace(
                state, tables=tables, slots={**state.slots, stack: slots}
            )
            state = self._writer.write(state, {f.table.name: new})
        else:
            state = f.write(state, copy_arrays(f.read(state)))
        written = DeviceRows(state, self.layout, f.table.name, [f.part])
        written.write(rows.astype(np.int64), {f.part: as_stored(values, f)})
        return written.state

    def _rows_at_home(
        self,
        state: TableState,
        f: Field,
        keys: np.ndarray,
        ids: np.ndarray,
        values: np.ndarray,
        new_keys: np.ndarray,
    ) -> NewRows:
        """Return the rows that are at home in this process, as they will be."""
        homes, _ = self._of(f.table.name)
        numbers = ids.astype(np.int64).view(np.uint64)
        mine = homes.tables[f.table.name].row_groups.at_home(numbers)
        numbers, keys = numbers[mine], keys[mine]
        # A known key keeps what is not given, such as its slots; a new key gets all of it fresh.
        # Ids [4, 9, 2] with 9 of a new key: rows of 4 and 2 are read, that of 9 is drawn.
        is_new = np.isin(keys, new_keys)
        rows = DeviceRows(state, self.layout, f.table.name).empty(keys.size)
        _put_rows(rows, ~is_new, self._of_here(state, f.table.name, numbers[~is_new]))
        if is_new.any():
            assert state.vocabulary is not None, "checked"
            none_by_id = np.zeros(is_new.sum(), bool)
            drawn = self._writer.draw(
                state.vocabulary, f.table, f.stack, keys[is_new], none_by_id
            )
            _put_rows(rows, is_new, drawn)
        rows[f.part] = as_stored(values[mine], f)
        return numbers, rows

    def _maps_of(self, what: str, name: str) -> Vocabularies:
        """Return the maps of a table whose ids are keys.

        Raises:
          ValueError: they are row numbers.
        """
        if self.layout.table(name)[1].key_rules is None or self.vocabularies is None:
            refuse(
                f"{what}: keys of table {name!r}",
                expected="a table with vocabulary=DynamicVocabulary(…)",
                got="one of row numbers",
                remedy="give its row numbers, without keys=",
            )
        return self.vocabularies

    def _of(self, name: str) -> tuple[Homes, Vocabularies]:
        """Return the homes and the maps that know a table on the host.

        Raises:
          ValueError: it is no such table.
        """
        homes, maps = self.storage, self.vocabularies
        if homes is None or maps is None or name not in homes.tables:
            refuse(
                "table", expected="a table with storage=HostStorage(…)", got=f"{name!r}"
            )
        return homes, maps


@functools.partial(jax.jit, static_argnames="layout")
def _tables(state: TableState, layout: Layout) -> dict[str, Array]:
    return {
        f.table.name: read_field(state, f, layout.axes)
        for f in fields(layout)
        if f.slot is None
    }


@functools.partial(jax.jit, static_argnames="layout")
def _slots(state: TableState, layout: Layout) -> dict[str, dict[str, Array]]:
    found: dict[str, dict[str, Array]] = {}
    for f in fields(layout):
        mine = found.setdefault(f.table.name, {})
        if f.slot is not None:
            mine[f.slot] = read_field(state, f, layout.axes)
    return found


def check_engine(what: str, engine: Any, *, remedy: str | None = None) -> None:
    """Check that a value is an `EmbeddingEngine`.

    Args:
      what: the argument, for the message.
      engine: the value.
      remedy: what to do where it is none; None: where an engine is to be had.

    Raises:
      TypeError: it is something else.
    """
    # Engines alone have this base class; their own file needs this check, so it cannot be named.
    check_type(
        what,
        engine,
        LogicalRows,
        expected="an EmbeddingEngine",
        remedy=remedy or _WHERE,
    )


def check_none_ahead(what: str, maps: Vocabularies) -> None:
    """Check that every batch that was placed is admitted.

    Raises:
      ValueError: some are not.
    """
    if maps.placed != maps.admitted:
        refuse(
            what,
            expected="no batch placed ahead",
            got=f"{maps.placed - maps.admitted}",
            remedy="admit them first, or engine.vocabularies.rewind(state) forgets them",
        )


def refuse_traced(what: str, *given: Any) -> None:
    """Refuse tracers: the host must know which rows it reads or writes."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(given)):
        refuse(
            what,
            expected="a call outside a jit, for a table on the host or for keys",
            got="tracers",
            remedy="call it before the jit",
        )


def _check_one(what: str, name: str, numbers: Any, keys: Any) -> None:
    """Check that either row numbers or keys are given.

    Raises:
      TypeError: neither or both are.
    """
    if (numbers is None) == (keys is None):
        refuse(
            what,
            expected=f"either {name} or keys",
            got="neither" if keys is None else "both",
            error=TypeError,
        )


def _field_of_rows(layout: Layout, name: str, slot: str | None) -> Field:
    """Return a table, or a slot that has its own numbers for each row.

    Raises:
      ValueError: there is no table or slot of this name, or the whole stack shares the slot.
    """
    f = field(layout, name, slot)
    if not f.shape.per_row:
        expected, got = (
            "a slot with values per row",
            "one array that the whole stack shares",
        )
        remedy = "engine.slots reads it, "
        remedy += (
            f"load_arrays(state, {{}}, {{{name!r}: {{{slot!r}: array}}}}) replaces it"
        )
        refuse(f.label, expected=expected, got=got, remedy=remedy)
    return f


def _array(value: Any) -> Any:
    return value if isinstance(value, (jax.Array, np.ndarray)) else np.asarray(value)


def _check_ids(f: Field, what: str, ids: Any) -> None:
    """Check row ids `[n]`; inside a jit their values are not known.

    Raises:
      ValueError: they are no integers `[n]`, or one is outside [0, V).
    """
    label = f"{f.label}: {what}"
    if ids.ndim != 1 or not jnp.issubdtype(ids.dtype, jnp.integer):
        refuse(
            label,
            expected="integers of shape (n,)",
            got=f"{ids.dtype} of shape {ids.shape}",
        )
    if isinstance(ids, Tracer):
        return
    known, size = np.asarray(ids), f.table.declared_size
    outside = known[(known < 0) | (known >= size)]
    if outside.size:
        refuse(label, expected=f"{what} in [0, {size})", got=f"row {outside[0]}")


def _checked_rows(f: Field, rows: Any, values: Any) -> tuple[Any, Any]:
    """Return the row ids `[n]` and the values `[n, …]` of `set_rows`, after a check of them.

    Raises:
      ValueError: a wrong shape or dtype, a row id outside [0, V), or one that occurs twice.
    """
    ids = _array(snapshot(rows))
    _check_ids(f, "rows", ids)
    given = _checked_values(f, ids.shape, snapshot(values))
    if not isinstance(ids, Tracer):
        # Which values of a repeated row id are written would depend on the device's order of
        # writes.
        numbers, counts = np.unique(ids, return_counts=True)
        if numbers.size != ids.size:
            refuse(
                f"{f.label}: rows",
                expected="each row once",
                got=f"row {numbers[counts.argmax()]} {counts.max()} times",
            )
    return ids, given


def _checked_values(f: Field, rows: tuple[int, ...], values: Any) -> Any:
    """Return the values of rows, `[n, …]`, after a check of them.

    Args:
      f: the table or slot.
      rows: `(n,)`; empty for a slot that has no rows.
      values: real numbers.
    """
    refuse_masked(f.label, values)
    given, shape = _array(values), (*rows, *f.shape.shape)
    if given.shape != shape:
        refuse(f"{f.label}: values", expected=f"shape {shape}", got=f"{given.shape}")
    _check_numbers(f"{f.label}: values", given)
    return given


def _check_numbers(label: str, values: Any) -> None:
    if not any(
        jnp.issubdtype(values.dtype, kind)
        for kind in (np.floating, np.integer, np.bool_)
    ):
        refuse(label, expected="real numbers", got=f"dtype {values.dtype}")


def _items(what: str, named: Any) -> Iterable[tuple[str, Any]]:
    check_type(what, named, Mapping, expected="a mapping by name", error=ValueError)
    return named.items()


def _join_blocks(what: str, blocks: Iterable[ArrayLike]) -> np.ndarray:
    """Return blocks of rows as one array `[n, …]`.

    Raises:
      ValueError: rows of different blocks have different shapes.
    """
    arrays = [np.asarray(block) for block in blocks]
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) > 1 or any(not array.ndim for array in arrays):
        refuse(
            what,
            expected="blocks of rows of one shape",
            got=f"{[array.shape for array in arrays]}",
        )
    return np.concatenate(arrays) if arrays else np.zeros(0)


def _put_rows(rows: Rows, where: np.ndarray, given: Rows) -> None:
    """Write rows `[m, …]` by part to their places among others: a mask `[n]`, or numbers `[m]`."""
    for part, some in given.items():
        rows[part][where] = some


# -- the state of another engine -------------------------------------------------------------------


def prepare_adoption(
    state: TableState,
    other: LogicalRows,
    mine: LogicalRows,
    counters: Mapping[str, jax.ShapeDtypeStruct],
) -> Callable[[], TableState]:
    """Copy all rows; return a function that loads the maps and returns the state of this engine.

    Args:
      state: of the other engine.
      other: the other engine.
      mine: this engine.
      counters: shape and dtype of the counters of this engine's states, by name.

    Raises:
      ValueError: the state is not the newest of the other engine, or the engines do not have the
        same tables; a process has no devices of an engine.
      RuntimeError: rows were lost on their way home.
      Exception: an error in another process.
    """
    for engine in (other, mine):
        here = engine.layout.axes.processes
        if len(here) != jax.process_count():
            refuse(
                "adopt: mesh",
                expected=f"devices of all {jax.process_count()} processes",
                got=f"of {sorted(here)}",
                remedy="io.save and io.restore bring tables to the devices of other processes",
            )

    def fitted_maps():
        refuse_traced("adopt", state)
        check_state(state, other.layout)
        if other.vocabularies is not None:
            other.vocabularies.check_newest(state)
            check_none_ahead("adopt: the other engine", other.vocabularies)
        if other.storage is not None:
            other.storage.flush()
        _check_tables(other, mine)
        return _fit_maps(other, mine)

    fitted, moves = raise_on_all("adopt", Path(), fitted_maps)
    # All rows are copied before this engine's maps change, because there may be no room for them.
    new, homes = _RowCopies(state, other, mine, moves).made()
    paths = [feature.path for feature in other.layout.features]
    found = {name: np.asarray(count) for name, count in state.counters.items()}
    counted = matched_counters(found, paths, counters, mine.layout)
    step = np.asarray(state.step)
    step, counted = put_everywhere((step, counted), mine.layout.axes)
    new = dataclasses.replace(new, step=step, counters=counted)
    maps = mine.vocabularies
    if maps is None:
        return lambda: new
    # Without maps there, all tables are static, and this engine has some on the host: a first step.
    admitted = 0 if other.vocabularies is None else other.vocabularies.admitted
    states = states_to_load(
        [table for _, table in mine.layout.living], fitted, admitted
    )
    key = None
    if state.vocabulary is not None:
        key = jax.tree.map(np.asarray, random_key(state.vocabulary))
    new = dataclasses.replace(
        new, vocabulary=vocabulary_of_maps(states, key, mine.layout)
    )

    def load():
        maps.load_states(states, homes)
        return new

    return load


def _check_tables(other: LogicalRows, mine: LogicalRows) -> None:
    """Check that both engines have the same tables, with rows of the same form.

    Raises:
      ValueError: they do not.
    """
    remedy = "declare both engines' tables alike"
    ours, theirs = _describe_tables(mine), _describe_tables(other)
    if ours.keys() != theirs.keys():
        refuse(
            "adopt",
            expected=f"tables {sorted(ours)}",
            got=f"{sorted(theirs)}",
            remedy=remedy,
        )
    for name in sorted(ours):
        for what, expected in ours[name].items():
            got = theirs[name][what]
            if got != expected:
                if what == "vocabulary size":
                    remedy = (
                        "only dynamic vocabularies change their capacity; io.restore "
                    )
                    remedy += "with key= makes the new rows of a table that grows"
                refuse(
                    f"adopt: table {name!r}: {what}",
                    expected=f"{expected}",
                    got=f"{got}",
                    remedy=remedy,
                )
        rules = [engine.layout.table(name)[1].key_rules for engine in (other, mine)]
        before, now = (None if one is None else one.unseen for one in rules)
        if now == "shared" and before != now:
            refuse(
                f"adopt: table {name!r}: unseen",
                expected="'shared'",
                got=f"{before!r}",
                remedy=remedy,
            )


def _describe_tables(engine: LogicalRows) -> dict[str, dict[str, Any]]:
    """Return what both engines must have in common of each table, by its name."""
    found = {}
    for stack in engine.layout.stacks:
        rule = stack.optimizer
        slots = {
            name: (*slot.shape, str(jnp.dtype(slot.dtype)), slot.per_row)
            for name, slot in sorted(slot_shapes(stack).items())
            if name not in ROUNDING_SLOTS
        }
        for table in stack.tables:
            living = table.key_rules is not None
            found[table.name] = {
                "dim": stack.dim,
                "dtype": stack.dtype,
                "ids": "keys of a dynamic vocabulary" if living else "row numbers",
                "vocabulary size": "any" if living else table.declared_size,
                "optimizer": None if rule is None else rule.describe()["class"],
                "slots": slots,
                "rounding": "stochastic" if stack.rounds_at_random else "nearest",
            }
    return found


def _fit_maps(
    other: LogicalRows, mine: LogicalRows
) -> tuple[dict[str, MapState], dict[str, RowMoves]]:
    """Return the other engine's maps of keys, fitted to this one's capacities, and the rows' moves.

    Raises:
      ValueError: a capacity leaves no row for a key.
    """
    fitted: dict[str, MapState] = {}
    moves: dict[str, RowMoves] = {}
    if other.vocabularies is None:
        return fitted, moves
    states = other.vocabularies.states()
    of_keys = {**states.maps, **states.ids}
    for _, table in mine.layout.living:
        before = other.layout.table(table.name)[1]
        if table.key_rules is not None and before.key_rules is not None:
            fitted[table.name], moves[table.name] = fit_rows(
                of_keys[table.name],
                (before.declared_size, before.key_rules.unseen),
                table.declared_size,
                table.key_rules,
            )
    return fitted, moves


@dataclasses.dataclass(frozen=True)
class _RowCopies:
    """Copies the rows of all tables into arrays and homes of another engine.

    Attributes:
      state: of the other engine.
      other: the other engine.
      mine: the engine that gets them.
      moves: by table whose ids are keys, where rows go.
    """

    state: TableState
    other: LogicalRows
    mine: LogicalRows
    moves: Mapping[str, RowMoves]

    def made(self) -> tuple[TableState, dict[str, HostRows]]:
        """Return a state of tables and slots, and rows at home by table on the host."""
        state, homes = self._begun(), {}
        for stack in self.mine.layout.stacks:
            if self._is_alike(stack):
                continue
            for table in stack.tables:
                state = self._with_shared_slots(state, table.name)
                if table.is_on_host:
                    homes[table.name] = self._at_home(table.name)
                else:
                    rows = DeviceRows(state, self.mine.layout, table.name)
                    blocks = self._blocks(table.name, rows)
                    copy_rows(
                        functools.partial(self._read, table.name), rows.write, blocks
                    )
                    state = rows.state
        return state, homes

    def _begun(self) -> TableState:
        """Return tables and slots to write rows over: copies, first values, or zeros."""
        axes = self.mine.layout.axes
        # Zeros are enough where every row is written that somebody can look up: all rows of static
        # tables, and those of keys. Rows of the host are on no device at first.
        stacks = self.mine.layout.stacks
        alike = [s for s in stacks if self._is_alike(s)]
        drawn = [s for s in stacks if self._is_drawn(s)]
        blank = [s for s in stacks if s not in alike and s not in drawn]
        tables, slots = blank_arrays(tuple(blank), axes)
        if drawn:
            assert self.state.vocabulary is not None, "it has tables on the host"
            key = open_key(jax.tree.map(np.asarray, random_key(self.state.vocabulary)))
            # A program of its own, because stacks that are equal may have other initializers.
            made = jax.jit(
                functools.partial(init_tables, stacks=tuple(drawn), axes=axes)
            )(key)
            tables, slots = tables | made[0], slots | made[1]
        for stack in alike:
            held = self.state.tables[stack.name], self.state.slots[stack.name]
            tables[stack.name], slots[stack.name] = copy_arrays(held)
        return TableState(tables, slots, self.state.step, {})

    def _is_alike(self, stack: Stack) -> bool:
        """Return whether the other engine has a stack with the same rows in the same places."""
        # Names of stacks say everything of their layout but the devices (`stack_name`); where
        # the capacity is the same, keys stay in their rows. Of a table on the host, the devices
        # hold other rows, whatever the name.
        there = {one.name: one for one in self.other.layout.stacks}.get(stack.name)
        if there is None or stack.is_on_host or there.is_on_host:
            return False
        return self.mine.layout.axes == self.other.layout.axes

    def _is_drawn(self, stack: Stack) -> bool:
        """Return whether rows of a stack are drawn, because nobody has touched them at home."""
        before = [self.other.layout.table(table.name)[1] for table in stack.tables]
        return not stack.is_on_host and any(
            t.is_on_host and t.key_rules is None for t in before
        )

    def _with_shared_slots(self, state: TableState, name: str) -> TableState:
        """Return the state with the slots of a table that all rows of its stack share."""
        # Such as a number of steps. Tables of one stack have had the same updates; where they come
        # from several stacks whose numbers differ, the last table's stands, as in a restore.
        for f in fields(self.mine.layout, name):
            if not f.shape.per_row:
                before = field(self.other.layout, name, f.slot)
                whole = np.asarray(before.read(self.state))
                state = f.write(state, put_everywhere(whole, self.mine.layout.axes))
        return state

    def _at_home(self, name: str) -> HostRows:
        """Return the rows of a table on the host."""
        assert self.mine.storage is not None, "it is on the host"
        home = self.mine.storage.tables[name]
        made, failed = HostRows(home.fields, home.storage.path), []

        def write(ids, rows):
            numbers = np.asarray(ids, np.int64).view(np.uint64)
            here = home.row_groups.at_home(numbers)
            try:
                made.write(
                    numbers[here], {part: some[here] for part, some in rows.items()}
                )
            except (
                Exception
            ) as error:  # the other processes wait for the rows that this one reads
                failed.append(error)

        def written():
            if failed:
                raise failed[0]
            return made

        copy_rows(functools.partial(self._read, name), write, self._blocks(name))
        return raise_on_all(f"adopt: table {name!r}", Path(), written)

    def _blocks(self, name: str, rows: DeviceRows | None = None) -> Iterable[Any]:
        """Return the ids of a table's rows in blocks, before and now; see `copy_rows`."""
        table, moves = self.other.layout.table(name)[1], self.moves.get(name)
        if moves is None and table.is_on_host:
            ids = self.other.touched(name)
            moves = RowMoves(ids, ids)
        if moves is None and rows is not None and jax.process_count() == 1:
            return rows.lines(table.declared_size)
        size = DeviceRows(self.state, self.other.layout, name).block
        # Two keys in the rows 0 and 2 of four, whose last row is shared, go to a table of six rows:
        # before 0 2 3, now 0 2 5. A static table keeps all its rows where they are.
        if moves is None:
            return blocks_of(range(table.declared_size), size)
        return zip(
            blocks_of(moves.before, size), blocks_of(moves.now, size), strict=True
        )

    def _read(self, name: str, ids: Ids) -> Rows:
        """Return rows of a table of the other engine."""
        rows = self.other.stored_rows(self.state, name, ids)
        # Only where a map gives rows does a state keep what stands for them (`stochastic.py`).
        if (
            self.mine.layout.table(name)[0].keeps_numbers
            and slot_field(NUMBERS_SLOT) not in rows
        ):
            numbers = number_ids(np.asarray(ids, np.int64).view(np.uint64))
            rows = {**rows, slot_field(NUMBERS_SLOT): numbers}
        return rows

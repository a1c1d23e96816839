"""Give keys rows and values: pretrained vectors for keys that no batch need have had.

It is one step of the maps, in turn with the training batches: whatever room a batch of these keys
would find, they find, and at once. The step is admitted before the call returns:

    maps of step 5  --take the keys-->  placed 6, admitted 5
    a copy of the arrays: new keys' rows are drawn, then values are written
    rows at home are written
    admitted 6; or, if anything was refused, the step is undone, and the given state is as it was

Input: a state, keys and values. Output: the state of the next step.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import message
from tpu_embed._signals import SignalsDeferred
from tpu_embed._types import ArrayLike, Tracer
from tpu_embed.core.engine.admitter import version_after
from tpu_embed.core.layout import Layout, NewKeys
from tpu_embed.core.rows import DeviceRows, logical
from tpu_embed.core.state import (
    Field,
    NewRowWriter,
    RowDrawer,
    TableState,
    check_own,
)
from tpu_embed.processes import gather_from_all, raise_on_all
from tpu_embed.storage import Homes, NewRows, Replacement
from tpu_embed.vocabulary import Moves, Taken, Vocabularies, read_keys

ReadWhole = Callable[[TableState, str, np.ndarray], dict[str, np.ndarray]]
"""Returns the stored rows of ids, `[n, …]` by field."""


class _Given(NamedTuple):
    """What a call gives, checked.

    Attributes:
      keys: uint64 `[n]`, all different.
      values: `[n, …]`, in the dtype of the field.
      field: the table or slot that they are for.
    """

    keys: np.ndarray
    values: np.ndarray
    field: Field


class RowsByKey:
    """Writes rows by key, for one engine.

    Args:
      layout: the engine's layout.
      vocabularies: its maps; None without living vocabularies.
      read_whole: `(state, table, ids) -> rows by field`, the stored rows of a table on the host
        that are at home in this process.
    """

    def __init__(
        self, layout: Layout, vocabularies: Vocabularies | None, read_whole: ReadWhole
    ) -> None:
        self._layout, self._maps, self._read_whole = layout, vocabularies, read_whole
        self._writer, self._drawer = NewRowWriter(layout), RowDrawer(layout)

    def find(self, what: str, state: TableState, name: str, keys: Any) -> np.ndarray:
        """Return the rows, int64 `[n]`, of keys in the newest state; all must have one.

        Args:
          what: the call, for messages.
          state: the state.
          name: the table.
          keys: integers or strings `[n]`.

        Raises:
          ValueError: a key without a row; an older state; a call inside a jit; a table whose ids
            are row numbers.
          TypeError: the keys are neither integers nor strings.
        """
        maps = self._maps_of(what, name)
        refuse_traced(what, state, keys if isinstance(keys, jax.Array) else ())
        maps.check_newest(state)
        return maps.rows_of(name, keys)

    def set_rows(
        self, state: TableState, name: str, keys: Any, values: ArrayLike, slot: str | None
    ) -> TableState:
        """Return the state in which keys have rows with values; see `LogicalRows.set_rows`."""
        maps = self._maps_of("set_rows", name)
        refuse_traced("set_rows", state, values, keys if isinstance(keys, jax.Array) else ())
        check_own(state, self._layout)
        return maps.turns.run_next(lambda: self._set_rows(maps, state, name, keys, values, slot))

    def _maps_of(self, what: str, name: str) -> Vocabularies:
        """Return the maps of a table whose ids are keys.

        Raises:
          ValueError: they are row numbers.
        """
        if self._layout.table(name)[1].key_rules is None or self._maps is None:
            expected, got = "a table with vocabulary=DynamicVocabulary(…)", "one of row numbers"
            remedy = "give its row numbers, without keys="
            label = f"{what}: keys of table {name!r}"
            raise ValueError(message(label, expected=expected, got=got, remedy=remedy))
        return self._maps

    def _set_rows(
        self,
        maps: Vocabularies,
        state: TableState,
        name: str,
        keys: Any,
        values: ArrayLike,
        slot: str | None,
    ) -> TableState:
        what = f"set_rows: table {name!r}"
        given = raise_on_all(what, Path(), lambda: self._read(name, keys, values, slot))
        _check_same(what, given)
        maps.check_newest(state)
        check_none_ahead("set_rows", maps)
        return self._take_step(what, maps, state, given)

    def _take_step(
        self, what: str, maps: Vocabularies, state: TableState, given: _Given
    ) -> TableState:
        """Return the state after one step of the maps in which keys have rows with values."""
        before, at_home = maps.admitted, None
        # Until the step is admitted it can be undone: arrays are copied, not donated, and what is
        # at home is written last, in one piece.
        try:
            moves = maps.take_keys(given.field.table.name, given.keys)
            new, at_home = self._new_state(maps, state, given, moves)
            number = None if at_home is None else at_home.number
            reached = maps.at(before + 1)
            version = version_after(state, self._layout, moves.taken, moves.owners, reached, number)
            with SignalsDeferred():  # what is at home changes, and the maps are to know it
                raise_on_all(what, Path(), lambda: at_home and at_home.write())
                maps.note_admitted(before + 1)
        except BaseException:
            # A signal that was deferred is raised when the step is admitted already: then it stays.
            if maps.admitted == before:
                if at_home is not None:
                    at_home.undo()  # an error in another process may come when it is written
                maps.undo(before)
            raise
        return dataclasses.replace(new, vocabulary=version)

    def _read(self, name: str, keys: Any, values: ArrayLike, slot: str | None) -> _Given:
        """Return keys and values, after a check of them; waits for rows on their way home."""
        label = f"table {name!r}: keys"
        numbers = read_keys(label, keys)
        # Which of two values of a key is written would depend on the device's order of writes.
        distinct, counts = np.unique(numbers, return_counts=True)
        if distinct.size < numbers.size:
            twice = np.flatnonzero(numbers == distinct[counts.argmax()])
            got = f"the keys at {twice[0]} and {twice[1]} are the same"
            raise ValueError(message(label, expected="each key once", got=got))
        f, given = logical.checked_values(self._layout, name, numbers.size, values, slot=slot)
        # A row that is on its way home would be written after the one that is given now.
        if self._maps is not None and self._maps.homes is not None:
            self._maps.homes.flush()
        return _Given(numbers, np.asarray(given).astype(jnp.dtype(f.shape.dtype)), f)

    def _new_state(
        self, maps: Vocabularies, state: TableState, given: _Given, moves: Moves
    ) -> tuple[TableState, Replacement | None]:
        """Return the state with all that is on the devices written, and what writes it at home."""
        f = given.field
        name, taken = f.table.name, moves.of_keys(f.table.name)
        # In the step that was just taken every key has a row; that of the state is one step behind.
        ids = maps.find(name, given.keys)
        if not f.table.is_on_host:
            new = NewKeys(taken.new_keys, taken.new_rows)
            return self._on_devices(state, f, new, ids, given.values), None
        # Ids that the devices hold, of old keys or of new ones, are written on both sides.
        owners, rows = moves.owners[name], maps.rows(name, ids)
        held, here = owners.rows >= 0, rows >= 0
        keys, places = taken.new_keys[held], owners.rows[held]
        # All processes know all of these, so each fills the lines of all shards alike.
        new = NewKeys(keys, places, np.zeros(keys.size, bool))
        state_of = self._on_devices(state, f, new, rows[here], given.values[here])
        assert maps.homes is not None, "the table is on the host"
        make = functools.partial(self._make_rows, maps.homes, state, given, ids, taken)
        return state_of, Replacement(maps.homes[name], make)

    def _on_devices(
        self, state: TableState, f: Field, new: NewKeys, rows: np.ndarray, values: np.ndarray
    ) -> TableState:
        """Return the state with rows of new keys drawn and values written, in copies of arrays."""
        if not rows.size:
            return state
        stack = f.stack.name
        # The row of a new key is drawn with its slots into memory that is donated, so all arrays of
        # the stack are copied; for keys that had rows the one that is written is enough.
        if new.keys.size:
            mine = {n: logical.copy_array(array) for n, array in state.slots[stack].items()}
            tables = {**state.tables, stack: logical.copy_array(state.tables[stack])}
            copied = dataclasses.replace(state, tables=tables, slots={**state.slots, stack: mine})
            state = self._writer.write(copied, {f.table.name: new})
        else:
            state = f.write(state, logical.copy_array(f.read(state)))
        written = DeviceRows(state, self._layout, f.table.name, [f.part])
        written.write(rows, {f.part: logical.as_stored(values, f)})
        return written.state

    def _make_rows(
        self, homes: Homes, state: TableState, given: _Given, ids: np.ndarray, taken: Taken
    ) -> NewRows:
        """Return the rows that are at home in this process, as they will be."""
        f = given.field
        assert state.vocabulary is not None, "checked"
        numbers = ids.astype(np.int64).view(np.uint64)
        mine = np.flatnonzero(homes.tables[f.table.name].row_groups.at_home(numbers))
        numbers, keys = numbers[mine], given.keys[mine]
        # A known key keeps what is not given, such as its slots; a new key gets all of it fresh.
        # Ids [4, 9, 2] with 9 of a new key: rows of 4 and 2 are read, that of 9 is drawn.
        is_new = np.isin(keys, taken.new_keys)
        rows = self._read_whole(state, f.table.name, numbers[~is_new])
        drawn = self._drawer.draw(
            state.vocabulary, f.table, f.stack, keys[is_new], np.zeros(is_new.sum(), bool)
        )
        whole = {}
        for part, known in rows.items():
            whole[part] = np.empty((mine.size, *known.shape[1:]), known.dtype)
            whole[part][~is_new], whole[part][is_new] = known, drawn[part]
        whole[f.part] = logical.as_stored(given.values[mine], f)
        return NewRows(numbers, whole)


def check_none_ahead(what: str, maps: Vocabularies) -> None:
    """Check that every batch that was placed is admitted.

    Raises:
      ValueError: some are not.
    """
    if maps.placed != maps.admitted:
        expected, got = "no batch placed ahead", f"{maps.placed - maps.admitted}"
        remedy = "admit them first, or engine.vocabularies.rewind(state) forgets them"
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))


def join_blocks(f_label: str, blocks: Iterable[ArrayLike]) -> np.ndarray:
    """Return blocks of rows as one array `[n, …]`.

    Raises:
      ValueError: rows of different blocks have different shapes.
    """
    arrays = [np.asarray(block) for block in blocks]
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) > 1 or any(not array.ndim for array in arrays):
        expected, got = "blocks of rows of one shape", f"{[array.shape for array in arrays]}"
        raise ValueError(message(f_label, expected=expected, got=got))
    return np.concatenate(arrays) if arrays else np.zeros(0)


def refuse_traced(what: str, *given: Any) -> None:
    """Refuse tracers: the host must know which rows it reads or writes."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(given)):
        expected, got = "a call outside a jit, for a table on the host or for keys", "tracers"
        raise ValueError(message(what, expected=expected, got=got, remedy="call it before the jit"))


def _check_same(what: str, given: _Given) -> None:
    """Check that all processes give the same keys and values.

    Raises:
      ValueError: they do not.
    """
    if jax.process_count() == 1:
        return
    content = hashlib.sha256(given.keys.tobytes() + given.values.tobytes()).hexdigest()
    if len(set(gather_from_all(what, f"{given.field.slot} {content}"))) > 1:
        expected, got = "the same keys and values in every process", "others"
        remedy = "read them in every process, in the same order"
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))

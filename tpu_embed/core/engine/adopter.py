"""Bring the state of one engine into the layout of another, without a file.

It is what a save and a restore do, with blocks of rows on the host in the place of files. Of each
table, whose rows have ids in both engines:

    from                     to            which rows
    a static table           anywhere      all; of one on the host, those that were touched
    a living vocabulary      anywhere      those of the keys that stay, and the shared one

A stack that both engines lay out alike, on the same devices, is copied there as a whole.

With several processes, all of them adopt together: each tells the others the rows that it has, one
block after the other, and writes those of all.

Input: a state of the other engine, and both engines' layouts and maps. Output: a state of this one,
and its maps, which are those of the other then. The other engine and its state stay as they are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import message
from tpu_embed.core.engine.logical_rows import LogicalRows
from tpu_embed.core.engine.rows_by_key import check_none_ahead, refuse_traced
from tpu_embed.core.layout import (
    NUMBERS_SLOT,
    ROUNDING_SLOTS,
    Layout,
    Stack,
    keeps_numbers,
    rounds_at_random,
)
from tpu_embed.core.rows import DeviceRows, Ids, Rows, blocks_of, copy_rows
from tpu_embed.core.state import (
    Field,
    TableState,
    blank_arrays,
    check_state,
    field,
    init_tables,
    matched_counters,
    put_everywhere,
    random_key,
    slot_shapes,
    vocabulary_of_maps,
)
from tpu_embed.kernels.stochastic import number_ids
from tpu_embed.processes import raise_on_all
from tpu_embed.storage import HostRows, slot_field
from tpu_embed.vocabulary import MapState, RowMoves, Vocabularies, fit_rows, states_to_load

_copy = jax.jit(lambda arrays: jax.tree.map(jnp.copy, arrays))


class Party(NamedTuple):
    """What an engine gives to an adoption, or takes.

    Attributes:
      layout: its layout.
      maps: its maps; None if it has none.
      rows: reads its rows.
    """

    layout: Layout
    maps: Vocabularies | None
    rows: LogicalRows

    @property
    def names(self) -> list[str]:
        """The names of its tables, sorted."""
        return sorted(table.name for stack in self.layout.stacks for table in stack.tables)

    def fields(self, name: str) -> dict[str | None, Field]:
        """Return a table, under None, and its slots by name."""
        slots = slot_shapes(self.layout.table(name)[0])
        return {slot: field(self.layout, name, slot) for slot in (None, *slots)}


def prepare_adoption(
    state: TableState, other: Party, mine: Party, counters: Mapping[str, jax.ShapeDtypeStruct]
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
    _check_processes(other, mine)

    def fitted_maps() -> tuple[dict[str, MapState], dict[str, RowMoves]]:
        _check_state(state, other)
        for name in mine.names:
            _check_table(name, other, mine)
        return _fit_maps(other, mine)

    fitted, moves = raise_on_all("adopt", Path(), fitted_maps)
    # All rows are copied before this engine's maps change, because there may be no room for them.
    made = _RowCopies(state, other, mine, moves).made()
    paths = [feature.path for feature in other.layout.features]
    found = {name: np.asarray(count) for name, count in state.counters.items()}
    counted = matched_counters(found, paths, counters, mine.layout)
    step = np.asarray(state.step)
    step, counted = put_everywhere((step, counted), mine.layout.axes)
    new = dataclasses.replace(made.state, step=step, counters=counted)
    maps = mine.maps
    if maps is None:
        return lambda: new
    # Without maps there, all tables are static, and this engine has some on the host: a first step.
    admitted = 0 if other.maps is None else other.maps.admitted
    states = states_to_load([table for _, table in mine.layout.living], fitted, admitted)
    key = None
    if state.vocabulary is not None:
        kind, data = random_key(state.vocabulary)
        key = {kind: np.asarray(data)}
    new = dataclasses.replace(new, vocabulary=vocabulary_of_maps(states, key, mine.layout))
    # Wait for batches that are being placed here, not in `load`, where signals may be deferred.
    maps.turns.run_next(lambda: None)

    def load() -> TableState:
        maps.load_states(states, made.homes)
        return new

    return load


def _check_processes(*parties: Party) -> None:
    """Check that every process has devices of all engines.

    Raises:
      ValueError: one has none.
    """
    for party in parties:
        here = party.layout.axes.processes_of_parts(())[0]
        if len(here) != jax.process_count():
            expected, got = f"devices of all {jax.process_count()} processes", f"of {sorted(here)}"
            remedy = "io.save and io.restore bring tables to the devices of other processes"
            raise ValueError(message("adopt: mesh", expected=expected, got=got, remedy=remedy))


def _check_state(state: TableState, other: Party) -> None:
    """Check that a state may be brought into another layout.

    Raises:
      ValueError: it is traced, not the other engine's, or not its newest one.
    """
    refuse_traced("adopt", state)
    check_state(state, other.layout)
    if other.maps is not None:
        other.maps.check_newest(state)
        check_none_ahead("adopt: the other engine", other.maps)
        if other.maps.homes is not None:
            other.maps.homes.flush()


def _check_table(name: str, other: Party, mine: Party) -> None:
    """Check that both engines have a table, with rows of the same form.

    Raises:
      ValueError: they do not.
    """
    remedy = "declare both engines' tables alike"
    if other.names != mine.names:
        expected, got = f"tables {mine.names}", f"{other.names}"
        raise ValueError(message("adopt", expected=expected, got=got, remedy=remedy))
    ours, theirs = _described(name, mine), _described(name, other)
    for what, expected in ours.items():
        if theirs[what] != expected:
            got = f"{theirs[what]}"
            if what == "vocabulary size":
                remedy = "only living vocabularies change their capacity; io.restore with key= "
                remedy += "makes the new rows of a table that grows"
            text = f"adopt: table {name!r}: {what}"
            raise ValueError(message(text, expected=f"{expected}", got=got, remedy=remedy))
    rules = [party.layout.table(name)[1].key_rules for party in (other, mine)]
    before, now = (None if one is None else one.unseen for one in rules)
    if now == "shared" and before != now:
        text, got = f"adopt: table {name!r}: unseen", f"{before!r}"
        raise ValueError(message(text, expected="'shared'", got=got, remedy=remedy))


def _described(name: str, party: Party) -> dict[str, Any]:
    """Return what both engines must have in common of a table."""
    stack, table = party.layout.table(name)
    rule, every = stack.optimizer, party.fields(name)
    living = table.key_rules is not None
    return {
        "dim": stack.dim,
        "dtype": stack.dtype,
        "ids": "keys of a living vocabulary" if living else "row numbers",
        "vocabulary size": "any" if living else table.declared_size,
        "optimizer": None if rule is None else rule.describe()["class"],
        "slots": {
            slot: (*f.shape.shape, str(jnp.dtype(f.shape.dtype)), f.shape.per_row)
            for slot, f in sorted(every.items(), key=str)
            if slot is not None and slot not in ROUNDING_SLOTS
        },
        "rounding": "stochastic" if rounds_at_random(stack) else "nearest",
    }


def _fit_maps(other: Party, mine: Party) -> tuple[dict[str, MapState], dict[str, RowMoves]]:
    """Return the other engine's maps of keys, fitted to this one's capacities, and the rows' moves.

    Raises:
      ValueError: a capacity leaves no row for a key.
    """
    fitted: dict[str, MapState] = {}
    moves: dict[str, RowMoves] = {}
    if other.maps is None:
        return fitted, moves
    states = other.maps.states()
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


class _Made(NamedTuple):
    """What was made for an engine: a state, and rows at home by table on the host."""

    state: TableState
    homes: dict[str, HostRows]


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
    other: Party
    mine: Party
    moves: Mapping[str, RowMoves]

    def made(self) -> _Made:
        """Return tables and slots, and rows at home."""
        state, homes = self._begun(), {}
        for stack in self.mine.layout.stacks:
            if self._is_alike(stack):
                continue
            for table in stack.tables:
                state = self._with_shared_slots(state, table.name)
                if table.is_on_host:
                    homes[table.name] = self._at_home(table.name)
                else:
                    state = self._written(state, table.name)
        return _Made(state, homes)

    def _begun(self) -> TableState:
        """Return tables and slots to write rows over: copies, first values, or zeros."""
        axes = self.mine.layout.axes
        # Zeros are enough where every row is written that somebody can look up: all rows of static
        # tables, and those of keys. Rows of the host are on no device at first.
        alike = [s for s in self.mine.layout.stacks if self._is_alike(s)]
        drawn = [s for s in self.mine.layout.stacks if self._is_drawn(s)]
        blank = [s for s in self.mine.layout.stacks if s not in alike and s not in drawn]
        tables, slots = blank_arrays(tuple(blank), axes)
        if drawn:
            assert self.state.vocabulary is not None, "it has tables on the host"
            kind, data = random_key(self.state.vocabulary)
            key = jax.random.wrap_key_data(jnp.asarray(np.asarray(data)), impl=kind)
            # A program of its own, because stacks that are equal may have other initializers.
            made = jax.jit(functools.partial(init_tables, stacks=tuple(drawn), axes=axes))(key)
            tables, slots = tables | made[0], slots | made[1]
        for stack in alike:
            held = self.state.tables[stack.name], self.state.slots[stack.name]
            tables[stack.name], slots[stack.name] = _copy(held)
        return TableState(tables, slots, self.state.step, {})

    def _is_alike(self, stack: Stack) -> bool:
        """Return whether the other engine has a stack with the same rows in the same places."""
        # Names of stacks say everything of their layout but the devices (`stack_names.py`); where
        # the capacity is the same, keys stay in their rows. Of a table on the host, the devices
        # hold other rows, whatever the name.
        there = {one.name: one for one in self.other.layout.stacks}.get(stack.name)
        if there is None or stack.is_on_host or there.is_on_host:
            return False
        return self.mine.layout.axes == self.other.layout.axes

    def _is_drawn(self, stack: Stack) -> bool:
        """Return whether rows of a stack are drawn, because nobody has touched them at home."""
        before = [self.other.layout.table(table.name)[1] for table in stack.tables]
        return not stack.is_on_host and any(t.is_on_host and t.key_rules is None for t in before)

    def _with_shared_slots(self, state: TableState, name: str) -> TableState:
        """Return the state with the slots of a table that all rows of its stack share."""
        # Such as a number of steps. Tables of one stack have had the same updates; where they come
        # from several stacks whose numbers differ, the last table's stands, as in a restore.
        before = self.other.fields(name)
        for slot, f in self.mine.fields(name).items():
            if not f.shape.per_row:
                whole = np.asarray(before[slot].read(self.state))
                state = f.write(state, put_everywhere(whole, self.mine.layout.axes))
        return state

    def _written(self, state: TableState, name: str) -> TableState:
        """Return the state with the rows of a table on the devices, in its own memory."""
        rows = DeviceRows(state, self.mine.layout, name)
        copy_rows(functools.partial(self._read, name), rows.write, self._blocks(name, rows))
        return rows.state

    def _at_home(self, name: str) -> HostRows:
        """Return the rows of a table on the host."""
        assert self.mine.maps is not None, "its ids get rows as keys do"
        assert self.mine.maps.homes is not None, "it is on the host"
        home = self.mine.maps.homes.tables[name]
        made, failed = HostRows(home.fields, home.storage.path), []

        def write(ids: Ids, rows: Rows) -> None:
            numbers = np.asarray(ids, np.int64).view(np.uint64)
            here = home.row_groups.at_home(numbers)
            try:
                made.write(numbers[here], {part: some[here] for part, some in rows.items()})
            except Exception as error:  # the other processes wait for the rows that this one reads
                failed.append(error)

        def written() -> HostRows:
            if failed:
                raise failed[0]
            return made

        copy_rows(functools.partial(self._read, name), write, self._blocks(name))
        return raise_on_all(f"adopt: table {name!r}", Path(), written)

    def _blocks(self, name: str, rows: DeviceRows | None = None) -> Iterable[Any]:
        """Return the ids of a table's rows in blocks, before and now; see `copy_rows`."""
        table, moves = self.other.layout.table(name)[1], self.moves.get(name)
        if moves is None and table.is_on_host:
            ids = self.other.rows.touched(name)
            moves = RowMoves(ids, ids)
        if moves is None and rows is not None and jax.process_count() == 1:
            return rows.lines(table.declared_size)
        size = DeviceRows(self.state, self.other.layout, name).block
        # Two keys in the rows 0 and 2 of four, whose last row is shared, go to a table of six rows:
        # before 0 2 3, now 0 2 5. A static table keeps all its rows where they are.
        if moves is None:
            return blocks_of(range(table.declared_size), size)
        return zip(blocks_of(moves.before, size), blocks_of(moves.now, size), strict=True)

    def _read(self, name: str, ids: Ids) -> Rows:
        """Return rows of a table of the other engine."""
        rows = self.other.rows.stored_rows(self.state, name, ids)
        # Only where a map gives rows does a state keep what stands for them (`stochastic.py`).
        if keeps_numbers(self.mine.layout.table(name)[0]) and slot_field(NUMBERS_SLOT) not in rows:
            numbers = number_ids(np.asarray(ids, np.int64).view(np.uint64))
            rows = {**rows, slot_field(NUMBERS_SLOT): numbers}
        return rows

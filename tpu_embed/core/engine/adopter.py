"""Bring the state of one engine into the layout of another, without a file.

It is what a save and a restore do, with blocks of rows on the host in the place of files. Of each
table, whose rows have ids in both engines:

    from                     to            which rows
    a static table           anywhere      all; of one on the host, those that were touched
    a dynamic vocabulary      anywhere      those of the keys that stay, and the shared one

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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import refuse
from tpu_embed.core.engine.logical_rows import (
    LogicalRows,
    check_none_ahead,
    copy_arrays,
    refuse_traced,
)
from tpu_embed.core.layout import (
    NUMBERS_SLOT,
    ROUNDING_SLOTS,
    Stack,
)
from tpu_embed.core.rows import DeviceRows, Ids, Rows, blocks_of, copy_rows
from tpu_embed.core.state import (
    TableState,
    blank_arrays,
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
from tpu_embed.kernels.stochastic import number_ids
from tpu_embed.processes import raise_on_all
from tpu_embed.storage import HostRows, slot_field
from tpu_embed.vocabulary import MapState, RowMoves, fit_rows, states_to_load


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
    _check_processes(other, mine)

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
    states = states_to_load([table for _, table in mine.layout.living], fitted, admitted)
    key = None
    if state.vocabulary is not None:
        key = jax.tree.map(np.asarray, random_key(state.vocabulary))
    new = dataclasses.replace(new, vocabulary=vocabulary_of_maps(states, key, mine.layout))

    def load():
        maps.load_states(states, homes)
        return new

    return load


def _check_processes(*engines: LogicalRows) -> None:
    """Check that every process has devices of all engines.

    Raises:
      ValueError: one has none.
    """
    for engine in engines:
        here = engine.layout.axes.processes_of_parts(())[0]
        if len(here) != jax.process_count():
            refuse(
                "adopt: mesh",
                expected=f"devices of all {jax.process_count()} processes",
                got=f"of {sorted(here)}",
                remedy="io.save and io.restore bring tables to the devices of other processes",
            )


def _check_tables(other: LogicalRows, mine: LogicalRows) -> None:
    """Check that both engines have the same tables, with rows of the same form.

    Raises:
      ValueError: they do not.
    """
    remedy = "declare both engines' tables alike"
    ours, theirs = _describe_tables(mine), _describe_tables(other)
    if ours.keys() != theirs.keys():
        refuse("adopt", expected=f"tables {sorted(ours)}", got=f"{sorted(theirs)}", remedy=remedy)
    for name in sorted(ours):
        for what, expected in ours[name].items():
            got = theirs[name][what]
            if got != expected:
                if what == "vocabulary size":
                    remedy = (
                        "only dynamic vocabularies change their capacity; io.restore with key= "
                    )
                    remedy += "makes the new rows of a table that grows"
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
                    copy_rows(functools.partial(self._read, table.name), rows.write, blocks)
                    state = rows.state
        return state, homes

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
            key = open_key(jax.tree.map(np.asarray, random_key(self.state.vocabulary)))
            # A program of its own, because stacks that are equal may have other initializers.
            made = jax.jit(functools.partial(init_tables, stacks=tuple(drawn), axes=axes))(key)
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
        return not stack.is_on_host and any(t.is_on_host and t.key_rules is None for t in before)

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
                made.write(numbers[here], {part: some[here] for part, some in rows.items()})
            except Exception as error:  # the other processes wait for the rows that this one reads
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
        return zip(blocks_of(moves.before, size), blocks_of(moves.now, size), strict=True)

    def _read(self, name: str, ids: Ids) -> Rows:
        """Return rows of a table of the other engine."""
        rows = self.other.stored_rows(self.state, name, ids)
        # Only where a map gives rows does a state keep what stands for them (`stochastic.py`).
        if self.mine.layout.table(name)[0].keeps_numbers and slot_field(NUMBERS_SLOT) not in rows:
            numbers = number_ids(np.asarray(ids, np.int64).view(np.uint64))
            rows = {**rows, slot_field(NUMBERS_SLOT): numbers}
        return rows

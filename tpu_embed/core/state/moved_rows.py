"""Move rows with their slots between the devices and their home on the host.

A row at home is everything that belongs to it: its values, as they are stored, and its part of
every slot that has one for each row. Slots that all rows share stay on the devices.

    collect     the rows of some places  ->  copies on the devices, which the host reads later
    put         rows from home  ->  the same tables, in their own memory

Input: a state, and logical rows of tables on the host. Output: copies; or the state.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from tpu_embed._calls import call
from tpu_embed._checks import message
from tpu_embed._types import Array
from tpu_embed.core.layout import Layout, Parcels, Stack, TableSlice, open_rows
from tpu_embed.core.state.table_state import (
    StackShard,
    TableState,
    slot_format,
    slot_shapes,
    state_specs,
)
from tpu_embed.kernels import dispatch, storage
from tpu_embed.kernels.formats import RowFormat
from tpu_embed.storage import VALUES, Homes, HomeTable, RowField, slot_field

Rows = Mapping[str, np.ndarray]
"""What some rows of a table have: `[n, …]` by field, in the stored dtypes."""


def row_fields(stack: Stack) -> dict[str, RowField]:
    """Return what a row of a stack has."""
    formats = _formats(stack)
    return {
        name: RowField(one.shape, storage.stored_dtype(one.dtype)) for name, one in formats.items()
    }


def make_homes(layout: Layout) -> Homes | None:
    """Return homes for the tables on the host, with no row yet; None if there are none.

    Raises:
      ValueError: there are several processes, or an optimizer touches every row.
    """
    tables = {}
    for stack, table in layout.on_host:
        assert table.storage is not None, "a table on the host"
        check_rule(stack, table)
        tables[table.name] = HomeTable(table.storage, row_fields(stack))
    if tables and jax.process_count() > 1:
        what, expected = f"table {next(iter(tables))!r}: storage", "one process"
        remedy = "leave storage out: with several processes, tables are on the devices"
        got = f"{jax.process_count()}"
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))
    return Homes(tables) if tables else None


def check_rule(stack: Stack, table: TableSlice) -> None:
    """Refuse a rule that changes rows which are not in the batch: most are not on the devices."""
    rule = stack.optimizer
    if rule is not None and rule.updates_every_row:
        expected, got = "one that updates the rows of a batch alone", f"{rule}"
        remedy = "lazy_adam=True, or another optimizer, or no storage"
        what = f"table {table.name!r} with storage: optimizer"
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))


def _formats(stack: Stack) -> dict[str, RowFormat]:
    """Return how the rows of each field lie in their array."""
    per_row = {n: slot for n, slot in slot_shapes(stack).items() if slot.per_row}
    slots = {slot_field(n): slot_format(stack, slot) for n, slot in per_row.items()}
    return {VALUES: stack.row_format, **slots}


class Collected(NamedTuple):
    """Copies of rows that are, or will be, on the devices.

    Attributes:
      arrays: by stack, `[S, m, …]` by field.
      parcels: by stack, which rows they are.
    """

    arrays: dict[str, dict[str, Array]]
    parcels: dict[str, Parcels]

    def read(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the rows of each table, `[n, …]` by field; waits until they are there."""
        found: dict[str, dict[str, np.ndarray]] = {}
        for stack, arrays in self.arrays.items():
            for name, array in arrays.items():
                for table, rows in self.parcels[stack].unpacked(np.asarray(array)).items():
                    found.setdefault(table, {})[name] = rows
        return found


class RowMover:
    """Moves rows between the devices and the host, for one engine.

    Each stack has programs of its own, so it does not matter which stacks have rows together.

    Args:
      layout: the engine's layout.

    Attributes:
      traces: how often a program was traced.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout, self.traces = layout, 0
        self._collecting = {s.name: self._program(s, _collect, ()) for s in layout.stacks}
        self._putting = {s.name: self._program(s, _put, 0) for s in layout.stacks}

    def _program(self, stack: Stack, function: Any, donated: Any) -> Any:
        axes = self._layout.axes
        tables, slots = state_specs((stack,), axes)
        held = StackShard(tables[stack.name], slots[stack.name])
        split = axes.spec(stack.shard_axes)

        def run(held_arrays: StackShard, rows: Array, values: dict[str, Array]) -> Any:
            self.traces += 1  # this line runs once per trace, not once per step
            shard = functools.partial(function, stack)
            return jax.shard_map(
                shard,
                mesh=axes.mesh,
                in_specs=(held, split, split),
                out_specs=split if function is _collect else held,
                check_vma=False,
            )(held_arrays, rows, values)

        return jax.jit(run, donate_argnums=donated)

    def collect(self, state: TableState, rows: Mapping[str, np.ndarray]) -> Collected:
        """Return copies of some rows; the state stays as it is.

        Args:
          state: the state.
          rows: int64 `[n]` by table, logical rows, all different.
        """
        found, parcels = {}, {}
        for stack, mine in self._by_stack(rows):
            parcels[stack.name] = Parcels(stack, mine)
            held = StackShard(state.tables[stack.name], state.slots[stack.name])
            line = self._sent(stack, parcels[stack.name].rows())
            found[stack.name] = call(self._collecting[stack.name], held, line, {})
        for array in jax.tree.leaves(found):
            array.copy_to_host_async()
        return Collected(found, parcels)

    def prepare(self, rows: Mapping[str, np.ndarray], values: Mapping[str, Rows]) -> Any:
        """Send rows to the devices; return what `put` takes.

        Args:
          rows: int64 `[n]` by table, logical rows, all different.
          values: by table.
        """
        sent = {}
        for stack, mine in self._by_stack(rows):
            parcels = Parcels(stack, mine)
            fields = {
                name: parcels.packed(np.concatenate([values[table][name] for table in mine]))
                for name in _formats(stack)
            }
            send = functools.partial(self._sent, stack)
            sent[stack.name] = send(parcels.rows()), jax.tree.map(send, fields)
        return sent

    def put(self, state: TableState, prepared: Any) -> TableState:
        """Return the state with rows from home; its tables and slots are donated."""
        tables, slots = dict(state.tables), dict(state.slots)
        for name, (rows, values) in prepared.items():
            held = StackShard(tables[name], slots[name])
            tables[name], slots[name] = call(self._putting[name], held, rows, values)
        return dataclasses.replace(state, tables=tables, slots=slots)

    def lower(self, stack: Stack, held: StackShard, rows: Any, values: Any) -> Any:
        """Return the program of `put`, or of `collect` without values, lowered for shapes."""
        programs = self._putting if values else self._collecting
        return programs[stack.name].lower(held, rows, values)

    def _by_stack(self, rows: Mapping[str, np.ndarray]) -> list[tuple[Stack, dict]]:
        """Return the stacks that have some of the rows, with their tables' rows."""
        every = [
            (s, {t.name: rows[t.name] for t in s.tables if t.name in rows})
            for s in self._layout.stacks
        ]
        return [(s, mine) for s, mine in every if any(one.size for one in mine.values())]

    def _sent(self, stack: Stack, array: np.ndarray) -> Array:
        return jax.device_put(array, self._layout.axes.sharding(stack.shard_axes))


def _collect(stack: Stack, held: StackShard, rows: Array, _: dict[str, Array]) -> dict[str, Array]:
    """Return this device's copies `[1, m, …]` of local rows, given in halves `[1, 2, m]`."""
    local = open_rows(rows[0], stack)
    return {
        name: one.unpack(dispatch.read_rows(_array(held, name), local, one))[None]
        for name, one in _formats(stack).items()
    }


def _put(stack: Stack, held: StackShard, rows: Array, values: dict[str, Array]) -> StackShard:
    """Return this device's shard with `values` `[1, m, …]` at local rows, in halves `[1, 2, m]`."""
    local, written = open_rows(rows[0], stack), {}
    for name, one in _formats(stack).items():
        array = _array(held, name)
        written[name] = dispatch.write_ascending_rows(array, local, values[name][0], one)
    slots = {name: written.get(slot_field(name), slot) for name, slot in held.slots.items()}
    return StackShard(written[VALUES], slots)


def _array(held: StackShard, field: str) -> Array:
    if field == VALUES:
        return held.table
    return held.slots[field.removeprefix(slot_field(""))]

"""Move rows with their slots between the devices and their home on the host.

A row at home is everything that belongs to it: its values, as they are stored, and its part of
every slot that has one for each row. Slots that all rows share stay on the devices.

    send        rows from home  ->  the same on the devices
    exchange    these and the tables  ->  the tables with them, in their own memory; and copies of
                what was in their places, which the host reads later

Input: a state, and logical rows of tables on the host. Output: copies; or the state.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from tpu_embed._checks import refuse
from tpu_embed._types import Array
from tpu_embed.core.exchange import collectives
from tpu_embed.core.layout import (
    Agreed,
    Arrival,
    Layout,
    Stack,
    TableSlice,
    fetch_parcels,
    lines,
    open_rows,
    parcel_operand,
)
from tpu_embed.core.state.table_state import (
    StackShard,
    TableState,
    row_formats,
    stack_specs,
    write_parts,
)
from tpu_embed.kernels import dispatch, storage
from tpu_embed.kernels.tracing import zero_after
from tpu_embed.storage import Homes, HomeTable, Room, RowField, RowGroups


def row_fields(stack: Stack) -> dict[str, RowField]:
    """Return what a row of a stack has."""
    return {
        part: RowField(one.shape, storage.stored_dtype(one.dtype))
        for part, one in row_formats(stack).items()
    }


def make_homes(layout: Layout) -> Homes | None:
    """Return homes for the tables on the host, with no row yet; None if there are none.

    Raises:
      ValueError: an optimizer touches every row; or `HostStorage.groups` does not suit the
        processes.
    """
    tables = {}
    for stack, table in layout.on_host:
        declared = table.storage
        assert declared is not None, "a table on the host"
        check_rule(stack, table)
        row_groups = _groups(layout, stack, table, declared.groups)
        tables[table.name] = HomeTable(declared, row_fields(stack), row_groups)
    return Homes(tables) if tables else None


def _groups(layout: Layout, stack: Stack, table: TableSlice, wanted: int | None) -> RowGroups:
    """Return which rows on the devices an id of a table may have.

    Raises:
      ValueError: `HostStorage.groups` does not suit the processes, or there are too few rows.
    """
    # Shards have one owner if the same processes hold them: [{0}, {0}, {1}, {1}] -> 0 0 1 1.
    holders = layout.axes.processes_of_parts(stack.shard_axes)
    numbers = {one: i for i, one in enumerate(dict.fromkeys(holders))}
    count = wanted or len(numbers)
    if count % len(numbers):
        refuse(
            f"table {table.name!r}: HostStorage.groups",
            expected=f"a multiple of {len(numbers)}, which shards of the table belong to",
            got=f"{count}",
        )
    here = layout.axes.process
    made = RowGroups(
        num_rows=table.vocabulary_size,
        owners=tuple(numbers[one] for one in holders),
        by_range=stack.placement == "div",
        count=count,
        mine=frozenset(number for one, number in numbers.items() if here in one),
        saved=frozenset(number for one, number in numbers.items() if here == min(one)),
    )
    if not all(rows.size for rows in made.rows):
        refuse(
            f"table {table.name!r}: HostStorage.device_rows",
            expected=f"at least {count}, with rows of all processes",
            got=f"{table.vocabulary_size} rows",
        )
    return made


def check_rule(stack: Stack, table: TableSlice) -> None:
    """Refuse a rule that changes rows which are not in the batch: most are not on the devices."""
    rule = stack.optimizer
    if rule is not None and rule.updates_every_row:
        refuse(
            f"table {table.name!r} with storage: optimizer",
            expected="one that updates the rows of a batch alone",
            got=f"{rule}",
            remedy="lazy_adam=True, or another optimizer, or no storage",
        )


Fields = dict[str, Array]
"""Rows on the devices, `[S, m, …]` by field, in parcels."""


class Sent(NamedTuple):
    """Rows of one stack, to be written into its table: operands of a program, see `parcel_operand`.

    Attributes:
      places: uint32 `[S, 2, m]`, the local rows of all rows of its parcels, in halves.
      written: the same, where only those are not absent that came from home.
      fields: their values; none if no row came from home.
    """

    places: Array
    written: Array
    fields: Fields


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
        self._programs = {
            stack.name: jax.jit(functools.partial(self._exchange, stack), donate_argnums=0)
            for stack in layout.stacks
        }

    def _exchange(self, stack: Stack, held: StackShard, sent: Sent) -> Any:
        self.traces += 1  # this line runs once per trace, not once per step
        axes, shard = self._layout.axes, functools.partial(_exchange, stack)
        specs, split = stack_specs(stack, axes), axes.spec(stack.shard_axes)
        run = collectives.per_device(shard, axes, (specs, split), (split, tuple(specs)))
        return run(held, sent)

    def send(
        self,
        arrivals: Mapping[str, Arrival],
        found: Mapping[str, np.ndarray],
        agreed: Mapping[str, Agreed] | None,
    ) -> dict[str, Sent]:
        """Send the rows that a batch brings to the devices, by stack.

        Args:
          arrivals: by stack, the new rows of its tables.
          found: bool `[n]` by table, which of them came from home in this process.
          agreed: by stack; None: there is one process.
        """
        sent = {}
        for stack in self._layout.stacks:
            one = arrivals.get(stack.name)
            if one is None or not one.parcels.at.size:
                continue
            sharding = self._layout.axes.sharding(stack.shard_axes)
            operand = functools.partial(parcel_operand, sharding=sharding)
            from_home = np.concatenate([found[table] for table in one.parcels.parts])
            places = written = operand(one.parcels.rows())
            if not from_home.all():
                written = operand(one.parcels.rows(from_home))
            some = from_home.any() if agreed is None else agreed[stack.name].from_home
            fields = one.fields if some else {}
            fields = {name: operand(field) for name, field in fields.items()}
            sent[stack.name] = Sent(places, written, fields)
        return sent

    def exchange(
        self, state: TableState, sent: Mapping[str, Sent], call: Callable[..., Any]
    ) -> tuple[TableState, dict[str, Fields]]:
        """Return the state with rows from home, and what was in the places of all that were sent.

        Tables and slots are donated. Rows that did not come from home stay as they are.

        Args:
          state: the state.
          sent: what `send` returned.
          call: that of an `Exchange`.

        Returns:
          The state, and the copies by stack.
        """
        tables, slots, copies = dict(state.tables), dict(state.slots), {}
        for name, one in sent.items():
            held = StackShard(tables[name], slots[name])
            copies[name], held = call(self._programs[name], held, one)
            tables[name], slots[name] = held
        if not self._layout.axes.on_cpu:  # the host's memory is where they are then
            for array in jax.tree.leaves(copies):
                for shard in array.addressable_shards:
                    shard.data.copy_to_host_async()
        return dataclasses.replace(state, tables=tables, slots=slots), copies

    def lower(self, stack: Stack, held: StackShard, sent: Sent) -> Any:
        """Return the program of `exchange`, lowered for the shapes of a stack's shard and rows."""
        return self._programs[stack.name].lower(held, sent)


def leaving_rooms(
    copies: Mapping[str, Fields], arrivals: Mapping[str, Arrival], mine: Mapping[str, np.ndarray]
) -> dict[str, Room]:
    """Return where the displaced rows of each table are; waits until they have been copied.

    Args:
      copies: by stack, what was in the places of new rows.
      arrivals: by stack, the new rows.
      mine: by table, bool `[e]`: the last e of its new rows have displaced others, the first ones
        none; which of these e are at home in this process.
    """
    rooms = {}
    for stack, fields in copies.items():
        parcels = arrivals[stack].parcels
        rows = {name: lines(fetch_parcels(field)) for name, field in fields.items()}
        for table, part in parcels.parts.items():
            at = parcels.at[part]
            rooms[table] = Room(rows, at[at.size - mine[table].size :][mine[table]])
    return rooms


def _exchange(stack: Stack, held: StackShard, sent: Sent) -> tuple[Fields, tuple[Any, ...]]:
    """Return this device's copies `[1, m, …]` of rows, and its shard with those that were sent."""
    local, arrays = open_rows(sent.places[0], stack), held.by_part()
    copies = {
        part: one.unpack(dispatch.read_rows(arrays[part], local, one))[None]
        for part, one in row_formats(stack).items()
    }
    if not sent.fields:
        return copies, tuple(held)
    rows = open_rows(sent.written[0], stack)
    rows += zero_after([*copies.values()]).astype(rows.dtype)
    values = {part: field[0] for part, field in sent.fields.items()}
    return copies, tuple(write_parts(held, rows, values, stack))  # plain, for `Exchange`

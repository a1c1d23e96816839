"""Rows that come to the devices and leave them: new ones are drawn, others move from and to home.

The rows of new keys are new: their values and slots are drawn as if the table were made now.
A key's row depends on the key alone, not on the row that it gets, on who had it before, or on the
devices: it is drawn with the random key

    fold_in(fold_in(fold_in(key, crc32(table name)), low 32 bits of the id), high 32 bits)

where `key` is what `init` was given, which the state holds. A row of a table on the host that
belongs to no key is drawn as `init` draws that row id (`init.py`).

A batch that is only looked up brings rows of tables on the host along; with what is drawn of them
they make small tables, which it is looked up in.

A row at home on the host is everything that belongs to it: its values, as they are stored, and its
part of every slot that has one for each row. Slots that all rows share stay on the devices.

    send        rows from home  ->  the same on the devices
    exchange    these and the tables  ->  the tables with them, in their own memory; and copies of
                what was in their places, which the host reads later

Input: a state, and new keys of each table with their rows, or rows from home. Output: the tables
and slots with these rows written, in their own memory; copies; or the small tables.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tpu_embed._calls import call
from tpu_embed._checks import refuse
from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.exchange import collectives
from tpu_embed.core.layout import (
    BY_ID,
    Agreed,
    Arrival,
    Layout,
    NewKeys,
    Parcels,
    Stack,
    TableSlice,
    Visits,
    fetch_parcels,
    lines,
    open_rows,
    parcel_operand,
)
from tpu_embed.core.state.init import (
    NewRows,
    fold_row_id,
    fresh_slots,
    open_key,
    random_key,
    row_by_row,
    table_keys,
)
from tpu_embed.core.state.table_state import (
    StackShard,
    TableState,
    row_formats,
    slot_shapes,
    stack_specs,
    write_parts,
)
from tpu_embed.kernels import dispatch, storage
from tpu_embed.kernels.stochastic import row_number
from tpu_embed.kernels.tracing import zero_after
from tpu_embed.storage import (
    VALUES,
    Homes,
    HomeTable,
    Room,
    RowField,
    RowGroups,
    Rows,
    slot_field,
)


class KeyedParcel(NamedTuple):
    """The new rows that one device writes, `[m]` each.

    Attributes:
      rows: local rows, ascending; `PADDING_ID` for none.
      tables: int32, the number of the table in its stack.
      by_id: bool, of a table on the host, whether the row is drawn as that of an id.
      low: uint32, the low 32 bits of the key.
      high: uint32, the high ones.
    """

    rows: Array
    tables: Array
    by_id: Array
    low: Array
    high: Array


class NewRowWriter:
    """Writes the rows of new keys, for one engine; draws those of tables on the host for the host.

    Each stack has programs of its own, so it does not matter which stacks get keys together; stacks
    that are equal may have other initializers in another engine.

    Args:
      layout: the engine's layout.

    Attributes:
      traces: how often a program was traced: once per stack for each size of its new rows.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout, self.traces = layout, 0
        self._programs = {
            stack: jax.jit(functools.partial(self._write, stack), donate_argnums=0)
            for stack in dict.fromkeys(stack for stack, _ in layout.living)
        }
        self._drawing = {
            stack: jax.jit(functools.partial(_draw_parts, stack))
            for stack in self._programs
        }

    def write(
        self,
        state: TableState,
        new: Mapping[str, NewKeys],
        most: Mapping[str, int] | None = None,
        *,
        call: Callable[..., Any] = call,
    ) -> TableState:
        """Return the state with the rows of new keys made new; tables and slots are donated.

        The work is in proportion to the new keys; stacks without any are not touched.

        Args:
          state: the state.
          new: the new keys by table, the same in all processes; of tables on the host, those that
            this process draws.
          most: by stack of tables on the host, the most rows that a process draws for a shard.
          call: that of an `Exchange`, or one that stores nothing.
        """
        assert state.vocabulary is not None
        axes, parcels = self._layout.axes, {}
        given = {name: one for name, one in new.items() if one.keys.size}
        keys = {name: one.keys for name, one in given.items()}
        rows = {name: one.rows for name, one in given.items()}
        by_id = {name: one.by_id for name, one in given.items()}
        for stack in self._programs:
            least = (most or {}).get(stack.name, 0)
            if least or any(table.name in keys for table in stack.tables):
                keyed = Parcels(stack, rows, least).keyed(keys, by_id)
                parcels[stack] = parcel_operand(keyed, axes.sharding(stack.shard_axes))
        # The first program donates an array of the state: what can fail before has been done.
        tables, slots = dict(state.tables), dict(state.slots)
        key = random_key(state.vocabulary)
        for stack, parcel in parcels.items():
            held = StackShard(tables[stack.name], slots[stack.name])
            written = call(self._programs[stack], held, key, parcel)
            tables[stack.name], slots[stack.name] = written
        return dataclasses.replace(state, tables=tables, slots=slots)

    def draw(
        self,
        vocabulary: Mapping[str, Array],
        table: TableSlice,
        stack: Stack,
        keys: np.ndarray,
        by_id: np.ndarray | None = None,
    ) -> Rows:
        """Return new rows of a table as they are stored, `[n, …]` by field.

        Args:
          vocabulary: `TableState.vocabulary`, which holds the random key.
          table: the table.
          stack: its stack.
          keys: uint64 `[n]`.
          by_id: bool `[n]`, which of them are ids; None: all.
        """
        # One shard that has them all, of which the numbers of the rows do not matter.
        alone = dataclasses.replace(
            stack, num_shards=1, num_rows=stack.num_rows + keys.size
        )
        parcels = Parcels(alone, {table.name: np.arange(keys.size)})
        keyed = parcels.keyed({table.name: keys}, {table.name: by_id})
        # Each process draws for itself, so the key must not be an array of all their devices.
        key = jax.tree.map(np.asarray, random_key(vocabulary))
        drawn = self._drawing[stack](key, keyed[0])
        return {
            name: parcels.unpacked(np.asarray(rows)[None])[table.name]
            for name, rows in drawn.items()
        }

    def lower(
        self, stack: Stack, held: StackShard, vocabulary: Any, parcels: Any
    ) -> Any:
        """Return the program of `write`, lowered for arrays of a stack, or shapes."""
        return self._programs[stack].lower(held, random_key(vocabulary), parcels)

    def _write(
        self, stack: Stack, held: StackShard, key: dict[str, Array], parcels: Array
    ) -> tuple[Any, ...]:
        self.traces += 1  # this line runs once per trace, not once per step
        axes = self._layout.axes
        specs = stack_specs(stack, axes)

        def device(held, key, parcels):
            rows = open_rows(parcels[0, :2], stack)
            drawn = _draw_parts(stack, key, parcels[0])
            return tuple(write_parts(held, rows, drawn, stack))  # plain, for `Exchange`

        given = specs, PartitionSpec(), axes.spec(stack.shard_axes)
        return collectives.per_device(device, axes, given, tuple(specs))(
            held, key, parcels
        )


def open_keyed(parcel: Array, stack: Stack) -> KeyedParcel:
    """Return what one device draws from its part `[5, m]` of the array of `Parcels.keyed`."""
    _, _, tables, *key = parcel
    by_id, tables = tables >= BY_ID, tables % BY_ID
    # The table of an absent row is any; the row is not written.
    tables = jnp.minimum(tables, np.uint32(len(stack.tables) - 1)).astype(jnp.int32)
    return KeyedParcel(open_rows(parcel[:2], stack), tables, by_id, *key)


def draw_rows(key: Array, new: KeyedParcel, stack: Stack) -> tuple[Array, NewRows]:
    """Draw the rows of keys, `[m, D]`, in the compute dtype; and what slots are made from.

    Args:
      key: the engine's key.
      new: the rows' keys.
      stack: the stack.
    """
    of_tables = table_keys(key, stack.tables)[new.tables]
    keys = _row_keys(of_tables, new, stack)
    # As in `init.py`, barriers around the drawing keep its bits independent of the program.
    numbers = row_number(new.low, new.high) if stack.keeps_numbers else None
    lines = NewRows(new.rows, keys, new.rows, new.rows >= 0, numbers)
    lines = jax.lax.optimization_barrier(lines)
    rows = jnp.zeros((new.rows.shape[0], stack.dim), stack.compute_dtype)
    living = [(i, t) for i, t in enumerate(stack.tables) if t.vocabulary is not None]
    for initializer, run in itertools.groupby(
        living, key=lambda one: one[1].initializer
    ):
        mine = list(run)
        draw = row_by_row(initializer, stack, f"table {mine[0][1].name!r}: initializer")
        here = jnp.isin(new.tables, jnp.asarray([i for i, _ in mine], jnp.int32))
        rows = jnp.where(here[:, None], draw(lines).astype(stack.compute_dtype), rows)
    return jax.lax.optimization_barrier(rows), lines


def first_rows(
    vocabulary: Mapping[str, Array], table: TableSlice, stack: Stack
) -> Callable[[Array], Array]:
    """Return a function of ids of a table on the host that draws their first rows, also in a jit.

    It takes uint32 `[n, 2]`, the low and the high halves of the ids, and returns `[n, D]` as rows
    are stored.

    Args:
      vocabulary: `TableState.vocabulary`, which holds the random key.
      table: the table, whose ids are row numbers.
      stack: its stack.
    """
    known, number = (
        jax.tree.map(np.asarray, random_key(vocabulary)),
        stack.tables.index(table),
    )

    def drawn(ids):
        # All rows are of one table, and none has a place on a device: they are only numbered.
        rows = jax.lax.iota(jnp.int32, ids.shape[0])
        same = jnp.zeros_like(rows)
        new = KeyedParcel(rows, same + number, same == 0, low=ids[:, 0], high=ids[:, 1])
        return storage.encode(draw_rows(open_key(known), new, stack)[0], stack.dtype)

    return drawn


def _draw_parts(stack: Stack, key: dict[str, Array], parcel: Array) -> dict[str, Array]:
    """Return drawn rows with their slots, as they are stored, by part."""
    rows, lines = draw_rows(open_key(key), open_keyed(parcel, stack), stack)
    slots, shapes = fresh_slots(stack, rows, lines), slot_shapes(stack).items()
    # A slot that all rows share (a step counter, say) is no new row's.
    return {VALUES: storage.encode(rows, stack.dtype)} | {
        slot_field(name): storage.encode(slots[name], slot.dtype)
        for name, slot in shapes
        if slot.per_row
    }


def _row_keys(of_tables: Array, new: KeyedParcel, stack: Stack) -> Array:
    """Return the random key of each row, `[m]`, from those of the rows' tables."""
    if not stack.is_on_host:
        return jax.vmap(_fold_key)(of_tables, new.low, new.high)
    if all(table.key_table is None for table in stack.tables):
        return jax.vmap(fold_row_id)(of_tables, new.low, new.high)
    of_ids, of_keys = (
        jax.vmap(f)(of_tables, new.low, new.high) for f in (fold_row_id, _fold_key)
    )
    return jnp.where(new.by_id, of_ids, of_keys)


def _fold_key(key: Array, low: Array, high: Array) -> Array:
    """Return the random key of a key's row from that of its table; see above."""
    return jax.random.fold_in(jax.random.fold_in(key, low), high)


def visiting_tables(
    tables: Mapping[str, Array],
    vocabulary: Mapping[str, Array],
    visits: Mapping[str, Visits],
    layout: Layout,
    small: Layout,
) -> dict[str, Array]:
    """Return the tables of a state with those on the host replaced by small ones; in a program.

    Args:
      tables: `TableState.tables`.
      vocabulary: `TableState.vocabulary`, which holds the random key.
      visits: what the small ones are made of, by stack.
      layout: the engine's layout.
      small: that of the small tables.
    """
    axes, made = layout.axes, dict(tables)
    for large, stack in zip(layout.stacks, small.stacks, strict=True):
        if stack.is_on_host:
            split = axes.spec(stack.shard_axes)
            shard = functools.partial(_small_table, large, stack)
            make = collectives.per_device(
                shard, axes, (split, PartitionSpec(), split), split
            )
            made[stack.name] = make(
                tables[stack.name], random_key(vocabulary), visits[stack.name]
            )
    return made


def _small_table(
    large: Stack, small: Stack, table: Array, key: dict[str, Array], all_visits: Visits
) -> Array:
    """Return this device's shard of a small stack, from its line `[1, …]` of what it is made of."""
    visits: Visits = jax.tree.map(lambda line: line[0], all_visits)
    lies, whole = small.row_format, small.row_format.array(small.num_rows)
    array = jnp.zeros(whole.shape, whole.dtype)
    held = lies.unpack(dispatch.read_rows(table, visits.cached, large.row_format))
    rows = jnp.arange(small.num_rows, dtype=small.index_dtype)
    rows = jnp.where(visits.cached >= 0, rows, PADDING_ID)
    array = dispatch.write_ascending_rows(array, rows, held, lies)
    places = open_rows(visits.places, small)
    array = dispatch.write_ascending_rows(array, places, visits.stored, lies)
    new = open_keyed(visits.drawn, small)
    drawn, _ = draw_rows(open_key(key), new, small)
    stored = storage.encode(drawn, small.dtype)
    return dispatch.write_ascending_rows(array, new.rows, stored, lies)


# -- rows from home and on their way there ---------------------------------------------------------


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


def _groups(
    layout: Layout, stack: Stack, table: TableSlice, wanted: int | None
) -> RowGroups:
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
    here = layout.axes.here
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
            stack.name: jax.jit(
                functools.partial(self._exchange, stack), donate_argnums=0
            )
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
    copies: Mapping[str, Fields],
    arrivals: Mapping[str, Arrival],
    mine: Mapping[str, np.ndarray],
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


def _exchange(
    stack: Stack, held: StackShard, sent: Sent
) -> tuple[Fields, tuple[Any, ...]]:
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
    # Plain, for `Exchange`.
    return copies, tuple(write_parts(held, rows, values, stack))

"""Make the rows of new keys new: their values and slots are drawn as if the table were made now.

A key's row depends on the key alone, not on the row that it gets, on who had it before, or on the
devices: it is drawn with the random key

    fold_in(fold_in(fold_in(key, crc32(table name)), low 32 bits of the id), high 32 bits)

where `key` is what `init` was given, which the state holds. A row of a table on the host that
belongs to no key is drawn as `init` draws that row id (`init.py`).

A batch that is only looked up brings rows of tables on the host along; with what is drawn of them
they make small tables, which it is looked up in.

Input: a state, and the new keys of each table with their rows. Output: the tables and slots with
these rows written, in their own memory; or the small tables.
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
from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.exchange import collectives
from tpu_embed.core.layout import (
    BY_ID,
    Layout,
    NewKeys,
    Parcels,
    Stack,
    TableSlice,
    Visits,
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
    slot_shapes,
    stack_specs,
    write_parts,
)
from tpu_embed.kernels import dispatch, storage
from tpu_embed.kernels.stochastic import row_number
from tpu_embed.storage import VALUES, slot_field


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
            stack: jax.jit(functools.partial(_draw_parts, stack)) for stack in self._programs
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
    ) -> dict[str, np.ndarray]:
        """Return new rows of a table as they are stored, `[n, …]` by field.

        Args:
          vocabulary: `TableState.vocabulary`, which holds the random key.
          table: the table.
          stack: its stack.
          keys: uint64 `[n]`.
          by_id: bool `[n]`, which of them are ids; None: all.
        """
        # One shard that has them all, of which the numbers of the rows do not matter.
        alone = dataclasses.replace(stack, num_shards=1, num_rows=stack.num_rows + keys.size)
        parcels = Parcels(alone, {table.name: np.arange(keys.size)})
        keyed = parcels.keyed({table.name: keys}, {table.name: by_id})
        # Each process draws for itself, so the key must not be an array of all their devices.
        key = jax.tree.map(np.asarray, random_key(vocabulary))
        drawn = self._drawing[stack](key, keyed[0])
        return {
            name: parcels.unpacked(np.asarray(rows)[None])[table.name]
            for name, rows in drawn.items()
        }

    def lower(self, stack: Stack, held: StackShard, vocabulary: Any, parcels: Any) -> Any:
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
        return collectives.per_device(device, axes, given, tuple(specs))(held, key, parcels)


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
    of_tables = table_keys(key, list(stack.tables))[new.tables]
    keys = _row_keys(of_tables, new, stack)
    # As in `init.py`, barriers around the drawing keep its bits independent of the program.
    numbers = row_number(new.low, new.high) if stack.keeps_numbers else None
    lines = NewRows(new.rows, keys, new.rows, new.rows >= 0, numbers)
    lines = jax.lax.optimization_barrier(lines)
    rows = jnp.zeros((new.rows.shape[0], stack.dim), stack.compute_dtype)
    living = [(i, t) for i, t in enumerate(stack.tables) if t.vocabulary is not None]
    for initializer, run in itertools.groupby(living, key=lambda one: one[1].initializer):
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
    known, number = jax.tree.map(np.asarray, random_key(vocabulary)), stack.tables.index(table)

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
    of_ids, of_keys = (jax.vmap(f)(of_tables, new.low, new.high) for f in (fold_row_id, _fold_key))
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
            make = collectives.per_device(shard, axes, (split, PartitionSpec(), split), split)
            made[stack.name] = make(tables[stack.name], random_key(vocabulary), visits[stack.name])
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

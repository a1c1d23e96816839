"""Logical tables and slots: read from the physical arrays, or set in them.

Enters: a `TableState` and names of tables and slots. Leaves: arrays by name, or a new state. Called
  by the engine.
Every shape is checked before anything is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import message
from tpu_embed._types import Array, ArrayLike, Tracer
from tpu_embed.core.batch_spec import bucket
from tpu_embed.core.collectives import MeshAxes
from tpu_embed.core.layout import Group, Layout, TableSlice
from tpu_embed.core.tables import TableState, logical_rows, set_physical_rows, slot_shapes
from tpu_embed.kernels import storage
from tpu_embed.optimizers import SlotShape

BLOCK = 2**22
"""Numbers written at a time when a whole table is loaded."""


@dataclasses.dataclass(frozen=True)
class Field:
    """A table, or one slot of it, and where it is in the state.

    Attributes:
      group: its stack.
      table: its slice of the stack.
      slot: the slot's name, None for the table itself.
      shape: of one row (of the whole field, when not per row) and its dtype.
    """

    group: Group
    table: TableSlice
    slot: str | None
    shape: SlotShape

    @property
    def label(self) -> str:
        """The name in messages."""
        return f"table {self.table.name!r}" + (f", slot {self.slot!r}" if self.slot else "")

    def read(self, state: TableState) -> Array:
        """Return the physical array."""
        if self.slot is None:
            return state.tables[self.group.name]
        return state.slots[self.group.name][self.slot]

    def write(self, state: TableState, physical: Array) -> TableState:
        """Return the state with another physical array."""
        name = self.group.name
        if self.slot is None:
            return dataclasses.replace(state, tables={**state.tables, name: physical})
        mine = {**state.slots[name], self.slot: physical}
        return dataclasses.replace(state, slots={**state.slots, name: mine})


def field(layout: Layout, name: str, slot: str | None) -> Field:
    """Return a table, or one of its slots, by name.

    Raises:
      ValueError: there is none of this name.
    """
    group, table = layout.table(name)
    if slot is None:
        return Field(group, table, None, SlotShape((group.dim,), jnp.dtype(group.dtype)))
    shapes = slot_shapes(group)
    if slot not in shapes:
        what, expected = f"table {name!r}: slot", f"one of {sorted(shapes)}"
        raise ValueError(message(what, expected=expected, got=repr(slot)))
    return Field(group, table, slot, shapes[slot])


def fields(layout: Layout) -> Iterator[Field]:
    """Yield every table, each followed by its slots."""
    for group in layout.groups:
        for table in group.tables:
            for slot in (None, *slot_shapes(group)):
                yield field(layout, table.name, slot)


@partial(jax.jit, static_argnames="layout")
def tables(state: TableState, layout: Layout) -> dict[str, Array]:
    """Return the logical tables `[V, D]` by name."""
    return {f.table.name: _read(state, f, layout.axes) for f in fields(layout) if f.slot is None}


@partial(jax.jit, static_argnames="layout")
def slots(state: TableState, layout: Layout) -> dict[str, dict[str, Array]]:
    """Return the logical slots by table name, then slot name."""
    found: dict[str, dict[str, Array]] = {}
    for f in fields(layout):
        mine = found.setdefault(f.table.name, {})
        if f.slot is not None:
            mine[f.slot] = _read(state, f, layout.axes)
    return found


def _read(state: TableState, f: Field, axes: MeshAxes) -> Array:
    stored = axes.reshard(f.read(state), ())
    if f.shape.per_row:
        stored = logical_rows(stored, f.group, f.table)
    return storage.decode(stored, f.shape.dtype)


def set_rows(
    state: TableState,
    layout: Layout,
    name: str,
    rows: ArrayLike,
    values: ArrayLike,
    *,
    slot: str | None = None,
) -> TableState:
    """Return the state with some rows of a table or slot set; see `EmbeddingEngine.set_rows`."""
    f = field(layout, name, slot)
    _check_rows(f, rows, values)
    return f.write(state, _write(f.read(state), rows, values, f, layout.axes))


def _check_rows(f: Field, rows: Any, values: Any) -> None:
    if not f.shape.per_row:
        remedy = "it is one array for the whole stack: use load_arrays"
        raise ValueError(message(f.label, expected="a slot with rows", got="none", remedy=remedy))
    if jnp.ndim(rows) != 1 or not jnp.issubdtype(jnp.result_type(rows), jnp.integer):
        got = f"{jnp.result_type(rows)} of shape {jnp.shape(rows)}"
        raise ValueError(message(f"{f.label}: rows", expected="integers [n]", got=got))
    expected = (*jnp.shape(rows), *f.shape.shape)
    if jnp.shape(values) != expected:
        got = f"{jnp.shape(values)}"
        raise ValueError(message(f"{f.label}: values", expected=f"shape {expected}", got=got))
    if isinstance(rows, Tracer):
        return
    known, size = np.asarray(rows), f.table.vocabulary_size
    outside = known[(known < 0) | (known >= size)]
    if outside.size:
        got = f"row {outside[0]}"
        raise ValueError(message(f"{f.label}: rows", expected=f"rows in [0, {size})", got=got))
    if np.unique(known).size != known.size:
        raise ValueError(
            message(f"{f.label}: rows", expected="different rows", got="a row more than once")
        )


def _write(physical: Array, rows: Any, values: Any, f: Field, axes: MeshAxes) -> Array:
    """Return the physical array with logical rows set; rows outside [0, V) are not written."""
    ids = jnp.asarray(rows).astype(f.group.index_dtype)
    valid = (ids >= 0) & (ids < f.table.vocabulary_size)
    places = jnp.where(valid, f.group.physical(ids, f.table), -1)
    stored = storage.encode(jnp.asarray(values), f.shape.dtype)
    return set_physical_rows(physical, places, stored, f.group, axes)


_write_in_place = jax.jit(_write, static_argnames=("f", "axes"), donate_argnums=0)
_copy = jax.jit(jnp.copy)


def load(
    state: TableState,
    layout: Layout,
    name: str,
    blocks_of_rows: Iterable[ArrayLike],
    *,
    slot: str | None = None,
) -> TableState:
    """Return the state with a whole table or slot replaced; see `EmbeddingEngine.load`."""
    f = field(layout, name, slot)
    if not f.shape.per_row:
        remedy = "it is one array for the whole stack: use load_arrays"
        raise ValueError(message(f.label, expected="a slot with rows", got="none", remedy=remedy))
    physical, start, size = _copy(f.read(state)), 0, f.table.vocabulary_size
    for block in blocks_of_rows:
        values = np.asarray(block)
        if values.shape[1:] != f.shape.shape or start + len(values) > size:
            expected = f"blocks [n, {', '.join(map(str, f.shape.shape))}] of {size} rows in all"
            got = f"shape {values.shape} at row {start}"
            raise ValueError(message(f.label, expected=expected, got=got))
        physical = _write_block(physical, start, values, f, layout.axes)
        start += len(values)
    if start != size:
        raise ValueError(message(f.label, expected=f"{size} rows", got=f"{start}"))
    return f.write(state, physical)


def _write_block(
    physical: Array, start: int, values: np.ndarray, f: Field, axes: MeshAxes
) -> Array:
    """Write consecutive rows in pieces of one size, the last padded: one compilation a field."""
    size = f.table.vocabulary_size
    piece = min(bucket(len(values)), size, max(64, BLOCK // f.group.dim))
    for first in range(0, len(values), max(1, piece)):
        part = values[first : first + piece]
        rows = np.arange(start + first, start + first + piece)
        rows[len(part) :] = -1
        missing = [(0, piece - len(part))] + [(0, 0)] * (values.ndim - 1)
        part = np.pad(part, missing)
        physical = _write_in_place(
            physical,
            rows.astype(f.group.index_dtype),
            part.astype(jnp.dtype(f.shape.dtype)),
            f,
            axes,
        )
    return physical


def load_arrays(
    state: TableState,
    layout: Layout,
    tables: Mapping[str, ArrayLike],
    slots: Mapping[str, Mapping[str, ArrayLike]],
) -> TableState:
    """Return the state with whole tables and slots replaced; see `EmbeddingEngine.load_arrays`."""
    given = [(field(layout, name, None), array) for name, array in tables.items()]
    for name, by_slot in slots.items():
        given += [(field(layout, name, slot), array) for slot, array in by_slot.items()]
    for f, array in given:
        rows = (f.table.vocabulary_size,) if f.shape.per_row else ()
        expected = (*rows, *f.shape.shape)
        if np.shape(array) != expected:
            raise ValueError(
                message(f.label, expected=f"shape {expected}", got=f"{np.shape(array)}")
            )
    for f, array in given:
        if f.shape.per_row:
            state = load(state, layout, f.table.name, [array], slot=f.slot)
        else:
            whole = storage.encode(jnp.asarray(array), f.shape.dtype)
            state = f.write(state, jax.device_put(whole, layout.axes.sharding(())))
    return state

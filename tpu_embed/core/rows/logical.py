"""Read and replace logical tables and slots, which is how users see the state.

The state stores physical arrays: tables stacked, sharded, padded, perhaps packed. A user knows only
logical tables `[V, D]`, row 0 first. The functions here translate, and check every name, shape and
dtype before anything is computed.

Input: a `TableState`, names of tables and slots, and perhaps new rows. Output: logical arrays by
name, or a new state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import message
from tpu_embed._snapshot import as_array, snapshot
from tpu_embed._types import Array, ArrayLike, Tracer
from tpu_embed.core.ids import refuse_masked
from tpu_embed.core.layout import Layout, MeshAxes
from tpu_embed.core.rows.devices import DeviceRows
from tpu_embed.core.state import (
    Field,
    TableState,
    check_arrays,
    check_own,
    field,
    fields,
    logical_rows,
    set_physical_rows,
)
from tpu_embed.kernels import storage


def tables(state: TableState, layout: Layout) -> dict[str, Array]:
    """Return the logical tables `[V, D]` by name."""
    layout.refuse_on_host("tables")
    check_own(state, layout)
    return _tables(state, layout)


@partial(jax.jit, static_argnames="layout")
def _tables(state: TableState, layout: Layout) -> dict[str, Array]:
    return {
        f.table.name: read_field(state, f, layout.axes) for f in fields(layout) if f.slot is None
    }


def slots(state: TableState, layout: Layout) -> dict[str, dict[str, Array]]:
    """Return the logical slots by table name, then slot name."""
    layout.refuse_on_host("slots")
    check_own(state, layout)
    check_arrays(state, layout, slots=True)
    return _slots(state, layout)


@partial(jax.jit, static_argnames="layout")
def _slots(state: TableState, layout: Layout) -> dict[str, dict[str, Array]]:
    found: dict[str, dict[str, Array]] = {}
    for f in fields(layout):
        mine = found.setdefault(f.table.name, {})
        if f.slot is not None:
            mine[f.slot] = read_field(state, f, layout.axes)
    return found


def read_field(state: TableState, f: Field, axes: MeshAxes) -> Array:
    """Return one logical table or slot, whole on every device."""
    # Gathered first: under "mod" the rows of every shard are spread over the whole logical table.
    stored = axes.reshard(f.read(state), ())
    if f.shape.per_row:
        stored = logical_rows(stored, f.row_format, f.stack, f.table)
    return storage.decode(stored, f.shape.dtype)


def set_rows(
    state: TableState,
    layout: Layout,
    name: str,
    row_ids: ArrayLike,
    values: ArrayLike,
    *,
    slot: str | None = None,
) -> TableState:
    """Return the state with some rows of a table or slot set; see `EmbeddingEngine.set_rows`."""
    check_own(state, layout)
    f, chosen, given = checked_rows(layout, name, row_ids, values, slot=slot)
    return write_rows(state, layout, f, chosen, given)


def checked_rows(
    layout: Layout, name: str, row_ids: ArrayLike, values: ArrayLike, *, slot: str | None
) -> tuple[Field, Any, Any]:
    """Return the field, the row ids and the values of `set_rows`, after a check of them."""
    f = _field_of_rows(layout, name, slot)
    refuse_masked(f.label, values)
    chosen, given = _array(snapshot(row_ids)), _array(snapshot(values))
    _check_rows(f, chosen, given)
    return f, chosen, given


def checked_values(
    layout: Layout, name: str, n: int, values: ArrayLike, *, slot: str | None
) -> tuple[Field, Any]:
    """Return the field and the values of n rows, after a check of them.

    Raises:
      ValueError: an unknown name, or values of another shape or kind.
    """
    f = _field_of_rows(layout, name, slot)
    refuse_masked(f.label, values)
    given = _array(snapshot(values))
    _check_values(f, n, given)
    return f, given


def write_rows(
    state: TableState, layout: Layout, f: Field, row_ids: Any, values: Any
) -> TableState:
    """Return the state with rows that the devices hold written; its arrays are copied.

    Args:
      state: the state.
      layout: the engine's layout.
      f: the table or slot.
      row_ids: `[n]`, different logical rows; those outside [0, V) are not written.
      values: `[n, …]`, any real numbers.
    """
    return f.write(state, _write_copy(f.read(state), row_ids, values, f, layout.axes))


def _array(value: Any) -> Any:
    return value if isinstance(value, (jax.Array, np.ndarray)) else np.asarray(value)


def _field_of_rows(layout: Layout, name: str, slot: str | None) -> Field:
    """Return a table, or a slot that has its own numbers for each row.

    Raises:
      ValueError: there is no table or slot of this name, or the whole stack shares the slot.
    """
    f = field(layout, name, slot)
    if not f.shape.per_row:
        expected, got = "a slot with values per row", "one array that the whole stack shares"
        remedy = f"use load_arrays(state, {{}}, {{{name!r}: {{{slot!r}: array}}}})"
        raise ValueError(message(f.label, expected=expected, got=got, remedy=remedy))
    return f


def _check_numbers(label: str, dtype: Any) -> None:
    if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
        raise ValueError(message(label, expected="real numbers", got=f"dtype {dtype}"))


def _check_rows(f: Field, row_ids: Any, values: Any) -> None:
    """Check the row ids `[n]` and the values `[n, …]` of `set_rows`.

    Raises:
      ValueError: a wrong shape or dtype, a row id outside [0, V), or one that occurs twice.
    """
    if row_ids.ndim != 1 or not jnp.issubdtype(row_ids.dtype, jnp.integer):
        got = f"{row_ids.dtype} of shape {row_ids.shape}"
        raise ValueError(message(f"{f.label}: rows", expected="integers of shape (n,)", got=got))
    _check_values(f, row_ids.shape[0], values)
    if isinstance(row_ids, Tracer):
        return
    # The values are known outside a jit only. Of a repeated row id, which values are written would
    # depend on the device's order of writes.
    known, size = np.asarray(row_ids), f.table.declared_size
    outside = known[(known < 0) | (known >= size)]
    if outside.size:
        got = f"row {outside[0]}"
        raise ValueError(message(f"{f.label}: rows", expected=f"rows in [0, {size})", got=got))
    numbers, counts = np.unique(known, return_counts=True)
    if numbers.size != known.size:
        got = f"row {numbers[counts.argmax()]} {counts.max()} times"
        raise ValueError(message(f"{f.label}: rows", expected="each row once", got=got))


def _check_values(f: Field, n: int, values: Any) -> None:
    """Check the values of n rows."""
    expected = (n, *f.shape.shape)
    if values.shape != expected:
        got = f"{values.shape}"
        raise ValueError(message(f"{f.label}: values", expected=f"shape {expected}", got=got))
    _check_numbers(f"{f.label}: values", values.dtype)


def _write(physical: Array, row_ids: Any, values: Any, f: Field, axes: MeshAxes) -> Array:
    """Return the physical array with logical rows set; row ids outside [0, V) are not written."""
    ids = jnp.asarray(row_ids).astype(f.stack.index_dtype)
    # An invalid id must become -1 before it is written: `physical` would map it to a row of
    # another table of the stack.
    valid = (ids >= 0) & (ids < f.table.vocabulary_size)
    places = jnp.where(valid, f.stack.physical(ids, f.table), -1)
    stored = storage.encode(jnp.asarray(values), f.shape.dtype)
    return set_physical_rows(physical, places, stored, f.row_format, f.stack, axes)


_write_copy = jax.jit(_write, static_argnames=("f", "axes"))
copy_array = jax.jit(jnp.copy)
"""Returns a copy that may be donated."""


def as_stored(values: np.ndarray, f: Field) -> np.ndarray:
    """Return values of a field, real numbers, as they are stored."""
    dtype = jnp.dtype(f.shape.dtype)
    return values.astype(dtype, copy=False).view(storage.stored_dtype(dtype))


def load(
    state: TableState,
    layout: Layout,
    name: str,
    blocks_of_rows: Iterable[ArrayLike],
    *,
    slot: str | None = None,
) -> TableState:
    """Return the state with a whole table or slot replaced; see `EmbeddingEngine.load`."""
    layout.refuse_on_host("load", [name])
    check_own(state, layout)
    f = _field_of_rows(layout, name, slot)
    # One copy of the array, then every block is written into that copy in place. The given state
    # stays as it was, also when a later block is refused.
    copied = f.write(state, copy_array(f.read(state)))
    rows, start, size = DeviceRows(copied, layout, name, [f.part]), 0, f.table.vocabulary_size
    for block in blocks_of_rows:
        refuse_masked(f.label, block)
        values = np.asarray(block)
        one = values.ndim and values.shape[1:] == f.shape.shape
        if not one or start + len(values) > size:
            shape = ", ".join(map(str, ("n", *f.shape.shape)))
            expected = f"blocks of shape ({shape}) that have {size} rows in all"
            got = f"shape {values.shape} from row {start} on"
            raise ValueError(message(f.label, expected=expected, got=got))
        _check_numbers(f.label, values.dtype)
        rows.write(range(start, start + len(values)), {f.part: as_stored(values, f)})
        start += len(values)
    if start != size:
        raise ValueError(message(f.label, expected=f"{size} rows in all", got=f"{start}"))
    return rows.state


def load_arrays(
    state: TableState,
    layout: Layout,
    tables: Mapping[str, ArrayLike],
    slots: Mapping[str, Mapping[str, ArrayLike]],
) -> TableState:
    """Return the state with whole tables and slots replaced; see `EmbeddingEngine.load_arrays`."""
    check_own(state, layout)
    # The first loop validates everything, the second writes: an error leaves nothing half loaded.
    given = [(field(layout, name, None), array) for name, array in _items("tables", tables)]
    for name, by_slot in _items("slots", slots):
        named = _items(f"slots of table {name!r}", by_slot)
        given += [(field(layout, name, slot), array) for slot, array in named]
    layout.refuse_on_host("load", [f.table.name for f, _ in given])
    for f, array in given:
        refuse_masked(f.label, array)
        rows = (f.table.vocabulary_size,) if f.shape.per_row else ()
        expected = (*rows, *f.shape.shape)
        if np.shape(array) != expected:
            raise ValueError(
                message(f.label, expected=f"shape {expected}", got=f"{np.shape(array)}")
            )
        _check_numbers(f.label, _array(array).dtype)
    for f, array in given:
        if f.shape.per_row:
            state = load(state, layout, f.table.name, [array], slot=f.slot)
        else:
            whole = storage.encode(as_array(array), f.shape.dtype)
            sharding = layout.axes.sharding(())
            # The state may be donated later, so it must not share memory with the user's array.
            state = f.write(state, jax.device_put(whole, sharding, may_alias=False))
    return state


def _items(what: str, named: Any) -> Iterable[tuple[str, Any]]:
    if not isinstance(named, Mapping):
        got = type(named).__name__
        raise ValueError(message(what, expected="a mapping by name", got=got))
    return named.items()


def host_arrays(
    state: TableState, layout: Layout
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
    """Return the logical tables by name, and the slots by table name, then slot name.

    With one process, no device needs extra memory; with several, which must all call this, each
    device receives a block of rows at a time.
    """
    layout.refuse_on_host("retrieve")
    check_own(state, layout)
    tables, slots = {}, {}
    for f in fields(layout):
        name = f.table.name
        if f.shape.per_row:
            rows = DeviceRows(state, layout, name, [f.part])
            stored = rows.read(range(f.table.vocabulary_size))[f.part]
        else:
            stored = np.array(f.read(state))
        # bfloat16 is stored as uint16; `view` only renames the dtype, the bits stay.
        array = stored.view(jnp.dtype(f.shape.dtype))
        if f.slot is None:
            tables[name], slots[name] = array, {}
        else:
            slots[name][f.slot] = array
    return tables, slots

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
from tpu_embed.core.layout import Layout, MeshAxes, bucket
from tpu_embed.core.state.checks import check_arrays, check_own
from tpu_embed.core.state.fields import Field, field, fields
from tpu_embed.core.state.table_state import TableState, logical_rows, set_physical_rows
from tpu_embed.kernels import storage

BLOCK = 2**22
"""Numbers that are written at a time when a whole table is loaded."""


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
_write_in_place = jax.jit(_write, static_argnames=("f", "axes"), donate_argnums=0)
copy_array = jax.jit(jnp.copy)
"""Returns a copy that may be donated."""


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
    physical, start, size = copy_array(f.read(state)), 0, f.table.vocabulary_size
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
        physical = _write_block(physical, start, values, f, layout.axes)
        start += len(values)
    if start != size:
        raise ValueError(message(f.label, expected=f"{size} rows in all", got=f"{start}"))
    return f.write(state, physical)


def _write_block(
    physical: Array, start: int, values: np.ndarray, f: Field, axes: MeshAxes
) -> Array:
    """Write consecutive rows in pieces of one size, so that few programs are compiled.

    Args:
      physical: the array of the stack; it is donated.
      start: the logical row id of the first value.
      values: `[n, …]`.
      f: the table or slot.
      axes: the mesh.
    """
    size = f.table.vocabulary_size
    piece = min(bucket(len(values)), size, max(64, BLOCK // f.stack.dim))
    for first in range(0, len(values), max(1, piece)):
        # 10 values in pieces of 4 have the row ids 0-3, 4-7, (8, 9, -1, -1): the last piece is
        # padded to the same shape, and row ids of -1 are not written.
        part = values[first : first + piece]
        row_ids = np.arange(start + first, start + first + piece)
        row_ids[len(part) :] = -1
        missing = [(0, piece - len(part))] + [(0, 0)] * (values.ndim - 1)
        part = np.pad(part, missing)
        physical = _write_in_place(
            physical,
            row_ids.astype(f.stack.index_dtype),
            part.astype(jnp.dtype(f.shape.dtype)),
            f,
            axes,
        )
    return physical


def write_rows_in_place(
    physical: Array, row_ids: np.ndarray, values: np.ndarray, f: Field, axes: MeshAxes
) -> Array:
    """Write some rows of a table or slot; few shapes, so that few programs are compiled.

    Args:
      physical: the array of the stack; it is donated.
      row_ids: `[n]`, different logical row ids.
      values: `[n, …]`, in the field's dtype.
      f: the table or slot.
      axes: the mesh.
    """
    missing = (1 << max(6, (len(row_ids) - 1).bit_length())) - len(row_ids)
    row_ids = np.pad(row_ids, (0, missing), constant_values=-1)
    values = np.pad(values, [(0, missing)] + [(0, 0)] * (values.ndim - 1))
    return _write_in_place(physical, row_ids.astype(f.stack.index_dtype), values, f, axes)


def write_in_pieces(
    physical: Array, row_ids: np.ndarray, values: np.ndarray, f: Field, axes: MeshAxes
) -> Array:
    """Write rows as `write_rows_in_place` does, so many at a time that they take little room."""
    piece = max(64, BLOCK // f.stack.dim)
    for first in range(0, len(values), piece):
        some = np.s_[first : first + piece]
        physical = write_rows_in_place(physical, row_ids[some], values[some], f, axes)
    return physical


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

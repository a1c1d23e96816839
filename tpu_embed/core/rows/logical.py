"""Logical tables and slots as arrays, which is how users see the state.

The state stores physical arrays: tables stacked, sharded, padded, perhaps packed. A user knows only
logical tables `[V, D]`, row 0 first.

Input: a `TableState`, a table or slot, and perhaps new rows. Output: logical arrays; or values as
they are stored; or an array with rows set.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.exchange import collectives, route
from tpu_embed.core.layout import Layout, MeshAxes
from tpu_embed.core.rows.devices import DeviceRows
from tpu_embed.core.state import Field, TableState, check_own, fields, logical_rows
from tpu_embed.kernels import dispatch, storage


def read_field(state: TableState, f: Field, axes: MeshAxes) -> Array:
    """Return one logical table or slot, whole on every device."""
    # Gathered first: under "mod" the rows of every shard are spread over the whole logical table.
    stored = axes.reshard(f.read(state), ())
    if f.shape.per_row:
        stored = logical_rows(stored, f.row_format, f.stack, f.table)
    return storage.decode(stored, f.shape.dtype)


def as_stored(values: np.ndarray, f: Field) -> np.ndarray:
    """Return values of a field, real numbers, as they are stored."""
    dtype = jnp.dtype(f.shape.dtype)
    return values.astype(dtype, copy=False).view(storage.stored_dtype(dtype))


@functools.partial(jax.jit, static_argnames=("f", "axes"))
def write_copy(physical: Array, row_ids: Any, values: Any, f: Field, axes: MeshAxes) -> Array:
    """Return a copy of the physical array with logical rows set; each shard writes its own.

    Args:
      physical: the stack's array of `S * R` rows, sharded over its first axis.
      row_ids: `[n]` logical rows, all different; those outside [0, V) are not written.
      values: `[n, …]`, any real numbers.
      f: the table or slot.
      axes: the mesh.
    """
    stack, ids = f.stack, jnp.asarray(row_ids).astype(f.stack.index_dtype)
    # An invalid id must become -1 before it is written: `physical` would map it to a row of
    # another table of the stack.
    valid = (ids >= 0) & (ids < f.table.vocabulary_size)
    places = jnp.where(valid, stack.physical(ids, f.table), PADDING_ID)
    stored = storage.encode(jnp.asarray(values), f.shape.dtype)

    def shard(physical, places, values):
        # Every device sees all n rows and writes its own.
        local = route.rows_of_shard(places, stack)
        return dispatch.write_rows(physical, local, values, f.row_format)

    spec, whole = axes.spec(stack.shard_axes), PartitionSpec()
    on_devices = collectives.per_device(shard, axes, (spec, whole, whole), spec)
    return on_devices(physical, places, stored)


def host_arrays(
    state: TableState, layout: Layout
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
    """Return the logical tables by name, and the slots by table name, then slot name.

    With one process, no device needs extra memory; with several, which must all call this, each
    device receives a block of rows at a time.
    """
    layout.check_on_devices("retrieve")
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

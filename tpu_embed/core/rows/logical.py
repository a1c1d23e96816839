"""Logical tables and slots as arrays, which is how users see the state.

The state stores physical arrays: tables stacked, sharded, padded, perhaps packed. A user knows only
logical tables `[V, D]`, row 0 first.

Input: a `TableState`, a table or slot. Output: logical arrays; or values as they are stored.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from tpu_embed._types import Array
from tpu_embed.core.layout import Layout, MeshAxes
from tpu_embed.core.rows.devices import DeviceRows
from tpu_embed.core.state import Field, TableState, check_own, fields, logical_rows
from tpu_embed.kernels import storage


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

"""Tables and slots made shard by shard: no device, and no host, ever holds more than its own rows.

Enters: a key and the groups. Leaves: physical tables and slots. Called by the engine.

The value of a row depends on the key, its table's name and its number alone,
`initializer(fold_in(fold_in(key, crc32(name)), row), (1, D), dtype)`, so it is the same on every
layout.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tpu_embed import initializers
from tpu_embed._checks import message
from tpu_embed._types import Array
from tpu_embed.core import collectives
from tpu_embed.core.collectives import MeshAxes
from tpu_embed.core.layout import ROW_MULTIPLE, Group, TableSlice, round_up
from tpu_embed.core.tables import slot_form, slot_shapes, state_specs
from tpu_embed.kernels import dispatch, storage
from tpu_embed.kernels.forms import LINE, RowForm

CHUNK = 2**20
"""Numbers made at a time: bounds the temporaries."""


class Made(NamedTuple):
    """This device's shard of one stack: its rows in their form, and its slots by name."""

    table: Array
    slots: dict[str, Array]


class Line(NamedTuple):
    """Physical rows `[n]` of a shard, and their logical rows: keys, numbers, and existence."""

    places: Array
    keys: Array
    rows: Array
    exists: Array


def init_tables(key: Array, groups: tuple[Group, ...], axes: MeshAxes) -> tuple[dict, dict]:
    """Make every table and slot, each device its own rows only.

    Args:
      key: a jax PRNG key.
      groups: the stacks.
      axes: the mesh.

    Returns:
      physical tables and slots, as in `TableState`.
    """

    def shard(key: Array) -> tuple[dict, dict]:
        made = {group.name: _init_group(key, group) for group in groups}
        tables = {name: one.table for name, one in made.items()}
        return tables, {name: one.slots for name, one in made.items()}

    return jax.shard_map(
        shard,
        mesh=axes.mesh,
        in_specs=PartitionSpec(),
        out_specs=state_specs(groups, axes),
        check_vma=False,
    )(key)


def blank_tables(groups: tuple[Group, ...], axes: MeshAxes) -> tuple[dict, dict]:
    """Make every table and slot, all zeros: to be filled by the caller.

    Args:
      groups: the stacks.
      axes: the mesh.

    Returns:
      physical tables and slots, as in `TableState`.
    """

    def shard() -> tuple[dict, dict]:
        made = {group.name: _blank(group) for group in groups}
        tables = {name: one.table for name, one in made.items()}
        return tables, {name: one.slots for name, one in made.items()}

    specs = state_specs(groups, axes)
    return jax.shard_map(shard, mesh=axes.mesh, in_specs=(), out_specs=specs, check_vma=False)()


def _blank(group: Group) -> Made:
    return Made(
        _zeros(group.form.array(group.rows)),
        {
            name: _zeros(slot_form(group, slot).array(group.rows))
            if slot.per_row
            else dispatch.zeros(slot.shape, storage.stored_dtype(slot.dtype))
            for name, slot in slot_shapes(group).items()
        },
    )


def _init_group(key: Array, group: Group) -> Made:
    """Fill this device's shard of one stack, adjacent tables of one initializer at a time."""
    made = _blank(group)
    for initializer, run in itertools.groupby(group.tables, key=lambda table: table.initializer):
        tables = list(run)
        what = f"table {tables[0].name!r}: initializer"
        if initializers.wants_shard_info(initializer):
            for table in tables:
                made = _fill(
                    made, key, group, [table], _whole_shard(initializer, group, table, key)
                )
        else:
            made = _fill(made, key, group, tables, _row_by_row(initializer, group, what))
    return made


def _zeros(form: jax.ShapeDtypeStruct) -> Array:
    return dispatch.zeros(form.shape, form.dtype)


def _row_by_row(initializer: Callable, group: Group, what: str) -> Callable[[Line], Array]:
    shape = (1, group.dim)

    def one(key: Array) -> Array:
        return _of_shape(initializer(key, shape, group.compute_dtype), shape, what)[0]

    return lambda lines: jax.vmap(one)(lines.keys)


def _whole_shard(
    initializer: Callable, group: Group, table: TableSlice, key: Array
) -> Callable[[Line], Array]:
    """Call the initializer once for the shard; hand out lines of what it made."""
    places = jnp.arange(table.rows_per_shard, dtype=group.index_dtype) + table.offset
    lines = _lines(key, group, [table], places)
    rows = jnp.minimum(lines.rows, table.vocabulary_size - 1).astype(jnp.int32)
    shape = (table.rows_per_shard, group.dim)
    made = initializer(
        _table_keys(key, [table])[0],
        shape,
        group.compute_dtype,
        shard_info=initializers.ShardInfo((table.vocabulary_size, group.dim), rows),
    )
    values = _of_shape(made, shape, f"table {table.name!r}: initializer")
    return lambda lines: values[lines.places - table.offset]


def _of_shape(values: Any, shape: tuple[int, int], what: str) -> Array:
    """Return what an initializer made as an array; ValueError if its shape is another."""
    got = getattr(values, "shape", None)
    if got != shape:
        text = type(values).__name__ if got is None else f"shape {got}"
        raise ValueError(message(what, expected=f"an array of shape {shape}", got=text))
    return jnp.asarray(values)


def _fill(
    made: Made,
    key: Array,
    group: Group,
    tables: list[TableSlice],
    rows_of: Callable[[Line], Array],
) -> Made:
    """Write the rows of adjacent tables, and their slots, a chunk at a time.

    Chunks have one length; the last is moved back so that it ends with the run (its first rows are
    made twice, alike). A chunk is made with its last row repeated up to a multiple of
    `ROW_MULTIPLE`, between barriers: its bits then depend on nothing else in the program.
    """
    first, last = tables[0].offset, tables[-1].offset + tables[-1].rows_per_shard
    width = group.dim if group.packing == "none" else round_up(group.dim, LINE)
    chunk = min(last - first, max(ROW_MULTIPLE, CHUNK // width))
    numbers = jnp.arange(round_up(chunk, ROW_MULTIPLE), dtype=group.index_dtype)

    def write(i: Array, made: Made) -> Made:
        start = jnp.minimum(first + i * chunk, last - chunk).astype(group.index_dtype)
        lines = _lines(key, group, tables, jnp.minimum(start + numbers, last - 1))
        rows = rows_of(jax.lax.optimization_barrier(lines)).astype(group.compute_dtype)
        rows = jax.lax.optimization_barrier(jnp.where(lines.exists[:, None], rows, 0))
        stored = storage.encode(rows, group.dtype)[:chunk]
        table = _put(made.table, stored, start, group.form)
        slots = _fresh_slots(group, rows, lines)
        return Made(table, _write_slots(made.slots, slots, group, start, chunk))

    return jax.lax.fori_loop(0, -(-(last - first) // chunk), write, made)


def _fresh_slots(group: Group, rows: Array, lines: Line) -> dict[str, Array]:
    if group.optimizer is None:
        return {}
    return jax.lax.optimization_barrier(group.optimizer.init_slots(rows, lines.keys))


def _write_slots(
    slots: dict[str, Array], fresh: dict[str, Array], group: Group, start: Array, chunk: int
) -> dict[str, Array]:
    written = {}
    for name, slot in slot_shapes(group).items():
        stored = storage.encode(fresh[name], slot.dtype)
        if slot.per_row:
            stored = _put(slots[name], stored[:chunk], start, slot_form(group, slot))
        written[name] = stored
    return written


def _put(array: Array, stored: Array, start: Array, form: RowForm) -> Array:
    """Return the array with stored rows from row `start` on."""
    if not form.packed:
        return jax.lax.dynamic_update_slice_in_dim(array, stored, start, axis=0)
    rows = start + jnp.arange(stored.shape[0], dtype=start.dtype)
    return dispatch.write_ascending_rows(array, rows, stored, form)


def _table_keys(key: Array, tables: list[TableSlice]) -> Array:
    """Return a key a table, `[T]`: folded with the CRC-32 of its name."""
    crcs = np.array([zlib.crc32(table.name.encode()) for table in tables], np.uint32)
    return jax.vmap(lambda crc: jax.random.fold_in(key, crc))(jnp.asarray(crcs))


def _lines(key: Array, group: Group, tables: list[TableSlice], local: Array) -> Line:
    """Return what the local rows `[n]` of this device, all of `tables`, stand for."""
    ends = np.array([table.offset + table.rows_per_shard for table in tables], group.index_dtype)
    which = jnp.searchsorted(jnp.asarray(ends), local, side="right")

    def column(field: str) -> Array:
        return jnp.asarray(np.array([getattr(t, field) for t in tables], group.index_dtype))[which]

    shard = collectives.axis_index(group.shard_axes).astype(group.index_dtype)
    inside = local - column("offset")
    if group.placement == "div":
        rows = shard * column("rows_per_shard") + inside
    else:
        rows = inside * group.num_shards + shard
    keys = jax.vmap(jax.random.fold_in)(_table_keys(key, tables)[which], rows)
    return Line(local, keys, rows, rows < column("vocabulary_size"))

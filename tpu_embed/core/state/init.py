"""Tables and slots made shard by shard: no device, and no host, ever holds more than its own rows.

Enters: a key and the stacks. Leaves: physical tables and slots. Called by the engine.

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
from tpu_embed.core.exchange import collectives
from tpu_embed.core.layout import ROW_MULTIPLE, MeshAxes, Stack, TableSlice, round_up
from tpu_embed.core.state.table_state import StackShard, slot_format, slot_shapes, state_specs
from tpu_embed.kernels import dispatch, storage
from tpu_embed.kernels.formats import LINE, RowFormat

CHUNK = 2**20
"""Numbers made at a time: bounds the temporaries."""


class NewRows(NamedTuple):
    """Physical rows `[n]` of a shard, and their logical rows: keys, numbers, and existence."""

    places: Array
    keys: Array
    rows: Array
    exists: Array


def init_tables(key: Array, stacks: tuple[Stack, ...], axes: MeshAxes) -> tuple[dict, dict]:
    """Make every table and slot, each device its own rows only.

    Args:
      key: a jax PRNG key.
      stacks: the stacks.
      axes: the mesh.

    Returns:
      physical tables and slots, as in `TableState`.
    """

    def shard(key: Array) -> tuple[dict, dict]:
        made = {stack.name: _init_stack(key, stack) for stack in stacks}
        tables = {name: one.table for name, one in made.items()}
        return tables, {name: one.slots for name, one in made.items()}

    return jax.shard_map(
        shard,
        mesh=axes.mesh,
        in_specs=PartitionSpec(),
        out_specs=state_specs(stacks, axes),
        check_vma=False,
    )(key)


def blank_tables(stacks: tuple[Stack, ...], axes: MeshAxes) -> tuple[dict, dict]:
    """Make every table and slot, all zeros: to be filled by the caller.

    Args:
      stacks: the stacks.
      axes: the mesh.

    Returns:
      physical tables and slots, as in `TableState`.
    """

    def shard() -> tuple[dict, dict]:
        made = {stack.name: _blank(stack) for stack in stacks}
        tables = {name: one.table for name, one in made.items()}
        return tables, {name: one.slots for name, one in made.items()}

    specs = state_specs(stacks, axes)
    return jax.shard_map(shard, mesh=axes.mesh, in_specs=(), out_specs=specs, check_vma=False)()


def _blank(stack: Stack) -> StackShard:
    return StackShard(
        _zeros(stack.row_format.array(stack.num_rows)),
        {
            name: _zeros(slot_format(stack, slot).array(stack.num_rows))
            if slot.per_row
            else dispatch.zeros(slot.shape, storage.stored_dtype(slot.dtype))
            for name, slot in slot_shapes(stack).items()
        },
    )


def _init_stack(key: Array, stack: Stack) -> StackShard:
    """Fill this device's shard of one stack, adjacent tables of one initializer at a time."""
    made = _blank(stack)
    for initializer, run in itertools.groupby(stack.tables, key=lambda table: table.initializer):
        tables = list(run)
        what = f"table {tables[0].name!r}: initializer"
        if initializers.wants_shard_info(initializer):
            for table in tables:
                made = _fill(
                    made, key, stack, [table], _whole_shard(initializer, stack, table, key)
                )
        else:
            made = _fill(made, key, stack, tables, _row_by_row(initializer, stack, what))
    return made


def _zeros(form: jax.ShapeDtypeStruct) -> Array:
    return dispatch.zeros(form.shape, form.dtype)


def _row_by_row(initializer: Callable, stack: Stack, what: str) -> Callable[[NewRows], Array]:
    shape = (1, stack.dim)

    def one(key: Array) -> Array:
        return _of_shape(initializer(key, shape, stack.compute_dtype), shape, what)[0]

    return lambda lines: jax.vmap(one)(lines.keys)


def _whole_shard(
    initializer: Callable, stack: Stack, table: TableSlice, key: Array
) -> Callable[[NewRows], Array]:
    """Call the initializer once for the shard; hand out lines of what it made."""
    places = jnp.arange(table.rows_per_shard, dtype=stack.index_dtype) + table.offset
    lines = _lines(key, stack, [table], places)
    rows = jnp.minimum(lines.rows, table.vocabulary_size - 1).astype(jnp.int32)
    shape = (table.rows_per_shard, stack.dim)
    made = initializer(
        _table_keys(key, [table])[0],
        shape,
        stack.compute_dtype,
        shard_info=initializers.ShardInfo((table.vocabulary_size, stack.dim), rows),
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
    made: StackShard,
    key: Array,
    stack: Stack,
    tables: list[TableSlice],
    rows_of: Callable[[NewRows], Array],
) -> StackShard:
    """Write the rows of adjacent tables, and their slots, a chunk at a time.

    Chunks have one length; the last is moved back so that it ends with the run (its first rows are
    made twice, alike). A chunk is made with its last row repeated up to a multiple of
    `ROW_MULTIPLE`, between barriers: its bits then depend on nothing else in the program.
    """
    first, last = tables[0].offset, tables[-1].offset + tables[-1].rows_per_shard
    width = stack.dim if stack.packing == "none" else round_up(stack.dim, LINE)
    chunk = min(last - first, max(ROW_MULTIPLE, CHUNK // width))
    numbers = jnp.arange(round_up(chunk, ROW_MULTIPLE), dtype=stack.index_dtype)

    def write(i: Array, made: StackShard) -> StackShard:
        start = jnp.minimum(first + i * chunk, last - chunk).astype(stack.index_dtype)
        lines = _lines(key, stack, tables, jnp.minimum(start + numbers, last - 1))
        rows = rows_of(jax.lax.optimization_barrier(lines)).astype(stack.compute_dtype)
        rows = jax.lax.optimization_barrier(jnp.where(lines.exists[:, None], rows, 0))
        stored = storage.encode(rows, stack.dtype)[:chunk]
        table = _put(made.table, stored, start, stack.row_format)
        slots = _fresh_slots(stack, rows, lines)
        return StackShard(table, _write_slots(made.slots, slots, stack, start, chunk))

    return jax.lax.fori_loop(0, -(-(last - first) // chunk), write, made)


def _fresh_slots(stack: Stack, rows: Array, lines: NewRows) -> dict[str, Array]:
    if stack.optimizer is None:
        return {}
    return jax.lax.optimization_barrier(stack.optimizer.init_slots(rows, lines.keys))


def _write_slots(
    slots: dict[str, Array], fresh: dict[str, Array], stack: Stack, start: Array, chunk: int
) -> dict[str, Array]:
    written = {}
    for name, slot in slot_shapes(stack).items():
        stored = storage.encode(fresh[name], slot.dtype)
        if slot.per_row:
            stored = _put(slots[name], stored[:chunk], start, slot_format(stack, slot))
        written[name] = stored
    return written


def _put(array: Array, stored: Array, start: Array, form: RowFormat) -> Array:
    """Return the array with stored rows from row `start` on."""
    if not form.packed:
        return jax.lax.dynamic_update_slice_in_dim(array, stored, start, axis=0)
    rows = start + jnp.arange(stored.shape[0], dtype=start.dtype)
    return dispatch.write_ascending_rows(array, rows, stored, form)


def _table_keys(key: Array, tables: list[TableSlice]) -> Array:
    """Return a key a table, `[T]`: folded with the CRC-32 of its name."""
    crcs = np.array([zlib.crc32(table.name.encode()) for table in tables], np.uint32)
    return jax.vmap(lambda crc: jax.random.fold_in(key, crc))(jnp.asarray(crcs))


def _lines(key: Array, stack: Stack, tables: list[TableSlice], local: Array) -> NewRows:
    """Return what the local rows `[n]` of this device, all of `tables`, stand for."""
    ends = np.array([table.offset + table.rows_per_shard for table in tables], stack.index_dtype)
    which = jnp.searchsorted(jnp.asarray(ends), local, side="right")

    def column(field: str) -> Array:
        return jnp.asarray(np.array([getattr(t, field) for t in tables], stack.index_dtype))[which]

    shard = collectives.axis_index(stack.shard_axes).astype(stack.index_dtype)
    inside = local - column("offset")
    if stack.placement == "div":
        rows = shard * column("rows_per_shard") + inside
    else:
        rows = inside * stack.num_shards + shard
    keys = jax.vmap(jax.random.fold_in)(_table_keys(key, tables)[which], rows)
    return NewRows(local, keys, rows, rows < column("vocabulary_size"))

"""Make a state: drawn from a random key, blank, or from the parts of another one.

Tables and slots are created shard by shard, so that no device or host holds more than its own rows.

Each row is drawn in the compute dtype with a random key of its own:

    initializer(fold_in(fold_in(key, crc32(table name)), row number), (1, D), dtype)

Of a row number from 2³² on, the low 32 bits are folded in first, then the high ones.

So its value depends on the key, the table's name and the row's number only, and is the same for
every layout and every number of devices. An initializer that takes `shard_info` is called once per
shard instead, with the table's key.

Of a checkpoint, or of another engine's state, rows are written into blank arrays. Everything else
that training changes is small, and all devices have it: counters, which are matched by the features
that they count, and what a state says of its maps (`TableState.vocabulary`).

Input: a random key and the stacks; or what another state had. Output: physical tables and slots;
counters, and what is said of maps.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tpu_embed import initializers
from tpu_embed._checks import refuse
from tpu_embed._types import Array, PyTree
from tpu_embed.core.exchange import collectives
from tpu_embed.core.layout import (
    NUMBERS_SLOT,
    ROW_MULTIPLE,
    SEED_SLOT,
    Layout,
    MeshAxes,
    Stack,
    TableSlice,
    round_up,
    send_lines,
    table_crcs,
)
from tpu_embed.core.state.table_state import (
    StackShard,
    slot_format,
    slot_shapes,
    split_shards,
    stack_specs,
)
from tpu_embed.kernels import dispatch, storage
from tpu_embed.kernels.formats import LINE, RowFormat
from tpu_embed.kernels.stochastic import row_number
from tpu_embed.vocabulary import MapStates

MAP_VERSION = "map_version"
"""The key of step and history in `TableState.vocabulary`; see `new_version`."""

CHUNK = 2**20
"""Numbers that are created at a time; this bounds the size of temporary arrays."""


class NewRows(NamedTuple):
    """Rows of a shard that are about to be created.

    Attributes:
      places: local rows of the shard, `[n]`.
      keys: the random key of each, `[n]`.
      row_ids: the logical row id of each, in its own table, `[n]`.
      exists: bool `[n]`, false for the padding at the end of a table.
      numbers: uint32 `[n]`, what stands for each row where the stack is rounded at random; None:
        nothing is kept of it.
    """

    places: Array
    keys: Array
    row_ids: Array
    exists: Array
    numbers: Array | None = None


def init_tables(
    key: Array, stacks: tuple[Stack, ...], axes: MeshAxes
) -> tuple[dict, dict]:
    """Create every table and slot; each device creates its own rows only.

    Args:
      key: a jax PRNG key.
      stacks: the stacks.
      axes: the mesh.

    Returns:
      physical tables and slots, as in `TableState`.

    Raises:
      ValueError: the call is inside a `shard_map`, or under another mesh.
    """
    return _make(_init_stack, stacks, axes, key)


@functools.partial(jax.jit, static_argnames=("stacks", "axes"))
def blank_arrays(stacks: tuple[Stack, ...], axes: MeshAxes) -> tuple[dict, dict]:
    """Create every table and slot filled with zeros; compiled once per layout.

    Args:
      stacks: the stacks.
      axes: the mesh.

    Returns:
      physical tables and slots, as in `TableState`.

    Raises:
      ValueError: the call is inside a `shard_map`, or under another mesh.
    """
    return _make(_blank, stacks, axes)


def _make(
    make: Callable[..., StackShard],
    stacks: tuple[Stack, ...],
    axes: MeshAxes,
    *key: Array,
) -> tuple[dict, dict]:
    """Return tables and slots, of which each device makes its shard of every stack."""
    axes.check_context()

    def shard(*key):
        return {stack.name: make(stack, *key) for stack in stacks}

    specs = {stack.name: stack_specs(stack, axes) for stack in stacks}
    return split_shards(
        collectives.per_device(shard, axes, PartitionSpec(), specs)(*key)
    )


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


def _init_stack(stack: Stack, key: Array) -> StackShard:
    """Fill this device's shard of one stack."""
    made = _blank(stack)
    if stack.rounds_at_random:
        seed = jax.random.fold_in(key, zlib.crc32(SEED_SLOT.encode()))
        made.slots[SEED_SLOT] = jax.random.bits(seed, (), jnp.uint32)
    # A stack may have hundreds of small tables: those that share an initializer and lie next to
    # each other are filled by one loop, so the program does not grow with their number.
    for initializer, run in itertools.groupby(
        stack.tables, key=lambda table: table.initializer
    ):
        tables = list(run)
        what = f"table {tables[0].name!r}: initializer"
        if initializers.wants_shard_info(initializer):
            for table in tables:
                made = _fill(
                    made,
                    key,
                    stack,
                    [table],
                    _whole_shard(initializer, stack, table, key),
                )
        else:
            made = _fill(made, key, stack, tables, row_by_row(initializer, stack, what))
    return made


def _zeros(array: jax.ShapeDtypeStruct) -> Array:
    return dispatch.zeros(array.shape, array.dtype)


def row_by_row(
    initializer: Callable, stack: Stack, what: str
) -> Callable[[NewRows], Array]:
    """Return a function that calls the initializer once per row, each with its own key."""
    shape = (1, stack.dim)

    # The initializer makes [1, D]; [0] takes the row out, and vmap stacks n of them to [n, D].
    def one(key):
        return _of_shape(initializer(key, shape, stack.compute_dtype), shape, what)[0]

    return lambda lines: jax.vmap(one)(lines.keys)


def _whole_shard(
    initializer: Callable, stack: Stack, table: TableSlice, key: Array
) -> Callable[[NewRows], Array]:
    """Call the initializer once for the whole shard; return a function that picks rows of it."""
    places = jnp.arange(table.rows_per_shard, dtype=stack.index_dtype) + table.offset
    lines = _lines(key, stack, [table], places)
    # Padding after the last row would get row ids of V or more. The initializer sees valid row ids
    # only, so padding repeats the last row here; `_fill` sets it to zero.
    row_ids = jnp.minimum(lines.row_ids, table.vocabulary_size - 1).astype(jnp.int32)
    # One call makes [rows_per_shard, D], with the key of the table instead of one key per row.
    shape = (table.rows_per_shard, stack.dim)
    made = initializer(
        table_keys(key, [table])[0],
        shape,
        stack.compute_dtype,
        shard_info=initializers.ShardInfo((table.vocabulary_size, stack.dim), row_ids),
    )
    values = _of_shape(made, shape, f"table {table.name!r}: initializer")
    return lambda lines: values[lines.places - table.offset]


def _of_shape(values: Any, shape: tuple[int, int], what: str) -> Array:
    """Return an initializer's result as an array.

    Raises:
      ValueError: the result has another shape than `shape`.
    """
    got = getattr(values, "shape", None)
    if got != shape:
        refuse(
            what,
            expected=f"an array of shape {shape}",
            got=type(values).__name__ if got is None else f"shape {got}",
        )
    return jnp.asarray(values)


def _fill(
    made: StackShard,
    key: Array,
    stack: Stack,
    tables: list[TableSlice],
    rows_of: Callable[[NewRows], Array],
) -> StackShard:
    """Write the rows of adjacent tables, and their slots, one chunk at a time.

    All chunks have the same length, because shapes are static. The optimization barriers around a
    chunk keep XLA from fusing it with other code, so its bits do not depend on the rest of the
    program.

    Args:
      made: the shard so far.
      key: the engine's key.
      stack: the stack.
      tables: adjacent tables of the stack.
      rows_of: returns the values `[n, D]` of `NewRows`.
    """
    first, last = tables[0].offset, tables[-1].offset + tables[-1].rows_per_shard
    # Count a packed row as whole lines of 128 words: an upper bound of what it takes.
    width = stack.dim if stack.packing == "none" else round_up(stack.dim, LINE)
    chunk = min(last - first, max(ROW_MULTIPLE, CHUNK // width))
    numbers = jnp.arange(round_up(chunk, ROW_MULTIPLE), dtype=stack.index_dtype)

    def write(i, made):
        # The last chunk starts earlier, so that it ends at `last`. With rows 0 … 9 and chunk 4:
        # 0-3, 4-7, 6-9. Rows 6 and 7 are created twice, with equal values.
        start = jnp.minimum(first + i * chunk, last - chunk).astype(stack.index_dtype)
        # Up to a multiple of ROW_MULTIPLE, more rows follow (repeats of the last one at the end);
        # [:chunk] below drops them again.
        lines = _lines(key, stack, tables, jnp.minimum(start + numbers, last - 1))
        rows = rows_of(jax.lax.optimization_barrier(lines)).astype(stack.compute_dtype)
        rows = jax.lax.optimization_barrier(jnp.where(lines.exists[:, None], rows, 0))
        stored = storage.encode(rows, stack.dtype)[:chunk]
        table = _put(made.table, stored, start, stack.row_format)
        slots, shapes = dict(made.slots), slot_shapes(stack)
        for name, fresh in fresh_slots(stack, rows, lines).items():
            slot, stored = shapes[name], storage.encode(fresh, shapes[name].dtype)
            # A slot that all rows share (a step counter, say) is the same in every chunk.
            if slot.per_row:
                stored = _put(
                    slots[name], stored[:chunk], start, slot_format(stack, slot)
                )
            slots[name] = stored
        return StackShard(table, slots)

    return jax.lax.fori_loop(0, -(-(last - first) // chunk), write, made)


def fresh_slots(stack: Stack, rows: Array, lines: NewRows) -> dict[str, Array]:
    """Return the initial slots of new rows `[n, D]`, by name."""
    if stack.optimizer is None:
        return {}
    slots = jax.lax.optimization_barrier(stack.optimizer.init_slots(rows, lines.keys))
    return slots if lines.numbers is None else {**slots, NUMBERS_SLOT: lines.numbers}


def _put(array: Array, stored: Array, start: Array, row_format: RowFormat) -> Array:
    """Return the array with consecutive stored rows written from row `start` on."""
    if not row_format.packed:
        return jax.lax.dynamic_update_slice_in_dim(array, stored, start, axis=0)
    # Packed, several rows share a line of 128 words, and the chunk may start in the middle of one.
    local = start + jnp.arange(stored.shape[0], dtype=start.dtype)
    return dispatch.write_ascending_rows(array, local, stored, row_format)


def fold_row_id(key: Array, low: Array, high: Array) -> Array:
    """Return the random key of a row from that of its table.

    Args:
      key: the table's key.
      low, high: uint32 `[]`, the halves of the row id; a high half of 0 is left out.
    """
    folded = jax.random.fold_in(key, low)
    return jnp.where(high == 0, folded, jax.random.fold_in(folded, high))


def table_keys(key: Array, tables: Sequence[TableSlice]) -> Array:
    """Return one random key per table, `[T]`: `key` folded with the CRC-32 of the table's name."""
    return jax.vmap(lambda crc: jax.random.fold_in(key, crc))(
        jnp.asarray(table_crcs(tables))
    )


def _lines(key: Array, stack: Stack, tables: list[TableSlice], local: Array) -> NewRows:
    """Return the logical row of each local row of this device.

    Args:
      key: the engine's key.
      stack: the stack.
      tables: adjacent tables that contain all of the local rows.
      local: local rows `[n]`.
    """
    which, row_ids, exists = rows_of_tables(stack, tables, local)
    low, high = row_ids.astype(jnp.uint32), jnp.zeros(row_ids.shape, jnp.uint32)
    if row_ids.dtype == jnp.int64:
        high = (row_ids >> 32).astype(jnp.uint32)
    keys = jax.vmap(fold_row_id)(table_keys(key, tables)[which], low, high)
    numbers = row_number(low, high) if stack.keeps_numbers else None
    return NewRows(local, keys, row_ids, exists, numbers)


def rows_of_tables(
    stack: Stack, tables: Sequence[TableSlice], local: Array
) -> tuple[Array, Array, Array]:
    """Return the table of each local row of this device, its row id, and whether it has one.

    Args:
      stack: the stack.
      tables: adjacent tables of it.
      local: local rows `[n]` from the first table on.

    Returns:
      `[n]` numbers among the tables; `[n]`; bool `[n]`, false for padding after a table's rows.
    """
    names = ("offset", "rows_per_shard", "vocabulary_size")
    columns = ([getattr(table, name) for table in tables] for name in names)
    offset, size, limit = (jnp.asarray(np.array(c, stack.index_dtype)) for c in columns)
    # Offsets 0 and 3 map the local rows 0 … 4 to the tables 0, 0, 0, 1, 1.
    which = jnp.searchsorted(offset, local, side="right") - 1
    index, size = local - offset[which], size[which]
    shard = collectives.axis_index(stack.shard_axes).astype(stack.index_dtype)
    row_ids = stack.logical_in(shard, index, size)
    return which, row_ids, (index < size) & (row_ids < limit[which])


# -- what a state has besides rows ---------------------------------------------------------------


def new_vocabulary(key: Array, history: Array, size: int) -> dict[str, Array]:
    """Return the `vocabulary` of a new state; runs in a program.

    Args:
      key: the random key that `init` was given.
      history: int32 `[]`, that of states without keys.
      size: how many numbers there are of maps (`Layout.version_size`).
    """
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    steps = jnp.zeros(size, jnp.int32).at[1].set(history)
    return {MAP_VERSION: steps, f"{jax.random.key_impl(key)}": jax.random.key_data(key)}


def new_version(
    vocabulary: Mapping[str, Array],
    steps: tuple[int, int],
    axes: MeshAxes,
    taken: Sequence[int] | None = None,
) -> Any:
    """Return the `vocabulary` of a state with another step and history.

    They are on the devices at once: whoever reads them waits for no program.

    Args:
      vocabulary: that of the state before.
      steps: step and history.
      axes: the mesh.
      taken: for each dynamic vocabulary, the last step at which a row was taken from a key, and
        with tables on the host the last replacement. None: the steps are not known, so they may
        have been the present one.
    """
    numbers = np.array(
        [*steps, *(taken or np.asarray(vocabulary[MAP_VERSION])[2:])], np.int32
    )
    if taken is None:
        numbers[2:][numbers[2:] >= 0] = steps[0]
    return {**vocabulary, MAP_VERSION: put_everywhere(numbers, axes)}


def random_key(vocabulary: Mapping[str, Array]) -> dict[str, Array]:
    """Return the data of the random key that new rows are drawn with, by its kind."""
    return {kind: data for kind, data in vocabulary.items() if kind != MAP_VERSION}


def open_key(key: Mapping[str, Any]) -> Array:
    """Return the key of what `random_key` returned."""
    ((kind, data),) = key.items()
    return jax.random.wrap_key_data(jnp.asarray(data), impl=kind)


def put_everywhere(values: PyTree, axes: MeshAxes) -> PyTree:
    """Put NumPy arrays, equal in all processes, on every device; no process waits for another."""
    sharding = axes.sharding(())
    return jax.tree.map(lambda x: send_lines(x, sharding), values)


def matched_counters(
    found: Mapping[str, Any],
    paths: Sequence[str],
    forms: Mapping[str, Any],
    layout: Layout,
) -> dict[str, np.ndarray]:
    """Return the counters of a state; 0 where there was none.

    Args:
      found: those of the other state, by name: a number, or one per feature.
      paths: the features of the other state, in the order of these numbers.
      forms: shape and dtype of the counters that are wanted, by name.
      layout: has the features that they count, which are matched by their paths.
    """
    wanted, counters = [feature.path for feature in layout.features], {}
    for name, form in forms.items():
        counters[name] = np.zeros(form.shape, form.dtype)
        count = found.get(name, 0)
        # found [F], in the order of `paths`; wanted [F'], in the order of `wanted`
        if np.shape(count) == (len(paths),) and form.shape == (len(wanted),):
            by_path = dict(zip(paths, count, strict=True))
            counters[name][:] = [by_path.get(path, 0) for path in wanted]
        elif np.shape(count) == form.shape:
            counters[name][...] = count
    return counters


def vocabulary_of_maps(
    states: MapStates, key: Mapping[str, np.ndarray] | None, layout: Layout
) -> dict[str, Array]:
    """Return the `vocabulary` of the state that belongs to maps.

    Args:
      states: of the maps.
      key: the data of the random key of new rows, by its kind; None: none is drawn any more.
      layout: the engine's layout.
    """
    (step,) = {int(one.step) for one in states.maps.values()}
    # When a row was taken last is not known; batches from before are refused anyway.
    steps = np.zeros(layout.version_size, np.int32)
    steps[: 2 + len(layout.living)] = step
    steps[1] = states.history
    if not key:
        some = jax.random.key(0)
        key = {f"{jax.random.key_impl(some)}": np.asarray(jax.random.key_data(some))}
    return put_everywhere({**key, MAP_VERSION: steps}, layout.axes)

"""Rows by id: which shard of a table has which, those that the devices hold, and copies of rows.

Whatever holds rows is read by a function of row ids, `read(ids) -> {part: [n, …]}`, and written by
`write(ids, rows)`: the devices (`DeviceRows`), rows at home (`HostRows`), files of a checkpoint.
The parts are the values of a row and its part of each slot (`Field.part`), as they are stored.

Reading rows of the devices moves no rows between devices where this process has them all; otherwise
all processes read together, and every device gets what is read:

    read_here    range or array of ids  ->  rows of this process's shards, from their memory
    read         the same, in all processes, with the same ids  ->  all rows
    write        ids and rows  ->  each device gets its own, in the memory of the state's arrays

Users see a state as logical tables `[V, D]` and slots, row 0 first. It stores physical arrays:
tables stacked, sharded, padded, perhaps packed.

Input: a state; row ids, as an array or a Python `range`; rows. Output: rows as they are stored; a
state, or an array with rows set; or logical arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tpu_embed._calls import call
from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.exchange import collectives, route
from tpu_embed.core.layout import (
    Layout,
    MeshAxes,
    Stack,
    TableSlice,
    aligned_empty,
    bucket,
    parcel_operand,
)
from tpu_embed.core.state import Field, TableState, check_own, fields, logical_rows
from tpu_embed.kernels import dispatch, storage
from tpu_embed.kernels.formats import RowFormat
from tpu_embed.storage import Rows

# -- which shard has which rows --------------------------------------------------------------------

BLOCK = 2**22
"""Bytes that are copied at a time, and the unit of files."""

Ids = np.ndarray | range
"""Row ids, int64 `[n]` and all different; or a range of them."""


class Grid(NamedTuple):
    """Where the rows of a table are: row r is row r // S of shard r mod S, or r mod n of r // n.

    Attributes:
      shards: S.
      size: n, the rows of a shard.
      alternate: whether rows alternate between the shards (MOD); otherwise a shard has a contiguous
        range (DIV).
    """

    shards: int
    size: int
    alternate: bool

    @classmethod
    def of(cls, stack: Stack, table: TableSlice) -> Grid:
        """Return the grid of a table in its stack."""
        return cls(stack.num_shards, table.rows_per_shard, stack.placement != "div")

    def ids(self, shards: Sequence[int], first: int, last: int) -> Ids:
        """Return the ids of the local rows `[first, last)` of some shards, ascending."""
        if self.alternate and len(shards) == self.shards:
            return range(first * self.shards, last * self.shards)
        if len(shards) == 1:
            start, step = (
                (shards[0], self.shards)
                if self.alternate
                else (shards[0] * self.size, 1)
            )
            return range(start + first * step, start + last * step, step)
        lines, some = np.arange(first, last), np.asarray(shards, np.int64)
        if self.alternate:  # [n, 1] · S + [k]: line after line
            return (lines[:, None] * self.shards + some).reshape(-1)
        return (some[:, None] * self.size + lines).reshape(-1)

    def cut(self, ids: Ids) -> Iterator[tuple[int, Any, Any]]:
        """Yield a shard, its local rows, ascending, and their places in `ids`, for each shard.

        Of a range both are slices, so that no row is copied one by one:

            2 shards of 3 rows, range(1, 5)     MOD  0: rows 1:3 at 1::2    1: rows 0:2 at 0::2
                                                DIV  0: rows 1:3 at 0:2     1: rows 0:2 at 2:4
        """
        if not isinstance(ids, range):
            yield from self._cut_array(ids)
        elif self.alternate:
            # Every so many ids of the range are on the same shard.
            every = self.shards // math.gcd(self.shards, ids.step)
            for k in range(min(every, len(ids))):
                some, step = ids[k::every], ids.step * every // self.shards
                local = slice(some[0] // self.shards, some[-1] // self.shards + 1, step)
                yield some[0] % self.shards, local, slice(k, None, every)
        else:
            at = 0
            while at < len(ids):
                shard, first = divmod(ids[at], self.size)
                n = min(len(ids) - at, -(-(self.size - first) // ids.step))
                local = slice(first, first + (n - 1) * ids.step + 1, ids.step)
                yield shard, local, slice(at, at + n)
                at += n

    def _cut_array(self, ids: np.ndarray) -> Iterator[tuple[int, Any, Any]]:
        # The place of each id in shard after shard: shard · n + local row.
        place = (
            ids % self.shards * self.size + ids // self.shards
            if self.alternate
            else ids
        )
        order = np.argsort(place, kind="stable")
        bounds = np.searchsorted(place[order], np.arange(self.shards + 1) * self.size)
        for i in np.flatnonzero(np.diff(bounds)).tolist():
            at = order[bounds[i] : bounds[i + 1]]
            yield i, _as_slice(place[at] - i * self.size), _as_slice(at)


def _as_slice(numbers: np.ndarray) -> Any:
    """Return numbers that follow each other as a slice, others as they are."""
    first, last = numbers[0], numbers[-1]
    run = last - first + 1 == numbers.size and (np.diff(numbers) == 1).all()
    return slice(int(first), int(last) + 1) if run else numbers


def copy_rows(
    read: Callable[[Any], Rows],
    write: Callable[[Any, Rows], None],
    blocks: Iterable[Any],
) -> None:
    """Copy rows, block by block, so that little memory is needed.

    Args:
      read: returns the rows of ids.
      write: takes ids and their rows.
      blocks: the ids of each block; or pairs, the ids in the source and those in the sink.
    """
    for block in blocks:
        before, now = block if isinstance(block, tuple) else (block, block)
        write(now, read(before))


def pieces(n: int, size: int) -> Iterator[slice]:
    """Yield the places of n rows, so many at a time."""
    for first in range(0, n, size):
        yield slice(first, min(first + size, n))


def blocks_of(ids: Ids, size: int) -> Iterator[Ids]:
    """Yield so many ids at a time."""
    return (ids[at] for at in pieces(len(ids), size))


def below(ids: Ids, limit: int) -> Ids:
    """Return those of ascending ids that are below a limit."""
    if isinstance(ids, range):
        return ids[: len(range(ids.start, limit, ids.step))]
    return ids[ids < limit]


# -- rows of the devices ---------------------------------------------------------------------------

_FEW = 2**10
"""Up to so many rows programs have room for a power of two of them; above, for few more."""


class DeviceRows:
    """The rows of a table in the arrays of a state.

    Args:
      state: the state.
      layout: the engine's layout.
      name: the table.
      parts: of its rows; None: all.

    Attributes:
      state: the state; `write` replaces it, and donates the arrays of the one before.
      fields: the table, and those of its slots that have a part for each row, by part.
      grid: where its rows are.
      block: rows that are copied at a time.
      here: the shards that this process holds, ascending.
    """

    def __init__(
        self,
        state: TableState,
        layout: Layout,
        name: str,
        parts: Collection[str] | None = None,
    ) -> None:
        self._stack, self._table = layout.table(name)
        self.state, self._axes = state, layout.axes
        self.fields = {
            f.part: f
            for f in fields(layout, name)
            if f.shape.per_row and (parts is None or f.part in parts)
        }
        self.grid = Grid.of(self._stack, self._table)
        width = sum(one.nbytes for one in self.empty(1).values())
        self.block = max(BLOCK // max(1, width), self.grid.shards)
        self._kept: dict[int, Rows] | None = None
        self._shared = (
            len({*layout.axes.processes_of_parts(self._stack.shard_axes)}) > 1
        )
        self.here: list[int] = layout.axes.local_parts(self._stack.shard_axes).tolist()

    def empty(self, n: int) -> dict[str, np.ndarray]:
        """Return room for n rows, `[n, …]` by part, with arbitrary numbers."""
        return {
            part: np.empty((n, *f.shape.shape), storage.stored_dtype(f.shape.dtype))
            for part, f in self.fields.items()
        }

    def lines(self, limit: int) -> Iterator[Ids]:
        """Yield the ids below a limit of this process's shards; as many blocks in every process."""
        size = self.block // self.grid.shards
        for first in range(0, self.grid.size, size):
            ids = self.grid.ids(self.here, first, min(first + size, self.grid.size))
            yield below(ids, limit)

    def keep(self, shards: Sequence[int]) -> None:
        """Copy the rows of some shards to the host, so that the state may be donated, or go."""
        every = {shard: self.grid.ids([shard], 0, self.grid.size) for shard in shards}
        self._kept = {shard: self.read_here(ids) for shard, ids in every.items()}
        self.state = dataclasses.replace(self.state, tables={}, slots={})

    def read(self, ids: Ids) -> Rows:
        """Return rows `[n, …]` by part.

        With several processes all of them call this, with the same ids.
        """
        if not self._shared:  # every process has all of them, or there is one
            return self.read_here(ids)
        rows = self.empty(len(ids))
        for at in pieces(len(ids), self.block):
            padded = _padded(np.asarray(ids[at]), self._stack.index_dtype)
            for part, f in self.fields.items():
                found = _read_everywhere(f.read(self.state), padded, f, self._axes)
                stored = rows[part].dtype
                bits = np.asarray(found)[: at.stop - at.start]
                rows[part][at] = bits.astype(f"u{stored.itemsize}", copy=False).view(
                    stored
                )
        return rows

    def read_here(self, ids: Ids) -> Rows:
        """Return rows `[n, …]` by part; those of shards that are not here are arbitrary."""
        rows = self.empty(len(ids))
        if self._kept is not None:
            for shard, local, at in self.grid.cut(ids):
                for part, array in self._kept[shard].items():
                    rows[part][at] = array[local]
            return rows
        shards = {part: self._shards(f) for part, f in self.fields.items()}
        for shard, local, at in self.grid.cut(ids):
            for part, f in self.fields.items():
                if shard in shards[part]:
                    self._copy(shards[part][shard], local, f, rows[part], at)
        return rows

    def _copy(
        self, lines: Array, local: Any, f: Field, rows: np.ndarray, at: Any
    ) -> None:
        """Copy local rows of a table, from the lines of its shard, to their places in `rows`."""
        if self._axes.on_cpu:  # the lines are in the host's memory
            stored = f.row_format.by_row(np.asarray(lines))
            rows[at] = f.row_format.unpack(stored[f.table.offset :][local])
            return
        # `np.r_` makes an array of numbers of a slice, too.
        places, wanted = np.arange(len(rows))[at], np.r_[local] + f.table.offset
        for some in pieces(len(places), self.block):
            found = _take(
                lines, _padded(wanted[some], f.stack.index_dtype), f.row_format
            )
            rows[places[some]] = np.asarray(found)[: some.stop - some.start]

    def _shards(self, f: Field) -> dict[int, Array]:
        """Return the lines of each shard that is here, by shard."""
        # Moves the array if a user has sharded it otherwise.
        whole = jax.device_put(
            f.read(self.state), self._axes.sharding(self._stack.shard_axes)
        )
        size = f.row_format.array(self._stack.num_rows).shape[0]
        return {
            (one.index[0].start or 0) // size: one.data
            for one in whole.addressable_shards
        }

    def write(self, ids: Ids, rows: Rows) -> None:
        """Write rows `[n, …]` by part, in the memory of the arrays; some parts may be missing.

        With several processes all of them call this, each at least with the rows of its own shards;
        then the ids are a block of `lines`, or those of all processes.
        """
        if len(ids) > self.block:
            for at in pieces(len(ids), self.block):
                self.write(ids[at], {part: array[at] for part, array in rows.items()})
            return
        written = tuple(f for part, f in self.fields.items() if part in rows)
        cut = [(shard, np.r_[local], at) for shard, local, at in self.grid.cut(ids)]
        most = max((len(local) for _, local, _ in cut), default=0)
        if self._shared:  # processes have other ids, and one program
            most = max(most, min(self.grid.size, self.block // self.grid.shards))
        # Each device gets its line of [S, m, …]: ids 1 2 4 6 of two shards (MOD) are 1 2 3 and 0.
        shape = self.grid.shards, _room(most)
        places = np.full(shape, PADDING_ID, self._stack.index_dtype)
        values = {
            f.part: aligned_empty(
                (*shape, *f.shape.shape), storage.stored_dtype(f.shape.dtype)
            )
            for f in written
        }
        for shard, local, at in cut:
            places[shard, : len(local)] = local + self._table.offset
            for part, array in values.items():
                array[shard, : len(local)] = rows[part][at]
        sharding = self._axes.sharding(self._stack.shard_axes)
        send = functools.partial(parcel_operand, sharding=sharding)
        operands = send(places), {part: send(array) for part, array in values.items()}
        arrays = {f.part: f.read(self.state) for f in written}
        jax.block_until_ready(arrays)  # no more than two blocks are held
        for part, array in call(_write, arrays, *operands, written, self._axes).items():
            self.state = self.fields[part].write(self.state, array)


def _room(n: int) -> int:
    """Return room for n rows, of which there are few sizes, so that few programs are compiled."""
    return bucket(n) if n > _FEW else 1 << max(6, (n - 1).bit_length())


def _padded(rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return rows with room for few more, which are absent."""
    return np.pad(
        rows, (0, _room(rows.size) - rows.size), constant_values=PADDING_ID
    ).astype(dtype)


@functools.partial(jax.jit, static_argnames="row_format")
def _take(lines: Array, rows: Array, row_format: RowFormat) -> Array:
    """Return rows of one device's shard, `[n, …]`."""
    return row_format.unpack(dispatch.read_rows(lines, rows, row_format))


@functools.partial(jax.jit, static_argnames=("written", "axes"), donate_argnums=0)
def _write(
    arrays: Mapping[str, Array],
    places: Array,
    values: Mapping[str, Array],
    written: tuple[Field, ...],
    axes: MeshAxes,
) -> dict[str, Array]:
    """Return the arrays of a stack with rows set, by part.

    Args:
      arrays: those of the stack.
      places: `[S, m]`, the local rows of each shard, ascending; `PADDING_ID` for none.
      values: `[S, m, …]` by part.
      written: the fields of these parts.
      axes: the mesh.
    """

    def shard(arrays, places, values):
        return {
            f.part: dispatch.write_ascending_rows(
                arrays[f.part], places[0], values[f.part][0], f.row_format
            )
            for f in written
        }

    spec = axes.spec(written[0].stack.shard_axes)
    return collectives.per_device(shard, axes, spec, spec)(arrays, places, values)


@functools.partial(jax.jit, static_argnames=("f", "axes"))
def _read_everywhere(physical: Array, ids: Array, f: Field, axes: MeshAxes) -> Array:
    """Return the bits of logical rows, uint32 or uint64 `[n, …]`, on every device."""
    stack = f.stack
    places = jnp.where(
        ids < 0, jnp.asarray(PADDING_ID, ids.dtype), stack.physical(ids, f.table)
    )

    def shard(physical, places):
        # With 10 rows per shard, shard 2 reads place 23 as its local row 3, and gives zeros for
        # places outside of [20, 30).
        local = route.rows_of_shard(places, stack)
        mine, rows = local >= 0, _take(physical, local, f.row_format)
        unsigned = jnp.dtype(f"uint{8 * rows.dtype.itemsize}")
        cast = (
            jax.lax.convert_element_type
            if rows.dtype == bool
            else jax.lax.bitcast_convert_type
        )
        bits = cast(rows, unsigned).astype(
            jnp.uint64 if unsigned == jnp.uint64 else jnp.uint32
        )
        bits = jnp.where(
            mine.reshape(-1, *[1] * (bits.ndim - 1)), bits, jnp.zeros_like(bits)
        )
        # Bits are summed, not floats, so that NaN and -0.0 arrive as they are.
        return collectives.psum(bits, stack.shard_axes)

    whole, specs = PartitionSpec(), (axes.spec(stack.shard_axes), PartitionSpec())
    return collectives.per_device(shard, axes, specs, whole)(physical, places)


# -- logical tables and slots ----------------------------------------------------------------------


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
def write_copy(
    physical: Array, row_ids: Any, values: Any, f: Field, axes: MeshAxes
) -> Array:
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

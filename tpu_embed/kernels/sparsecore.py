"""Rows read and written by a TPU's SparseCores, beside its TensorCores: Pallas kernels.

Enters: an array of rows of 32-bit words, one after the other in memory, and row numbers. Leaves:
rows, or the array with some of them set, in place. Called by `dispatch`, on the chips of `KINDS`.

Every vector subcore takes chunks of rows: their numbers come into its memory, and one indirect DMA
moves the rows, leaving out absent ones. That DMA cannot be interpreted on a CPU: these kernels
compile for every chip of `KINDS`, and have not run on one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tpu_embed._types import PADDING_ID, Array

KINDS = ("TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e", "TPU7x")
"""`device_kind` of the chips whose SparseCores Pallas can program: v5p, v6e, tpu7x."""

WORDS = 16
"""Rows are a multiple of so many words: the widest vector of a subcore, and 64 bytes."""

_MOST_ROWS, _LEAST_ROWS = 128, 16
"""Rows of one indirect DMA."""
_MOST_WORDS = 128 * 128
"""Words of one: two of them, 128 KiB, are in a subcore's memory (256 KiB or more) at a time."""


def has_sparse_cores(device: Any) -> bool:
    """Tell whether a device, or a mesh's abstract device, has SparseCores that Pallas programs.

    Args:
      device: anything with a `device_kind`, or None.
    """
    return getattr(device, "device_kind", None) in KINDS


def here() -> bool:
    """Tell whether the mesh that is traced for, inside `shard_map`, is made of such devices."""
    return has_sparse_cores(jax.sharding.get_abstract_mesh().abstract_device)


def gather_rows(table: Array, rows: Array) -> Array:
    """Return `table[rows]`, zeros where a row is absent; see `reference.gather_rows`.

    Args:
      table: `[R, W]`, W a multiple of `WORDS`, or `[R]`; of a 32-bit dtype.
      rows: integer `[N]`.

    Returns:
      `[N, W]`, or `[N]`.
    """
    pieces, numbers = _pieces(table), _piece_numbers(table, rows)
    chunk = _rows_at_a_time(numbers.shape[0], pieces.shape[1:])
    ids = _padded(numbers, chunk, PADDING_ID)
    if not ids.shape[0]:
        return jnp.zeros((0, *table.shape[1:]), table.dtype)

    def kernel(pieces: Any, ids: Any, found: Any) -> None:
        def one_chunk(ids: Any, found: Any) -> None:
            _zero_where_absent(ids, found)
            _read_present(pieces, ids, found)

        _over_chunks(one_chunk, ids, inputs=(ids,), outputs=(found,), chunk=chunk)

    shape = jax.ShapeDtypeStruct((*ids.shape, *pieces.shape[1:]), table.dtype)
    found = _on_subcores(kernel, "gather_rows", shape, moves=shape)(pieces, ids)
    return found[: numbers.shape[0]].reshape(*rows.shape, *table.shape[1:])


def set_rows(table: Array, rows: Array, values: Array) -> Array:
    """Return `table` with `values` at `rows`, in its memory; see `reference.set_rows`.

    Args:
      table: `[R, W]`, W a multiple of `WORDS`, or `[R]`; of a 32-bit dtype.
      rows: integer `[U]`; present rows are different from each other.
      values: `[U, W]`, or `[U]`, the table's dtype.
    """
    pieces, numbers = _pieces(table), _piece_numbers(table, rows)
    chunk = _rows_at_a_time(numbers.shape[0], pieces.shape[1:])
    ids = _padded(numbers, chunk, PADDING_ID)
    if not ids.shape[0]:
        return table
    given = _padded(values.reshape(*numbers.shape, *pieces.shape[1:]), chunk, 0)

    def kernel(pieces: Any, ids: Any, given: Any) -> None:
        def one_chunk(ids: Any, given: Any) -> None:
            _write_present(given, ids, pieces)

        _over_chunks(one_chunk, ids, inputs=(ids, given), outputs=(), chunk=chunk)

    written = jax.new_ref(pieces)
    _on_subcores(kernel, "set_rows", (), moves=given)(written, ids, given)
    return jax.freeze(written).reshape(table.shape)


def _read_present(table: Any, ids: Any, found: Any) -> None:
    """Copy rows of the table to the subcore, by one indirect DMA."""
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas import tpu_sc as plsc

    pltpu.sync_copy(table.at[plsc.Indices(ids, ignored_value=PADDING_ID)], found)


def _write_present(given: Any, ids: Any, table: Any) -> None:
    """Copy rows from the subcore into the table, by one indirect DMA."""
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas import tpu_sc as plsc

    pltpu.sync_copy(given, table.at[plsc.Indices(ids, ignored_value=PADDING_ID)])


def _pieces(table: Array) -> Array:
    """Return the table with rows that are too long for a subcore's memory cut into equal pieces."""
    cuts = _cuts(table)
    return table if cuts == 1 else table.reshape(-1, table.shape[1] // cuts)


def _cuts(table: Array) -> int:
    """Return the least number of equal pieces, of whole vectors, that are short enough."""
    if table.ndim == 1:
        return 1
    vectors, longest = table.shape[1] // WORDS, _MOST_WORDS // _LEAST_ROWS
    return next(
        n
        for n in range(1, vectors + 1)
        if vectors % n == 0 and table.shape[1] // n <= longest
    )  # fmt: skip


def _piece_numbers(table: Array, rows: Array) -> Array:
    """Return the numbers of the pieces of rows, int32; `PADDING_ID` for absent rows."""
    cuts = _cuts(table)
    present = (rows >= 0) & (rows < table.shape[0])
    ids = jnp.where(present, rows, PADDING_ID).astype(jnp.int32)
    if cuts == 1:
        return ids
    pieces = ids[:, None] * cuts + jnp.arange(cuts, dtype=jnp.int32)
    return jnp.where(present[:, None], pieces, PADDING_ID).reshape(-1)


def _rows_at_a_time(n: int, row: tuple[int, ...]) -> int:
    """Return how many of n rows one DMA moves: a power of two, one that divides n if any does."""
    most = _MOST_ROWS
    while most > _LEAST_ROWS and (most // 2 >= n or (row and most * row[0] > _MOST_WORDS)):
        most //= 2
    chunk = most
    while n % chunk and chunk > _LEAST_ROWS:
        chunk //= 2
    return most if n % chunk else chunk


def _padded(x: Array, chunk: int, value: int) -> Array:
    missing = -x.shape[0] % chunk
    if not missing:
        return x
    return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1), constant_values=value)


def _on_subcores(
    kernel: Callable[..., None], name: str, out_type: Any, *, moves: Any
) -> Callable[..., Any]:
    """Return the kernel, to be called with arrays, on all vector subcores of the device.

    The compiler learns that it moves the bytes of `moves` twice: to know what else has time for.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas import tpu_sc as plsc

    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")
    params = pltpu.CompilerParams(use_tc_tiling_on_sc=False)
    size = 2 * moves.size * moves.dtype.itemsize
    cost = pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=size)
    return pl.kernel(
        kernel,
        out_type=out_type,
        mesh=mesh,
        name=name,
        compiler_params=params,
        cost_estimate=cost,
    )


def _over_chunks(
    one_chunk: Callable[..., None], ids: Any, *, inputs: tuple, outputs: tuple, chunk: int
) -> None:
    """Call `one_chunk` with chunks of the arrays' first axis, shared out among the subcores."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def blocks(arrays: tuple) -> list[Any]:
        return [
            pl.BlockSpec((chunk, *x.shape[1:]), lambda i, n=x.ndim: (i, *[0] * (n - 1)))
            for x in arrays
        ]

    pltpu.emit_pipeline(
        one_chunk,
        grid=(ids.shape[0] // chunk,),
        in_specs=blocks(inputs),
        out_specs=blocks(outputs),
        core_axis_name=("core", "subcore"),
        dimension_semantics=(pltpu.PARALLEL,),
    )(*inputs, *outputs)


def _zero_where_absent(ids: Any, found: Any) -> None:
    """Fill a chunk with zeros, if one of its rows is absent: the DMA leaves that row as it was."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu_sc as plsc

    lanes = plsc.get_sparse_core_info().num_lanes
    least = ids[pl.ds(0, lanes)]
    for start in range(lanes, ids.shape[0], lanes):
        least = jnp.minimum(least, ids[pl.ds(start, lanes)])

    @pl.when(functools.reduce(jnp.minimum, [least[i] for i in range(lanes)]) < 0)
    def _() -> None:
        zeros = jnp.zeros(lanes, found.dtype)

        @pl.loop(0, found.shape[0] if found.ndim > 1 else found.shape[0] // lanes)
        def _(i: Any) -> None:
            if found.ndim == 1:
                found[pl.ds(i * lanes, lanes)] = zeros
            else:
                for start in range(0, found.shape[1], lanes):
                    found[i, pl.ds(start, lanes)] = zeros

"""Read and write rows with a TPU's SparseCores: Pallas kernels.

A SparseCore has vector subcores with a small memory each, and moves scattered rows well, while the
TensorCores go on with dense work. Every subcore takes chunks of rows: it loads their numbers into
its memory, and one indirect DMA (a copy whose addresses come from a list) moves the rows, leaving
out absent ones. Pallas cannot interpret that DMA on a CPU, so these kernels have been compiled for
every chip in `KINDS`, but have not run on one.

Input: an array of rows of 32-bit words, one after the other in memory, and row numbers. Output:
rows, or the array with some of them set, in its own memory.
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
"""Rows are padded to a multiple of so many words: 64 bytes, the widest vector of a subcore."""

MOST_BYTES = 2**34
"""The most bytes of an array on one device, 16 GiB: others have found that SparseCores address no
more than that (torchrec #4630). This has not been tried with these kernels."""

_MOST_ROWS, LEAST_ROWS = 128, 16
"""The most and the fewest rows that one indirect DMA moves; the fewest are one vector of the widest
subcore."""
MOST_WORDS = 128 * 128
"""The most words that one DMA moves, 64 KiB. A subcore's memory (256 KiB or more) holds two such
chunks at a time, and what is made of them."""
LONGEST = MOST_WORDS // LEAST_ROWS
"""The most words of a row that a subcore reads, sums or rounds at once."""


def has_sparse_cores(device: Any) -> bool:
    """Return whether a device (or a mesh's abstract one) has SparseCores that Pallas can program.

    Args:
      device: anything with a `device_kind`, or None.
    """
    return getattr(device, "device_kind", None) in KINDS


def here() -> bool:
    """Return whether the mesh of the `shard_map` that is being traced consists of such devices."""
    return has_sparse_cores(jax.sharding.get_abstract_mesh().abstract_device)


def gather_rows(table: Array, row_ids: Array) -> Array:
    """Return `table[row_ids]`, zeros where a row is absent; see `reference.gather_rows`.

    Args:
      table: `[R, W]`, W a multiple of `WORDS`, or `[R]`; of a 32-bit dtype.
      row_ids: integer `[N]`.

    Returns:
      `[N, W]`, or `[N]`.
    """
    # Rows [R, W] are cut into k pieces each, [R * k, W / k], and row r is pieces r * k … r * k +
    # k - 1. k is 1 but for very long rows. The numbers are padded to whole chunks.
    pieces, numbers = _pieces(table), _piece_numbers(table, row_ids)
    chunk = _rows_at_a_time(numbers.shape[0], pieces.shape[1:])
    ids = _padded(numbers, chunk, PADDING_ID)
    if not ids.shape[0]:
        return jnp.zeros((0, *table.shape[1:]), table.dtype)

    def kernel(pieces, ids, found):
        def one_chunk(ids, found):
            _zero_where_absent(ids, found)
            _read_present(pieces, ids, found)

        _over_chunks(one_chunk, ids, inputs=(ids,), outputs=(found,), chunk=chunk)

    shape = jax.ShapeDtypeStruct((*ids.shape, *pieces.shape[1:]), table.dtype)
    size = 2 * shape.size * shape.dtype.itemsize
    found = on_subcores(kernel, "gather_rows", size, shape, layouts=True)(pieces, ids)
    # The padding is cut off, and the pieces of a row are joined again: [N * k, W / k] -> [N, W].
    return found[: numbers.shape[0]].reshape(*row_ids.shape, *table.shape[1:])


def set_rows(table: Array, row_ids: Array, values: Array) -> Array:
    """Return `table` with `values` at `row_ids`, in its memory; see `reference.set_rows`.

    Args:
      table: `[R, W]`, W a multiple of `WORDS`, or `[R]`; of a 32-bit dtype.
      row_ids: integer `[U]`; present rows are all different.
      values: `[U, W]`, or `[U]`, the table's dtype.
    """
    # Pieces as in `gather_rows`; the values are cut and padded like the row numbers.
    pieces, numbers = _pieces(table), _piece_numbers(table, row_ids)
    chunk = _rows_at_a_time(numbers.shape[0], pieces.shape[1:])
    ids = _padded(numbers, chunk, PADDING_ID)
    if not ids.shape[0]:
        return table
    given = _padded(values.reshape(*numbers.shape, *pieces.shape[1:]), chunk, 0)

    def kernel(pieces, ids, given):
        def one_chunk(ids, given):
            _write_present(given, ids, pieces)

        _over_chunks(one_chunk, ids, inputs=(ids, given), outputs=(), chunk=chunk)

    # A ref is memory that a kernel may write to: this way the table is updated in place.
    written = jax.new_ref(pieces)
    size = 2 * given.size * given.dtype.itemsize
    on_subcores(kernel, "set_rows", size, (), layouts=True)(written, ids, given)
    return jax.freeze(written).reshape(table.shape)


def _read_present(table, ids, found) -> None:
    """Copy rows of the table into the subcore's memory, by one indirect DMA."""
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas import tpu_sc as plsc

    pltpu.sync_copy(table.at[plsc.Indices(ids, ignored_value=PADDING_ID)], found)


def _write_present(given, ids, table) -> None:
    """Copy rows from the subcore's memory into the table, by one indirect DMA."""
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas import tpu_sc as plsc

    pltpu.sync_copy(given, table.at[plsc.Indices(ids, ignored_value=PADDING_ID)])


def _pieces(table: Array) -> Array:
    """Return the table; if its rows are too long for a subcore's memory, cut into equal pieces."""
    cuts = _cuts(table)
    return table if cuts == 1 else table.reshape(-1, table.shape[1] // cuts)


def _cuts(table: Array) -> int:
    """Return the number of pieces per row, of which `LEAST_ROWS` fit one DMA."""
    return 1 if table.ndim == 1 else count_pieces(table.shape[1], LONGEST)


def count_pieces(words: int, longest: int) -> int:
    """Return the smallest number of equal pieces of a row, of whole vectors, that are short enough.

    Example:
      >>> count_pieces(1536, longest=1024)
      2
    """
    vectors = words // WORDS
    return next(
        n for n in range(1, vectors + 1) if vectors % n == 0 and words // n <= longest
    )


def _piece_numbers(table: Array, row_ids: Array) -> Array:
    """Return the piece numbers of all rows, int32 `[N * cuts]`; `PADDING_ID` for absent rows."""
    cuts = _cuts(table)
    present = (row_ids >= 0) & (row_ids < table.shape[0])
    ids = jnp.where(present, row_ids, PADDING_ID).astype(jnp.int32)
    if cuts == 1:
        return ids
    # Rows (4, absent) in 2 pieces: [[8, 9], [-1, -1]], then (8, 9, -1, -1).
    pieces = ids[:, None] * cuts + jnp.arange(cuts, dtype=jnp.int32)[None]
    return jnp.where(present[:, None], pieces, PADDING_ID).reshape(-1)


def _rows_at_a_time(n: int, row: tuple[int, ...]) -> int:
    """Return how many rows one DMA moves, a power of two from `LEAST_ROWS` to `_MOST_ROWS`.

    Args:
      n: the number of rows in all.
      row: the shape of one row, `(words,)` or `()`.
    """
    # The largest chunk that the memory holds and n needs; then a smaller one if that divides n, so
    # that nothing has to be padded: 96 rows are moved as 3 chunks of 32, not as one of 128.
    most = _MOST_ROWS
    while most > LEAST_ROWS and (
        most // 2 >= n or (row and most * row[0] > MOST_WORDS)
    ):
        most //= 2
    chunk = most
    while n % chunk and chunk > LEAST_ROWS:
        chunk //= 2
    return most if n % chunk else chunk


def _padded(x: Array, chunk: int, value: int) -> Array:
    """Return an array whose first axis is padded with `value` to a multiple of `chunk`."""
    missing = -x.shape[0] % chunk
    if not missing:
        return x
    return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1), constant_values=value)


def on_subcores(
    kernel: Callable[..., None],
    name: str,
    size: int,
    out_type: Any,
    *,
    layouts: bool = False,
) -> Callable[..., Any]:
    """Return a function of arrays that runs the kernel on all vector subcores of the device.

    Args:
      kernel: takes a ref for every operand and result.
      name: the kernel's name in profiles.
      size: the bytes that are read and written; the compiler schedules other work for that time.
      out_type: shapes and dtypes of its results; (): it writes to its operands.
      layouts: whether vectors get their layouts from the compiler. Without these passes a loop may
        carry vectors, such as running sums.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas import tpu_sc as plsc

    # Both are named, since the defaults of JAX have changed. Rows are packed, not in the tiles of
    # TensorCores.
    params = pltpu.CompilerParams(
        use_tc_tiling_on_sc=False, needs_layout_passes=layouts
    )
    return pl.kernel(
        kernel,
        out_type=out_type,
        mesh=plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore"),
        name=name,
        compiler_params=params,
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=size),
    )


def _over_chunks(
    one_chunk: Callable[..., None], ids, *, inputs: tuple, outputs: tuple, chunk: int
) -> None:
    """Call `one_chunk` for every chunk of the arrays' first axis, divided among the subcores.

    Args:
      one_chunk: takes one chunk of every input and output.
      ids: the row numbers, whose length is a multiple of `chunk`.
      inputs: refs that are read.
      outputs: refs that are written.
      chunk: rows per chunk.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    # Chunk i of an array [n, …] is the block (i, 0, …) of shape [chunk, …].
    def blocks(arrays):
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


def _zero_where_absent(ids, found) -> None:
    """Fill a chunk with zeros if one of its rows is absent, because the DMA skips that row."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu_sc as plsc

    # A subcore computes on vectors of `lanes` numbers. Take the minimum of the row numbers over all
    # vectors, then over the lanes of the result: below 0 means that some row is absent.
    lanes = plsc.get_sparse_core_info().num_lanes
    least = ids[pl.ds(0, lanes)]
    for start in range(lanes, ids.shape[0], lanes):
        least = jnp.minimum(least, ids[pl.ds(start, lanes)])

    @pl.when(functools.reduce(jnp.minimum, [least[i] for i in range(lanes)]) < 0)
    def _():
        zeros = jnp.zeros(lanes, found.dtype)

        @pl.loop(0, found.shape[0] if found.ndim > 1 else found.shape[0] // lanes)
        def _(i):
            if found.ndim == 1:
                found[pl.ds(i * lanes, lanes)] = zeros
            else:
                for start in range(0, found.shape[1], lanes):
                    found[i, pl.ds(start, lanes)] = zeros

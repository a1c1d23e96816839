"""Sum rows with a TPU's SparseCores: one Pallas kernel that gathers, weights and adds.

A sum is a segment: a run of entries that each name a row. Every vector subcore of the device (a
worker) takes whole segments, so no two workers write the same sum, and each sum is added in the
order of its entries. A worker goes through its entries in chunks:

1. Copy the chunk's row numbers, segments and weights into the subcore's memory.
2. Fetch its rows by one indirect DMA (a copy whose addresses come from a list).
3. Add row by row. The running sum stays in vector registers and is stored after every row; where a
   segment starts, it restarts at zero.
4. Write the running sums of each segment's last entries to the result, by one indirect DMA.

While one chunk is added, the next one is fetched. A segment that goes on in the next chunk is
written at the end of both: the first time unfinished, then, after that copy has ended, finished.

Pallas cannot interpret the indirect DMA on a CPU, so this kernel has been compiled for every chip
in `sparsecore.KINDS` and interpreted with plain copies, but has not run on a TPU.

Input: rows of 32-bit words, and for every entry a row number, a segment and, if wanted, a weight.
Output: one float32 row per segment, or its numbers rounded to bfloat16, two to a word.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.kernels import reference
from tpu_embed.kernels import sparsecore_subcore as subcore
from tpu_embed.kernels.formats import RowFormat
from tpu_embed.kernels.operands import RowsToSum, SumLayout
from tpu_embed.kernels.sparsecore import (
    LEAST_ROWS,
    LONGEST,
    MOST_WORDS,
    WORDS,
    count_pieces,
    on_subcores,
)

_MOST_ENTRIES = 128
"""The most entries of a chunk, whose sums have at most `MOST_WORDS` words: a subcore's memory holds
two chunks, and where rows or sums are bfloat16 also these, half as many words."""


def sum_rows(rows: RowsToSum, layout: SumLayout) -> tuple[Array, ...]:
    """Return what `reference.gather_sum` does."""
    sums = gather_sum(**_operands(rows, layout))[:, : rows.source.shape[1]]
    return reference.by_feature(sums, layout)


def sum_rounded_rows(rows: RowsToSum, layout: SumLayout, sent: RowFormat) -> Array:
    """Return what `rounded.gather_sum` does."""
    return rounded_gather_sum(**_operands(rows, layout), row_format=sent)


def _operands(rows: RowsToSum, layout: SumLayout) -> dict[str, Any]:
    """Return the arguments of `gather_sum`, by name."""
    source, packed = rows.source, rows.packed
    if packed is None:
        dtype = jnp.dtype(jnp.bfloat16 if source.dtype == jnp.uint16 else source.dtype)
        row_format = RowFormat(source.shape[1:], dtype, "words")
        packed = row_format.pack(source)
    return {
        "source": packed,
        # Numbers of 64 bits that are outside of the source stay outside of it in 32.
        "index": jnp.clip(rows.index, -1, source.shape[0]).astype(jnp.int32),
        "segments": rows.segments.astype(jnp.int32),
        "num_segments": sum(layout.bags),
        "weights": None if rows.weights is None else rows.weights.astype(jnp.float32),
        "filled": layout.filled,
    }


def gather_sum(
    source: Array,
    index: Array,
    segments: Array,
    num_segments: int,
    *,
    weights: Array | None = None,
    filled: bool = True,
) -> Array:
    """Return weighted sums of rows; see `reference.gather_sum`.

    A sum starts at +0 and adds its entries in their order. Products and sums are rounded one by
    one.

    Args:
      source: float32 `[R, W]`, W a multiple of `sparsecore.WORDS`; or uint32 `[R, W]`, rows of
        bfloat16 packed by `RowFormat.pack`.
      index: int32 `[N]`, rows of `source`; those outside of it are absent and add nothing.
      segments: int32 `[N]`, the sum of each entry, non-decreasing; entries with `num_segments` or
        more are left out.
      num_segments: the number n of sums.
      weights: float32 `[N]`; None: all ones.
      filled: whether sums of no entries are zeros; False: they are whatever the memory holds.

    Returns:
      float32 `[n, W]`; for packed rows `[n, 2 W]`, the columns of the lower halves first.
    """
    halves = 2 if source.dtype == jnp.uint32 else 1
    width = source.shape[1] * halves
    if not (num_segments and index.shape[0] and source.shape[0]):
        return jnp.zeros((num_segments, width), jnp.float32)
    cuts = count_pieces(source.shape[1], LONGEST // halves)
    result = jax.ShapeDtypeStruct((num_segments, width // cuts), jnp.float32)
    bounds = worker_bounds(segments, _workers_here(), num_segments)
    entries = [index, segments] if weights is None else [index, segments, weights]
    # Row r of [R, W] is pieces r * k … r * k + k - 1 of [R * k, W / k]; k is 1 but for very long
    # rows. Every piece is summed by a kernel of its own.
    pieces = source.reshape(source.shape[0] * cuts, -1)
    if cuts == 1:
        return _sum_pieces(pieces, bounds, entries, result, filled)
    present = (index >= 0) & (index < source.shape[0])
    parts = []
    for piece in range(cuts):
        numbers = jnp.where(present, index * cuts + piece, PADDING_ID)
        parts.append(
            _sum_pieces(pieces, bounds, [numbers, *entries[1:]], result, filled)
        )
    # k sums [n, 2 W / k] of packed rows: [n, k, 2, W / k] -> [n, 2, k, W / k] -> [n, 2 W].
    joined = jnp.stack(parts, axis=1).reshape(num_segments, cuts, halves, -1)
    return jnp.swapaxes(joined, 1, 2).reshape(num_segments, width)


def rounded_gather_sum(
    source: Array,
    index: Array,
    segments: Array,
    row_format: RowFormat,
    num_segments: int,
    *,
    weights: Array | None = None,
    filled: bool = True,
) -> Array:
    """Return the sums of `gather_sum`, rounded to bfloat16 and packed.

    Args:
      source: float32 `[R, W]`, W a multiple of `sparsecore.WORDS`, at most `LONGEST`.
      index, segments, num_segments, weights, filled: as for `gather_sum`.
      row_format: how the sums are packed.

    Returns:
      uint32 `[n, words]`, as `row_format.pack` packs them.
    """
    result = jax.ShapeDtypeStruct((num_segments, row_format.words), jnp.uint32)
    if not (num_segments and index.shape[0] and source.shape[0]):
        return jnp.zeros(result.shape, result.dtype)
    bounds = worker_bounds(segments, _workers_here(), num_segments)
    entries = [index, segments] if weights is None else [index, segments, weights]
    return _sum_pieces(source, bounds, entries, result, filled, row_format.shape[0])


def worker_bounds(segments: Array, workers: int, num_segments: int) -> Array:
    """Return where the entries of each worker start and end.

    The entries that are not left out are divided into equal shares, one per worker. A segment
    belongs to the worker in whose share it starts: worker w sums the entries bounds[w] to
    bounds[w + 1] - 1.

    Args:
      segments: int32 `[N]`, non-decreasing, not negative.
      workers: the device's number of workers.
      num_segments: the number of sums.

    Returns:
      int32 `[workers + WORDS]`, a whole number of DMA units. From `workers` on, all are the number
      of entries that are not left out.

    Example:
      >>> worker_bounds(jnp.array([0, 0, 0, 1, 2, 2, 9, 9]), workers=2, num_segments=3)[:4].tolist()
      [0, 3, 6, 6]
    """
    # A TensorCore compares and counts 1024 numbers at a time, but searches and indexes one by one.
    # So it passes over all entries for every worker.
    kept = jnp.sum(segments < num_segments, dtype=jnp.int32)
    numbers = jnp.arange(workers + WORDS, dtype=jnp.int32)
    # The last entry before each share. 6 entries for 2 workers are shares of 3: (-, 2, 5, 5, …).
    length = (kept + workers - 1) // workers
    last = segments[jnp.maximum(jnp.minimum(numbers * length, kept) - 1, 0)]
    # Below worker 0's bound there is no segment. If nothing is kept, `last` is left out too.
    last = jnp.where(numbers == 0, PADDING_ID, jnp.minimum(last, num_segments - 1))
    return jnp.sum(segments[None] <= last[:, None], axis=1, dtype=jnp.int32)


def _workers_here() -> int:
    """Return the number of workers of the devices that are being traced for."""
    info = plsc.get_sparse_core_info()
    return info.num_cores * info.num_subcores


def _entries_at_a_time(width: int) -> int:
    """Return the entries of a chunk whose sums are `width` words each, a power of two."""
    chunk = _MOST_ENTRIES
    while chunk > LEAST_ROWS and chunk * width > MOST_WORDS:
        chunk //= 2
    return chunk


def _sum_pieces(
    source: Array,
    bounds: Array,
    entries: list[Array],
    result: jax.ShapeDtypeStruct,
    filled: bool,
    dim: int = 0,
) -> Array:
    """Run the kernel on rows that are short enough.

    Args:
      source: `[R, W]`.
      bounds: int32 `[workers + WORDS]`.
      entries: row numbers, segments and, if wanted, weights, `[N]` each.
      result: shape and dtype of the sums.
      filled: whether sums of no entries are zeros.
      dim: D, the numbers of a rounded sum that count.
    """
    chunk = _entries_at_a_time(max(source.shape[1], result.shape[1]))
    # Padded to whole chunks. No worker's bounds include the padding.
    entries = [
        jnp.pad(x, (0, -x.shape[0] % chunk)) if x.shape[0] % chunk else x
        for x in entries
    ]

    def kernel(source, bounds, *refs):
        *entries, out = refs
        _sum_entries(bounds, source, entries, out, chunk, dim)

    fetched = entries[0].shape[0] * source.shape[1]
    size = 4 * (fetched + sum(x.shape[0] for x in entries) + result.size)
    if not filled:
        return on_subcores(kernel, "gather_sum", size, result)(source, bounds, *entries)
    # A ref is memory that a kernel may write to; sums of no entries keep its zeros. `run_state`
    # hides the ref from the rules for derivatives, which know none. The zeros are made of bounds[0]
    # (which is 0): kernels would share a constant, and XLA would copy it for each, very slowly.
    run = on_subcores(kernel, "gather_sum", size, ())
    zeros = jnp.full(result.shape, bounds[0].astype(result.dtype))
    return pl.run_state(lambda out: run(source, bounds, *entries, out))(zeros)


def _sum_entries(
    bounds, source, entries: Sequence[Any], out, chunk: int, dim: int = 0
) -> None:
    """Sum the segments of this worker.

    Args:
      bounds: int32 `[n]`, n > the number of workers; worker w has the entries bounds[w] to
        bounds[w + 1] - 1.
      source: `[R, W]` float32, or uint32 with two numbers of bfloat16 to a word.
      entries: row numbers and segments, int32 `[N]`, and weights, float32 `[N]`, if there are any;
        N is a multiple of `chunk`.
      out: float32 `[n, width]`, the sums; those of no entries are not written. Or uint32
        `[n, words]`: the sums of float32 rows, rounded to bfloat16, two to a word.
      chunk: how many entries are summed at a time.
      dim: D, the numbers of a rounded sum that count.
    """

    def with_refs(refs):
        memory = _Memory(**refs, dim=dim)
        pltpu.sync_copy(bounds, memory.bounds)

        def one_worker(worker):
            near = memory.bounds[pl.ds(worker, memory.lanes)]
            _sum_range(_Work(memory, source, tuple(entries), out, near[0], near[1]))

        subcore.on_each_worker(one_worker)

    others: dict[str, Any] = {"absent": ((chunk,), jnp.int32)}
    if out.dtype == jnp.uint32:
        others["sums"] = ((2, chunk, out.shape[1]), out.dtype)
    if len(entries) > 2:
        others |= {
            "weights": ((chunk,), jnp.float32),
            "factors": ((2, chunk), jnp.float32),
        }
    subcore.with_memory(with_refs, bounds, source, chunk, **others)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Memory(subcore.SumMemory):
    """What a worker keeps in its subcore's memory: refs.

    Attributes:
      weights: float32 `[chunk]`, or None.
      absent: int32 `[chunk]`, 1 where an entry of this worker has an absent row.
    """

    absent: Any
    weights: Any = None


@dataclasses.dataclass(frozen=True)
class _Work:
    """What a worker has to do.

    Attributes:
      memory: its own memory.
      source: the rows.
      entries: row numbers, segments and, if there are any, weights.
      out: the sums.
      begin: its first entry, where a segment starts.
      end: the entry behind its last one.
    """

    memory: _Memory
    source: Any
    entries: tuple[Any, ...]
    out: Any
    begin: Any
    end: Any


def _sum_range(work: _Work) -> None:
    """Sum the entries of a worker, chunk by chunk."""
    # Entries 100 to 299 in chunks of 128 are parts of the 3 chunks 0, 1 and 2.
    memory, chunk = work.memory, work.memory.chunk
    first = work.begin // chunk
    chunks = jnp.where(
        work.end > work.begin, (work.end + chunk - 1) // chunk - first, 0
    )

    @pl.when(chunks > 0)
    def _():
        for copy in _number_copies(work, first):
            copy.start()
        _prepare(work, first, 0, more=chunks > 1)

        @pl.loop(0, chunks)
        def _(k):
            slot = k & 1

            # Also before the next write: a segment that both chunks write to must end finished.
            @pl.when(k > 0)
            def _():
                _write(work, 1 - slot).wait()

            @pl.when(k + 1 < chunks)
            def _():
                _prepare(work, first + k + 1, 1 - slot, more=k + 2 < chunks)

            _fetch(work, slot).wait()
            subcore.sum_chunk(memory, slot)
            _write(work, slot).start()

        _write(work, (chunks - 1) & 1).wait()


def _prepare(work: _Work, number, slot, *, more) -> None:
    """Start to fetch the rows of a chunk, and then the numbers of the next chunk.

    Args:
      work: the work; the copies of the chunk's numbers were started.
      number: the chunk's number.
      slot: which half of the memory it uses.
      more: whether there is a next chunk.
    """
    for copy in _number_copies(work, number):
        copy.wait()
    _mark(work, number * work.memory.chunk, slot)
    _fetch(work, slot).start()

    @pl.when(more)
    def _():
        for copy in _number_copies(work, number + 1):
            copy.start()


def _mark(work: _Work, offset, slot) -> None:
    """Work out, for every entry of a chunk, what to fetch, where to restart and what to write.

    Args:
      work: the work, with the chunk's numbers in memory.
      offset: the chunk's first entry.
      slot: which half of the memory the chunk uses.
    """
    # Row numbers (4, 7, -1, 2) of segments (3, 3, 3, 5): fetch (4, 7, none, 2), restart at
    # (1, 0, 0, 1), absent (0, 0, 1, 0), write to (none, none, 3, 5): each chunk's last entry is
    # written, whether its segment ends there or not.
    memory, lanes, chunk = work.memory, work.memory.lanes, work.memory.chunk
    zeros = jnp.zeros(lanes, jnp.int32)
    nothing, some = zeros + PADDING_ID, zeros
    for start in range(0, chunk, lanes):
        here, lane = pl.ds(start, lanes), start + jax.lax.iota(jnp.int32, lanes)
        before, segment, after = (
            memory.segments[pl.ds(lanes + start + step, lanes)] for step in (-1, 0, 1)
        )
        row, entry = memory.index[here], offset + lane
        own = (entry >= work.begin) & (entry < work.end)
        present = own & (row >= 0) & (row < work.source.shape[0])
        if memory.weights is not None:
            weights = memory.weights[here]
            present = present & (weights != 0)
            memory.factors[slot, here] = jnp.where(
                present, weights, jnp.zeros_like(weights)
            )
        closes = (
            own
            & ((lane == chunk - 1) | (segment != after))
            & (segment < work.out.shape[0])
        )
        absent = jnp.where(own & ~present, zeros + 1, zeros)
        some = some | absent
        memory.absent[here] = absent
        memory.ids[slot, here] = jnp.where(present, row, nothing)
        opens = (entry == work.begin) | (segment != before)
        memory.starts[slot, here] = jnp.where(opens, zeros + 1, zeros)
        memory.targets[slot, here] = jnp.where(closes, segment, nothing)
    # What the next chunk's first entry compares its segment with.
    memory.segments[pl.ds(0, lanes)] = memory.segments[pl.ds(chunk, lanes)]

    @pl.when(functools.reduce(jnp.bitwise_or, [some[j] for j in range(lanes)]) != 0)
    def _():
        _zero_absent(memory, slot)


def _zero_absent(memory: _Memory, slot) -> None:
    """Fill the rows of absent entries with zeros, because no DMA writes them."""
    lanes = memory.lanes

    @pl.loop(0, memory.chunk // lanes)
    def _(vector):
        absent = memory.absent[pl.ds(vector * lanes, lanes)]
        for j in range(lanes):

            @pl.when(absent[j] != 0)
            def _(i=vector * lanes + j):
                @pl.loop(0, memory.rows.shape[2] // lanes)
                def _(part):
                    here = pl.ds(part * lanes, lanes)
                    memory.rows[slot, i, here] = jnp.zeros(lanes, memory.rows.dtype)


# -- what a test replaces to run a worker on a CPU -------------------------------------------------


def _number_copies(work: _Work, number) -> list[Any]:
    """Return the copies, not started, of a chunk's numbers into the worker's memory."""
    memory, chunk = work.memory, work.memory.chunk
    here = pl.ds(number * chunk, chunk)
    targets = (
        memory.index,
        memory.segments.at[pl.ds(memory.lanes, chunk)],
        memory.weights,
    )
    pairs = zip(work.entries, targets, strict=False)  # there may be no weights
    return [
        pltpu.make_async_copy(x.at[here], target, memory.arrived) for x, target in pairs
    ]


def _fetch(work: _Work, slot):
    """Return the indirect DMA, not started, that fetches a chunk's rows."""
    memory = work.memory
    rows = plsc.Indices(memory.ids.at[slot], ignored_value=PADDING_ID)
    done = memory.fetched.at[slot]
    return pltpu.make_async_copy(work.source.at[rows], memory.rows.at[slot], done)


def _write(work: _Work, slot):
    """Return the indirect DMA, not started, that writes a chunk's finished sums."""
    memory = work.memory
    targets = plsc.Indices(memory.targets.at[slot], ignored_value=PADDING_ID)
    done = memory.written.at[slot]
    return pltpu.make_async_copy(memory.sums.at[slot], work.out.at[targets], done)

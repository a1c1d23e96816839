"""What one vector subcore of a SparseCore (a worker) does to sum rows; see `sparsecore_sums.py`.

It goes through its entries in chunks. While the rows of one chunk are added, those of the next are
fetched, into the other half of a memory for two.

Input: refs to rows, row numbers, segments and weights in the device's memory. Output: the sums of
the worker's segments, in that memory too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpu_embed._types import PADDING_ID
from tpu_embed.kernels import sparsecore_subcore as subcore


def run(
    bounds: Any, source: Any, entries: Sequence[Any], out: Any, chunk: int, dim: int = 0
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
    from jax.experimental import pallas as pl

    def with_refs(refs: dict[str, Any]) -> None:
        memory = _Memory(**refs, dim=dim)
        subcore.copy_now(bounds, memory.bounds)

        def one_worker(worker: Any) -> None:
            near = memory.bounds[pl.ds(worker, memory.lanes)]
            _sum_range(_Work(memory, source, tuple(entries), out, near[0], near[1]))

        subcore.on_each_worker(one_worker)

    others: dict[str, Any] = {"absent": ((chunk,), jnp.int32)}
    if out.dtype == jnp.uint32:
        others["sums"] = ((2, chunk, out.shape[1]), out.dtype)
    if len(entries) > 2:
        others |= {"weights": ((chunk,), jnp.float32), "factors": ((2, chunk), jnp.float32)}
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
    from jax.experimental import pallas as pl

    # Entries 100 to 299 in chunks of 128 are parts of the 3 chunks 0, 1 and 2.
    memory, chunk = work.memory, work.memory.chunk
    first = work.begin // chunk
    chunks = jnp.where(work.end > work.begin, (work.end + chunk - 1) // chunk - first, 0)

    @pl.when(chunks > 0)
    def _() -> None:
        for copy in _number_copies(work, first):
            copy.start()
        _prepare(work, first, 0, more=chunks > 1)

        @pl.loop(0, chunks)
        def _(k: Any) -> None:
            slot = k & 1

            # Also before the next write: a segment that both chunks write to must end finished.
            @pl.when(k > 0)
            def _() -> None:
                _write(work, 1 - slot).wait()

            @pl.when(k + 1 < chunks)
            def _() -> None:
                _prepare(work, first + k + 1, 1 - slot, more=k + 2 < chunks)

            _fetch(work, slot).wait()
            subcore.sum_chunk(memory, slot)
            _write(work, slot).start()

        _write(work, (chunks - 1) & 1).wait()


def _prepare(work: _Work, number: Any, slot: Any, *, more: Any) -> None:
    """Start to fetch the rows of a chunk, and then the numbers of the next chunk.

    Args:
      work: the work; the copies of the chunk's numbers were started.
      number: the chunk's number.
      slot: which half of the memory it uses.
      more: whether there is a next chunk.
    """
    from jax.experimental import pallas as pl

    for copy in _number_copies(work, number):
        copy.wait()
    _mark(work, number * work.memory.chunk, slot)
    _fetch(work, slot).start()

    @pl.when(more)
    def _() -> None:
        for copy in _number_copies(work, number + 1):
            copy.start()


def _mark(work: _Work, offset: Any, slot: Any) -> None:
    """Work out, for every entry of a chunk, what to fetch, where to restart and what to write.

    Args:
      work: the work, with the chunk's numbers in memory.
      offset: the chunk's first entry.
      slot: which half of the memory the chunk uses.
    """
    from jax.experimental import pallas as pl

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
            memory.factors[slot, here] = jnp.where(present, weights, jnp.zeros_like(weights))
        closes = own & ((lane == chunk - 1) | (segment != after)) & (segment < work.out.shape[0])
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
    def _() -> None:
        _zero_absent(memory, slot)


def _zero_absent(memory: _Memory, slot: Any) -> None:
    """Fill the rows of absent entries with zeros, because no DMA writes them."""
    from jax.experimental import pallas as pl

    lanes = memory.lanes

    @pl.loop(0, memory.chunk // lanes)
    def _(vector: Any) -> None:
        absent = memory.absent[pl.ds(vector * lanes, lanes)]
        for j in range(lanes):

            @pl.when(absent[j] != 0)
            def _(i: Any = vector * lanes + j) -> None:
                @pl.loop(0, memory.rows.shape[2] // lanes)
                def _(part: Any) -> None:
                    here = pl.ds(part * lanes, lanes)
                    memory.rows[slot, i, here] = jnp.zeros(lanes, memory.rows.dtype)


# -- what a test replaces to run a worker on a CPU -------------------------------------------------


def _number_copies(work: _Work, number: Any) -> list[Any]:
    """Return the copies, not started, of a chunk's numbers into the worker's memory."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    memory, chunk = work.memory, work.memory.chunk
    here = pl.ds(number * chunk, chunk)
    targets = memory.index, memory.segments.at[pl.ds(memory.lanes, chunk)], memory.weights
    pairs = zip(work.entries, targets, strict=False)  # there may be no weights
    return [pltpu.make_async_copy(x.at[here], target, memory.arrived) for x, target in pairs]


def _fetch(work: _Work, slot: Any) -> Any:
    """Return the indirect DMA, not started, that fetches a chunk's rows."""
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas import tpu_sc as plsc

    memory = work.memory
    rows = plsc.Indices(memory.ids.at[slot], ignored_value=PADDING_ID)
    done = memory.fetched.at[slot]
    return pltpu.make_async_copy(work.source.at[rows], memory.rows.at[slot], done)


def _write(work: _Work, slot: Any) -> Any:
    """Return the indirect DMA, not started, that writes a chunk's finished sums."""
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas import tpu_sc as plsc

    memory = work.memory
    targets = plsc.Indices(memory.targets.at[slot], ignored_value=PADDING_ID)
    done = memory.written.at[slot]
    return pltpu.make_async_copy(memory.sums.at[slot], work.out.at[targets], done)

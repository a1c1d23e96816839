"""What one vector subcore of a SparseCore (a worker) does to sum rows; see `sparsecore_sums.py`.

It goes through its entries in chunks. While the rows of one chunk are added, those of the next are
fetched, into the other half of a memory for two.

Input: refs to rows, row numbers, segments and weights in the device's memory. Output: the sums of
the worker's segments, in that memory too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpu_embed._types import PADDING_ID
from tpu_embed.kernels import sparsecore_subcore as subcore


def run(bounds: Any, source: Any, entries: Sequence[Any], out: Any, chunk: int) -> None:
    """Sum the segments of this worker.

    Args:
      bounds: int32 `[n]`, n > the number of workers; worker w has the entries bounds[w] to
        bounds[w + 1] - 1.
      source: `[R, W]` float32, or uint32 with two numbers of bfloat16 to a word.
      entries: row numbers and segments, int32 `[N]`, and weights, float32 `[N]`, if there are any;
        N is a multiple of `chunk`.
      out: float32 `[n, width]`, the sums; those of no entries are not written.
      chunk: how many entries are summed at a time.
    """
    from jax.experimental import pallas as pl

    def with_memory(memory: _Memory) -> None:
        subcore.copy_now(bounds, memory.bounds)

        def one_worker(worker: Any) -> None:
            near = memory.bounds[pl.ds(worker, memory.lanes)]
            _sum_range(_Work(memory, source, tuple(entries), out, near[0], near[1]))

        subcore.on_each_worker(one_worker)

    _allocate(with_memory, bounds, source, out, chunk, weighted=len(entries) > 2)


@dataclasses.dataclass(frozen=True)
class _Memory:
    """What a worker keeps in its subcore's memory: refs.

    Attributes:
      bounds: int32 `[workers + WORDS]`.
      index: int32 `[chunk]`, row numbers as they are given.
      segments: int32 `[lanes + chunk + lanes]`: the end of the chunk before, then the chunk.
      weights: float32 `[chunk]`, or None.
      absent: int32 `[chunk]`, 1 where an entry of this worker has an absent row.
      ids: int32 `[2, chunk]`, row numbers to fetch, `PADDING_ID` for none. The 2 are this chunk and
        the next, alternately, here and below.
      starts: int32 `[2, chunk]`, 1 where a segment starts.
      targets: int32 `[2, chunk]`, the segment that a running sum is written to, or `PADDING_ID`.
      factors: float32 `[2, chunk]`, the weights, zero for absent rows; or None.
      rows: `[2, chunk, W]`, fetched rows.
      sums: float32 `[2, chunk, width]`, running sums; the memory of `rows` unless these are packed.
      running: float32 `[width]`, the running sum at the end of the chunk before.
      arrived: semaphore of `index`, `segments` and `weights`.
      fetched: semaphores `[2]` of `rows`.
      written: semaphores `[2]` of `sums`.
    """

    bounds: Any
    index: Any
    segments: Any
    absent: Any
    ids: Any
    starts: Any
    targets: Any
    rows: Any
    sums: Any
    running: Any
    arrived: Any
    fetched: Any
    written: Any
    weights: Any = None
    factors: Any = None

    @property
    def chunk(self) -> int:
        """The entries of a chunk."""
        return self.ids.shape[1]

    @property
    def lanes(self) -> int:
        """The numbers of a vector."""
        return (self.segments.shape[0] - self.chunk) // 2

    @property
    def packed(self) -> bool:
        """Whether the rows are bfloat16, two to a word."""
        return self.sums is not self.rows


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


def _allocate(
    run: Callable[[_Memory], None],
    bounds: Any,
    source: Any,
    out: Any,
    chunk: int,
    *,
    weighted: bool,
) -> None:
    """Call `run` with a worker's memory."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas import tpu_sc as plsc

    vmem, dma, int32, float32 = pltpu.VMEM, pltpu.SemaphoreType.DMA, jnp.int32, jnp.float32
    lanes, width = plsc.get_sparse_core_info().num_lanes, out.shape[1]
    kinds = {
        "bounds": vmem(bounds.shape, int32),
        "index": vmem((chunk,), int32),
        "segments": vmem((lanes + chunk + lanes,), int32),
        "absent": vmem((chunk,), int32),
        "ids": vmem((2, chunk), int32),
        "starts": vmem((2, chunk), int32),
        "targets": vmem((2, chunk), int32),
        "rows": vmem((2, chunk, source.shape[1]), source.dtype),
        "running": vmem((width,), float32),
        "arrived": dma(()),
        "fetched": dma((2,)),
        "written": dma((2,)),
    }
    if weighted:
        kinds |= {"weights": vmem((chunk,), float32), "factors": vmem((2, chunk), float32)}
    if source.dtype == jnp.uint32:
        kinds["sums"] = vmem((2, chunk, width), float32)
    pl.run_scoped(lambda **refs: run(_Memory(**({"sums": refs["rows"]} | refs))), **kinds)


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
        closes = own & ((lane == chunk - 1) | (segment != after)) & (segment < work.out.shape[0])
        absent = jnp.where(own & ~present, zeros + 1, zeros)
        some = some | absent
        memory.absent[here] = absent
        memory.ids[slot, here] = jnp.where(present, row, nothing)
        opens = (entry == work.begin) | (segment != before)
        memory.starts[slot, here] = jnp.where(opens, zeros + 1, zeros)
        memory.targets[slot, here] = jnp.where(closes, segment, nothing)
        if memory.weights is not None:
            weights = memory.weights[here]
            memory.factors[slot, here] = jnp.where(present, weights, jnp.zeros_like(weights))
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

"""What the programs of a SparseCore's vector subcores share: running sums, and where they run.

Input: fetched rows in a subcore's memory. Output: the running sums of their segments, in its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_IN_REGISTERS = 64
"""The columns whose running sums are held in registers at a time, 8 vectors of 8. With 16 the loop
takes as many instructions a row (one more or less), but twice as long to compile."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SumMemory:
    """What a worker keeps in its subcore's memory to sum rows: refs.

    Attributes:
      bounds: int32 `[workers + WORDS]`.
      index: int32 `[chunk]`, row numbers as they are given.
      segments: int32 `[lanes + chunk + lanes]`: the end of the chunk before, the chunk, and the
        beginning of the chunk after it.
      ids: int32 `[2, chunk]`, row numbers to fetch, `PADDING_ID` for none. The 2 are this chunk and
        the next, alternately, here and below.
      starts: int32 `[2, chunk]`, 1 where a segment starts.
      targets: int32 `[2, chunk]`, where what ends there is written to, or `PADDING_ID`.
      factors: float32 `[2, chunk]`, what each row is multiplied with; or None.
      rows: `[2, chunk, W]`, fetched rows: float32, or uint32 with two numbers of bfloat16 each.
      sums: float32 `[2, chunk, width]`, running sums; the memory of `rows` unless these are packed.
      running: float32 `[width]`, the running sum at the end of the chunk before.
      arrived: semaphore of numbers.
      fetched: semaphores `[2]` of what is read for a chunk.
      written: semaphores `[2]` of what is written.
    """

    bounds: Any
    index: Any
    segments: Any
    ids: Any
    starts: Any
    targets: Any
    rows: Any
    sums: Any
    running: Any
    arrived: Any
    fetched: Any
    written: Any
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


def with_memory(
    run: Callable[[dict[str, Any]], None], bounds: Any, source: Any, chunk: int, **others: Any
) -> None:
    """Call `run` with the refs of a `SumMemory`, by name, and of other memory.

    Args:
      run: takes the refs.
      bounds: int32 `[n]`, in the device's memory.
      source: the rows, `[R, W]`.
      chunk: how many entries are summed at a time.
      others: name -> shape and dtype.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas import tpu_sc as plsc

    vmem, dma, int32, float32 = pltpu.VMEM, pltpu.SemaphoreType.DMA, jnp.int32, jnp.float32
    lanes, words = plsc.get_sparse_core_info().num_lanes, source.shape[1]
    packed = source.dtype == jnp.uint32
    width = words * (2 if packed else 1)
    kinds = {
        "bounds": vmem(bounds.shape, int32),
        "index": vmem((chunk,), int32),
        "segments": vmem((lanes + chunk + lanes,), int32),
        "ids": vmem((2, chunk), int32),
        "starts": vmem((2, chunk), int32),
        "targets": vmem((2, chunk), int32),
        "rows": vmem((2, chunk, words), source.dtype),
        "running": vmem((width,), float32),
        "arrived": dma(()),
        "fetched": dma((2,)),
        "written": dma((2,)),
    }
    if packed:
        kinds["sums"] = vmem((2, chunk, width), float32)
    kinds |= {name: vmem(*kind) for name, kind in others.items()}
    pl.run_scoped(lambda **refs: run({"sums": refs["rows"]} | refs), **kinds)


def sum_chunk(memory: SumMemory, slot: Any) -> None:
    """Replace the rows of a chunk by the running sums of their segments."""
    # Packed: word columns 0 to 63 of W are sums 0 to 63 and W to W + 63.
    words = memory.rows.shape[2]
    step = _IN_REGISTERS // (2 if memory.packed else 1)
    for start in range(0, words, step):
        _sum_columns(memory, slot, range(start, min(start + step, words), memory.lanes))


def _sum_columns(memory: SumMemory, slot: Any, columns: range) -> None:
    """Do that for the vectors of words that start at `columns`."""
    from jax.experimental import pallas as pl

    lanes, words = memory.lanes, memory.rows.shape[2]
    places = [
        pl.ds(half + c, lanes) for half in ((0, words) if memory.packed else (0,)) for c in columns
    ]

    def add(vector: Any, running: tuple[Any, ...]) -> tuple[Any, ...]:
        here = pl.ds(vector * lanes, lanes)
        starts = memory.starts[slot, here]
        factors = None if memory.factors is None else memory.factors[slot, here]
        # The next row is loaded before the sums of this one are stored: the compiler keeps that
        # order, and a load that waits for a store takes twice as long.
        ahead = _load_row(memory, slot, vector * lanes, columns)
        for j in range(lanes):
            i, row = vector * lanes + j, ahead
            if j + 1 < lanes:
                ahead = _load_row(memory, slot, i + 1, columns)
            if factors is not None:
                row = [x * factors[j] for x in row]
            restart = starts[j] != 0
            running = tuple(
                jnp.where(restart, jnp.zeros_like(total), total) + x
                for total, x in zip(running, row, strict=True)
            )
            for place, total in zip(places, running, strict=True):
                memory.sums[slot, i, place] = total
        return running

    before = tuple(memory.running[place] for place in places)
    after = over_vectors(memory.chunk // lanes, before, add)
    for place, total in zip(places, after, strict=True):
        memory.running[place] = total


def _load_row(memory: SumMemory, slot: Any, i: Any, columns: range) -> list[Any]:
    """Return vectors of a fetched row as float32; of packed rows the lower halves first."""
    from jax.experimental import pallas as pl

    words = [memory.rows[slot, i, pl.ds(c, memory.lanes)] for c in columns]
    if not memory.packed:
        return words
    # The bits of a number of bfloat16 are the upper 16 bits of the same number in float32.
    upper = jnp.full(memory.lanes, 0xFFFF0000, jnp.uint32)
    halves = [word << 16 for word in words] + [word & upper for word in words]
    return [jax.lax.bitcast_convert_type(half, jnp.float32) for half in halves]


# -- what a test replaces to run a subcore on a CPU ------------------------------------------------


def on_each_worker(run: Callable[[Any], None]) -> None:
    """Call `run` with the number of this worker: every subcore does so for itself."""
    run(jax.lax.axis_index(("core", "subcore")))


def over_vectors(vectors: int, carry: Any, add: Callable[[Any, Any], Any]) -> Any:
    """Return the last result of `carry = add(vector, carry)`; vectors touch no common memory."""
    from jax.experimental.pallas import tpu_sc as plsc

    return plsc.parallel_loop(0, vectors, carry=carry)(add)


def copy_now(source: Any, target: Any) -> None:
    """Copy one ref to another."""
    from jax.experimental.pallas import tpu as pltpu

    pltpu.sync_copy(source, target)

"""What the programs of a SparseCore's vector subcores share: running sums, words, where they run.

Numbers of float32 are rounded to bfloat16, two to a word of 32 bits, on the bits, in integers. So a
subcore rounds as XLA does on every platform: to nearest even, infinity stays, numbers of more than
3.39e38 become infinite, and NaN stays NaN with its sign and the upper bits of its payload, but
quiet.

Input: fetched rows in a subcore's memory. Output: the running sums of their segments, in its place;
or these rounded to bfloat16, in a memory of their own, in words as `RowFormat.pack` makes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

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
      dim: D, the numbers of a rounded sum that count; those behind it are zeros.
      rows: `[2, chunk, W]`, fetched rows: float32, or uint32 with two numbers of bfloat16 each.
      sums: float32 `[2, chunk, width]`, running sums; the memory of `rows` unless these are packed.
        Or uint32 `[2, chunk, words]`, the running sums rounded to bfloat16, two to a word.
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
    dim: int = 0

    @property
    def chunk(self) -> int:
        """The entries of a chunk."""
        return self.ids.shape[1]

    @property
    def lanes(self) -> int:
        """The numbers of a vector."""
        return (self.segments.shape[0] - self.chunk) // 2

    @property
    def half(self) -> int:
        """How many columns the two numbers of a word are apart; 0: rows and sums are float32."""
        return next(
            (x.shape[2] for x in (self.rows, self.sums) if x.dtype == jnp.uint32), 0
        )

    @property
    def rounds(self) -> bool:
        """Whether sums are rounded to bfloat16."""
        return self.sums.dtype == jnp.uint32


def with_memory(
    run: Callable[[dict[str, Any]], None],
    bounds: Any,
    source: Any,
    chunk: int,
    **others: Any,
) -> None:
    """Call `run` with the refs of a `SumMemory`, by name, and of other memory.

    Args:
      run: takes the refs.
      bounds: int32 `[n]`, in the device's memory.
      source: the rows, `[R, W]`.
      chunk: how many entries are summed at a time.
      others: name -> shape and dtype; `sums`, if they are to be rounded.
    """
    vmem, dma, int32, float32 = (
        pltpu.VMEM,
        pltpu.SemaphoreType.DMA,
        jnp.int32,
        jnp.float32,
    )
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
    if packed:  # which are summed, and not rounded
        kinds["sums"] = vmem((2, chunk, width), float32)
    kinds |= {name: vmem(*kind) for name, kind in others.items()}
    pl.run_scoped(lambda **refs: run({"sums": refs["rows"]} | refs), **kinds)


def sum_chunk(memory: SumMemory, slot: Any) -> None:
    """Replace the rows of a chunk by the running sums of their segments, or round these."""
    # Word columns 0 to 31 of W words are columns 0 to 31 and W to W + 31.
    words, step = (
        memory.half or memory.rows.shape[2],
        _IN_REGISTERS // (2 if memory.half else 1),
    )
    for start in range(0, words, step):
        _sum_columns(memory, slot, range(start, min(start + step, words), memory.lanes))


def _sum_columns(memory: SumMemory, slot, columns: range) -> None:
    """Do that for the vectors that start at `columns`, and for those half a row behind them."""
    lanes, width = memory.lanes, memory.running.shape[0]
    behind = [
        c + memory.half for c in columns if memory.half and c + memory.half < width
    ]
    starts_at = [*columns, *behind]

    def add(vector, running):
        here = pl.ds(vector * lanes, lanes)
        starts = memory.starts[slot, here]
        factors = None if memory.factors is None else memory.factors[slot, here]
        # The next row is loaded before the sums of this one are stored: the compiler keeps that
        # order, and a load that waits for a store takes twice as long.
        ahead = _load_row(memory, slot, vector * lanes, starts_at)
        for j in range(lanes):
            i, row = vector * lanes + j, ahead
            if j + 1 < lanes:
                ahead = _load_row(memory, slot, i + 1, starts_at)
            if factors is not None:
                row = [x * factors[j] for x in row]
            restart = starts[j] != 0
            running = tuple(
                jnp.where(restart, jnp.zeros_like(total), total) + x
                for total, x in zip(running, row, strict=True)
            )
            _store_sums(memory, slot, i, dict(zip(starts_at, running, strict=True)))
        return running

    before = tuple(memory.running[pl.ds(c, lanes)] for c in starts_at)
    after = over_vectors(memory.chunk // lanes, before, add)
    for c, total in zip(starts_at, after, strict=True):
        memory.running[pl.ds(c, lanes)] = total


def _load_row(memory: SumMemory, slot, i, columns: list[int]) -> list[Any]:
    """Return the vectors of a fetched row that start at some columns, as float32."""
    lanes, words = memory.lanes, memory.rows.shape[2]
    if memory.rows.dtype != jnp.uint32:
        return [memory.rows[slot, i, pl.ds(c, lanes)] for c in columns]
    given = [memory.rows[slot, i, pl.ds(c, lanes)] for c in columns if c < words]
    # All lower halves come first, as in `columns`.
    lower, upper = zip(*map(unpack_words, given), strict=True)
    return [*lower, *upper]


def _store_sums(memory: SumMemory, slot, i, sums: dict[int, Any]) -> None:
    """Store the running sums of row `i`, vectors by their first column, or round them."""
    lanes, half, zeros = memory.lanes, memory.half, jnp.zeros(memory.lanes, jnp.float32)
    if not memory.rounds:
        for c, total in sums.items():
            memory.sums[slot, i, pl.ds(c, lanes)] = total
        return

    def counting(c):
        """Return the sums from column `c` on, zeros behind the last column that counts."""
        if c + lanes <= memory.dim or c not in sums:
            return sums.get(c)
        return jnp.where(
            jax.lax.iota(jnp.int32, lanes) < memory.dim - c, sums[c], zeros
        )

    for c in (c for c in sums if c < half):
        memory.sums[slot, i, pl.ds(c, lanes)] = pack_words(
            counting(c), counting(c + half)
        )


# -- what a test replaces to run a subcore on a CPU ------------------------------------------------


def on_each_worker(run: Callable[[Any], None]) -> None:
    """Call `run` with the number of this worker: every subcore does so for itself."""
    run(jax.lax.axis_index(("core", "subcore")))


def over_vectors(vectors: int, carry: Any, add: Callable[[Any, Any], Any]) -> Any:
    """Return the last result of `carry = add(vector, carry)`; vectors touch no common memory."""
    return plsc.parallel_loop(0, vectors, carry=carry)(add)


_UPPER, _QUIET = np.uint32(0xFFFF0000), np.uint32(0x00400000)
_MAGNITUDE, _INFINITY = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)


def pack_words(
    lower: Any, upper: Any | None, draws: Sequence[Any] = (None, None)
) -> Any:
    """Return words, uint32: in the lower half a number rounded to bfloat16, in the upper another.

    Args:
      lower, upper: float32 vectors; `upper` None: zeros.
      draws: the random bits of each number of both, uint32 vectors, to round it at random as
        `stochastic.round_rows` does; None: to nearest even.

    Example:
      >>> words = pack_words(jnp.float32([1, -2]), jnp.float32([1 + 2**-8, 0]))
      >>> [hex(word) for word in words.tolist()]
      ['0x3f803f80', '0xc000']
    """
    below = _rounded(lower, draws[0]) >> 16
    return below if upper is None else below | (_rounded(upper, draws[1]) & _UPPER)


def unpack_words(words: Any) -> tuple[Any, Any]:
    """Return the numbers of bfloat16 in the lower and in the upper halves of words, as float32."""
    # The bits of a number of bfloat16 are the upper 16 bits of the same number in float32.
    halves = words << 16, words & _UPPER
    lower, upper = (jax.lax.bitcast_convert_type(half, jnp.float32) for half in halves)
    return lower, upper


def _rounded(x, drawn: Any | None):
    """Return numbers whose upper 16 bits are those of a bfloat16 beside them, as uint32."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    if drawn is None:
        # Just below half of the last place that stays, and one more where that place is odd: a tie
        # goes up from an odd number and down to an even one.
        added = ((bits >> 16) & np.uint32(1)) + np.uint32(0x7FFF)
    else:
        added = drawn & np.uint32(0xFFFF)
    nearest = bits + added
    # NaN is found by its bits, because the compiler of subcores assumes that no float is NaN.
    return jnp.where((bits & _MAGNITUDE) > _INFINITY, bits | _QUIET, nearest)

"""What the programs of a SparseCore's vector subcores share: running sums, and where they run.

Input: fetched rows in a subcore's memory. Output: the running sums of their segments, in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

_IN_REGISTERS = 64
"""The columns whose running sums are held in registers at a time, 8 vectors of 8. With 16 the loop
takes as many instructions a row (one more or less), but twice as long to compile."""


class Running(Protocol):
    """What running sums need of a subcore's memory: refs, and what is known of them.

    The first axis of 2 is this chunk and the next, alternately.
    """

    @property
    def starts(self) -> Any:
        """int32 `[2, chunk]`, 1 where a segment starts."""

    @property
    def factors(self) -> Any:
        """float32 `[2, chunk]`, what each row is multiplied with, or None."""

    @property
    def rows(self) -> Any:
        """`[2, chunk, W]`, fetched rows: float32, or uint32 with two numbers of bfloat16 each."""

    @property
    def sums(self) -> Any:
        """float32 `[2, chunk, width]`, the running sums."""

    @property
    def running(self) -> Any:
        """float32 `[width]`, the running sum at the end of the chunk before."""

    @property
    def chunk(self) -> int:
        """The entries of a chunk."""
        ...

    @property
    def lanes(self) -> int:
        """The numbers of a vector."""
        ...

    @property
    def packed(self) -> bool:
        """Whether the rows are bfloat16, two to a word."""
        ...


def sum_chunk(memory: Running, slot: Any) -> None:
    """Replace the rows of a chunk by the running sums of their segments."""
    # Packed: word columns 0 to 63 of W are sums 0 to 63 and W to W + 63.
    words = memory.rows.shape[2]
    step = _IN_REGISTERS // (2 if memory.packed else 1)
    for start in range(0, words, step):
        _sum_columns(memory, slot, range(start, min(start + step, words), memory.lanes))


def _sum_columns(memory: Running, slot: Any, columns: range) -> None:
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


def _load_row(memory: Running, slot: Any, i: Any, columns: range) -> list[Any]:
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

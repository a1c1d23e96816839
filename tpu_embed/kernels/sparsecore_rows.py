"""Read float32 rows with a TPU's SparseCores and round them to bfloat16: one Pallas kernel.

An owner of rows that sends them in bfloat16 reads each row once and writes half as many bytes. If a
TensorCore rounded them, they would be written and read once more.

Every vector subcore (a worker) takes every n-th chunk of the row numbers, n workers in all. While
it rounds the rows of one chunk in its memory, an indirect DMA fetches those of its next.

Pallas cannot interpret the indirect DMA on a CPU, so this kernel has been compiled for every chip
in `sparsecore.KINDS` and interpreted with plain copies, but has not run on a TPU.

Input: float32 rows and row numbers. Output: these rows, in words of two numbers each.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.kernels import sparsecore, sparsecore_sums
from tpu_embed.kernels import sparsecore_subcore as subcore


def gather_rounded_rows(table: Array, row_ids: Array, words: int) -> Array:
    """Return `table[row_ids]` rounded to bfloat16 and packed, zeros where a row is absent.

    Args:
      table: float32 `[R, W]`, W a multiple of `sparsecore.WORDS`, at most `LONGEST`.
      row_ids: integer `[N]`.
      words: the words of a packed row, a multiple of `sparsecore.WORDS`, at least W / 2. Word i has
        column i in its lower half, and column i + words in its upper half.

    Returns:
      uint32 `[N, words]`.
    """
    numbers = sparsecore._piece_numbers(table, row_ids)
    chunk = sparsecore._rows_at_a_time(numbers.shape[0], table.shape[1:])
    if not (numbers.shape[0] and table.shape[0]):
        return jnp.zeros((numbers.shape[0], words), jnp.uint32)
    ids = sparsecore._padded(numbers, chunk, PADDING_ID)
    result = jax.ShapeDtypeStruct((ids.shape[0], words), jnp.uint32)
    workers = sparsecore_sums._workers_here()

    def kernel(table, ids, out):
        _run(table, ids, out, chunk, workers)

    size = 4 * (ids.shape[0] * (1 + table.shape[1]) + result.size)
    found = sparsecore_sums.on_subcores(kernel, "gather_rounded_rows", size, result)(
        table, ids
    )
    return found[: numbers.shape[0]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Memory:
    """What a worker keeps in its subcore's memory: refs. The 2 are this chunk and its next.

    Attributes:
      ids: int32 `[2, chunk]`, row numbers, `PADDING_ID` for none.
      rows: float32 `[2, chunk, W]`, the rows.
      rounded: uint32 `[2, chunk, words]`, the same, rounded.
      arrived: semaphores `[2]` of the row numbers.
      fetched: semaphores `[2]` of the rows.
      written: semaphores `[2]` of what is written.
    """

    ids: Any
    rows: Any
    rounded: Any
    arrived: Any
    fetched: Any
    written: Any


@dataclasses.dataclass(frozen=True)
class _Work:
    """What a worker has to do.

    Attributes:
      memory: its own memory.
      table: the rows, float32 `[R, W]`.
      ids: the row numbers, int32 `[N]`.
      out: the rounded rows, uint32 `[N, words]`.
      first: the number of its first chunk.
      step: its next chunk's number minus this one's.
    """

    memory: _Memory
    table: Any
    ids: Any
    out: Any
    first: Any
    step: int

    @property
    def chunks(self) -> Any:
        """How many chunks it has."""
        of_all = self.ids.shape[0] // self.memory.ids.shape[1]
        return (of_all - self.first + self.step - 1) // self.step


def _run(table, ids, out, chunk: int, workers: int) -> None:
    """Read and round the chunks of this worker."""
    dma = pltpu.SemaphoreType.DMA((2,))

    def with_refs(**refs):
        memory = _Memory(**refs)
        subcore.on_each_worker(
            lambda worker: _round_chunks(
                _Work(memory, table, ids, out, worker, workers)
            )
        )

    pl.run_scoped(
        with_refs,
        ids=pltpu.VMEM((2, chunk), jnp.int32),
        rows=pltpu.VMEM((2, chunk, table.shape[1]), jnp.float32),
        rounded=pltpu.VMEM((2, chunk, out.shape[1]), jnp.uint32),
        arrived=dma,
        fetched=dma,
        written=dma,
    )


def _round_chunks(work: _Work) -> None:
    """Read and round the chunks of a worker, one after the other."""
    chunks = work.chunks

    @pl.when(chunks > 0)
    def _():
        _numbers(work, 0).start()
        pl.when(chunks > 1)(lambda: _numbers(work, 1).start())
        _prepare(work, 0)

        @pl.loop(0, chunks)
        def _(k):
            pl.when(k + 1 < chunks)(lambda: _prepare(work, k + 1))
            _fetch(work, k).wait()
            # Nothing needs this chunk's row numbers any longer; those of k + 2 take their place.
            pl.when(k + 2 < chunks)(lambda: _numbers(work, k + 2).start())
            pl.when(k > 1)(lambda: _write(work, k - 2).wait())
            _round(work.memory, k & 1)
            _write(work, k).start()

        pl.when(chunks > 1)(lambda: _write(work, chunks - 2).wait())
        _write(work, chunks - 1).wait()


def _prepare(work: _Work, k) -> None:
    """Start to fetch the rows of the worker's k-th chunk, whose numbers are on their way."""
    memory, slot = work.memory, k & 1
    _numbers(work, k).wait()
    sparsecore._zero_where_absent(memory.ids.at[slot], memory.rows.at[slot])
    _fetch(work, k).start()


def _round(memory: _Memory, slot) -> None:
    """Round and pack the rows of a chunk."""
    lanes = plsc.get_sparse_core_info().num_lanes
    width, words = memory.rows.shape[2], memory.rounded.shape[2]

    def round_row(i, done):
        for start in range(0, words, lanes):
            lower, behind = memory.rows[slot, i, pl.ds(start, lanes)], words + start
            upper = (
                memory.rows[slot, i, pl.ds(behind, lanes)] if behind < width else None
            )
            memory.rounded[slot, i, pl.ds(start, lanes)] = subcore.pack_words(
                lower, upper
            )
        return done

    subcore.over_vectors(memory.ids.shape[1], (), round_row)


# -- what a test replaces to run a worker on a CPU -------------------------------------------------


def _fetch(work: _Work, k):
    """Return the indirect DMA, not started, that fetches the rows of the worker's k-th chunk."""
    memory, slot = work.memory, k & 1
    rows = plsc.Indices(memory.ids.at[slot], ignored_value=PADDING_ID)
    fetched = memory.fetched.at[slot]
    return pltpu.make_async_copy(work.table.at[rows], memory.rows.at[slot], fetched)


def _numbers(work: _Work, k):
    """Return the copy, not started, of the row numbers of the worker's k-th chunk."""
    memory, slot = work.memory, k & 1
    here = _places(work, k)
    return pltpu.make_async_copy(
        work.ids.at[here], memory.ids.at[slot], memory.arrived.at[slot]
    )


def _write(work: _Work, k):
    """Return the copy, not started, of the rounded rows of the worker's k-th chunk."""
    memory, slot = work.memory, k & 1
    target = work.out.at[_places(work, k)]
    return pltpu.make_async_copy(
        memory.rounded.at[slot], target, memory.written.at[slot]
    )


def _places(work: _Work, k):
    """Return the places of the worker's k-th chunk among all row numbers."""
    chunk = work.memory.ids.shape[1]
    return pl.ds(pl.multiple_of((work.first + k * work.step) * chunk, chunk), chunk)

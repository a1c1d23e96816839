"""What one vector subcore of a SparseCore does to update rows; see `sparsecore_update.py`.

As in `sparsecore_worker.py` it goes through its entries in chunks, and while it works on one chunk
it fetches what the next one needs. An entry names a partial sum and the merged sum (the segment)
that it is added to. The segment's row and slots are fetched to the place of the segment's last
entry, where its whole sum stands in the end; there they are changed, and sent back.

Input: refs to partial sums, numbers, table and slots in the device's memory. Output: rows and slots
of the worker's segments, changed in that memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpu_embed._types import PADDING_ID
from tpu_embed.kernels import sparsecore_subcore as subcore
from tpu_embed.kernels.sparsecore_change import change_rows
from tpu_embed.kernels.sparsecore_memory import AHEAD, Memory, Work, with_memory


def run(work: Work) -> None:
    """Update the rows of this worker's segments."""
    from jax.experimental import pallas as pl

    def update(memory: Memory) -> None:
        subcore.copy_now(work.bounds, memory.bounds)
        subcore.copy_now(work.numbers, memory.numbers)

        def one_worker(number: Any) -> None:
            near = memory.bounds[pl.ds(number, memory.lanes)]
            _update_range(work, memory, near[0], near[1])

        subcore.on_each_worker(one_worker)

    with_memory(update, work)


def _update_range(work: Work, memory: Memory, begin: Any, end: Any) -> None:
    """Update the rows of the entries `begin` to `end - 1`, chunk by chunk."""
    from jax.experimental import pallas as pl

    chunk, lanes = memory.chunk, memory.lanes
    first = begin // chunk
    chunks = jnp.where(end > begin, (end + chunk - 1) // chunk - first, 0)

    @pl.when(chunks > 0)
    def _() -> None:
        # The rows of the first chunk's segments begin with that of its first entry.
        start = pl.ds(first * chunk, lanes)
        subcore.copy_now(work.segments.at[start], memory.segments.at[pl.ds(0, lanes)])
        least = memory.segments[pl.ds(0, lanes)][0]
        memory.segments[pl.ds(0, lanes)] = jnp.full(lanes, least, jnp.int32)
        _start(_number_copies(work, memory, first))
        _prepare(work, memory, (begin, end), first, 0, chunks > 1)

        @pl.loop(0, chunks)
        def _(k: Any) -> None:
            slot = k & 1

            @pl.when(k > 0)
            def _() -> None:
                _wait(_writes(work, memory, 1 - slot))

            @pl.when(k + 1 < chunks)
            def _() -> None:
                bounds, number = (begin, end), first + k + 1
                _prepare(work, memory, bounds, number, 1 - slot, k + 2 < chunks)

            _wait(_fetches(work, memory, slot))
            subcore.sum_chunk(memory, slot)
            change_rows(work.form, memory, slot)
            _start(_writes(work, memory, slot))

        _wait(_writes(work, memory, (chunks - 1) & 1))


def _prepare(
    work: Work, memory: Memory, bounds: tuple[Any, Any], number: Any, slot: Any, more: Any
) -> None:
    """Start to fetch what a chunk needs, and then the numbers of the next chunk.

    Args:
      work: the work.
      memory: the worker's; the copies of the chunk's numbers were started.
      bounds: the worker's first entry, and the one behind its last.
      number: the chunk's number.
      slot: which half of the memory it uses.
      more: whether there is a next chunk.
    """
    from jax.experimental import pallas as pl

    _wait(_number_copies(work, memory, number))
    _mark(memory, bounds, number * memory.chunk, slot)
    _start(_fetches(work, memory, slot))
    # The end of this chunk is what the next chunk's first entry compares its segment with.
    lanes = memory.lanes
    memory.segments[pl.ds(0, lanes)] = memory.segments[pl.ds(memory.chunk, lanes)]

    @pl.when(more)
    def _() -> None:
        _start(_number_copies(work, memory, number + 1))


def _mark(memory: Memory, bounds: tuple[Any, Any], offset: Any, slot: Any) -> None:
    """Work out, for every entry of a chunk, what to fetch, where to restart and what to write."""
    from jax.experimental import pallas as pl

    # Segments (3, 3, 5 | 5, 6) with rows 3: 40, 5: 70 in a chunk of three: restart at (1, 0, 1),
    # and write to (none, 40, none), because segment 5 goes on in the next chunk.
    lanes, (begin, end) = memory.lanes, bounds
    zeros = jnp.zeros(lanes, jnp.int32)
    nothing, first_row = zeros + PADDING_ID, _aligned(memory.before)
    for start in range(0, memory.chunk, lanes):
        here, entry = pl.ds(start, lanes), offset + start + jax.lax.iota(jnp.int32, lanes)
        left, segment, right = (
            memory.segments[pl.ds(lanes + start + step, lanes)] for step in (-1, 0, 1)
        )
        own = (entry >= begin) & (entry < end)
        memory.ids[slot, here] = jnp.where(own, memory.index[here], nothing)
        opens = (entry == begin) | (segment != left)
        memory.starts[slot, here] = jnp.where(opens, zeros + 1, zeros)
        closes = own & (segment != right)
        # The chunk's own segments lie within `row_ids`; those of other workers may not.
        place = jnp.where(own, segment - first_row, zeros)
        row = _look_up(memory.row_ids, place)
        memory.targets[slot, here] = jnp.where(closes, row, nothing)
        if memory.keys is not None:
            memory.row_keys[slot, here] = _look_up(memory.keys, place)


def _start(copies: Sequence[Any]) -> None:
    for copy in copies:
        copy.start()


def _wait(copies: Sequence[Any]) -> None:
    for copy in copies:
        copy.wait()


def _aligned(segment: Any) -> Any:
    """Return the greatest position, not above that of a segment, at which a copy may begin."""
    return segment // 8 * 8


# -- what a test replaces to run a worker on a CPU -------------------------------------------------


def _look_up(ref: Any, positions: Any) -> Any:
    """Return a vector of the numbers of a ref at some positions."""
    from jax.experimental.pallas import tpu_sc as plsc

    return plsc.load_gather(ref, [positions])


def _number_copies(work: Work, memory: Memory, number: Any) -> Sequence[Any]:
    """Return the copies, not started, of a chunk's numbers into the worker's memory."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    chunk, lanes = memory.chunk, memory.lanes
    # Segments have no gaps: the chunk's first one is the last one before it, or the next.
    rows = pl.ds(pl.multiple_of(_aligned(memory.before), 8), chunk + AHEAD)
    pairs = [
        (work.index.at[pl.ds(number * chunk, chunk)], memory.index),
        (
            work.segments.at[pl.ds(number * chunk, chunk + lanes)],
            memory.segments.at[pl.ds(lanes, chunk + lanes)],
        ),
        (work.row_ids.at[rows], memory.row_ids),
    ]
    if work.keys is not None:
        pairs.append((work.keys.at[rows], memory.keys))
    return [pltpu.make_async_copy(x, target, memory.arrived) for x, target in pairs]


def _fetches(work: Work, memory: Memory, slot: Any) -> Sequence[Any]:
    """Return the indirect DMAs, not started, that fetch a chunk's partial sums, rows and slots."""
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas import tpu_sc as plsc

    partials = plsc.Indices(memory.ids.at[slot], ignored_value=PADDING_ID)
    rows = plsc.Indices(memory.targets.at[slot], ignored_value=PADDING_ID)
    pairs = [(work.source.at[partials], memory.rows.at[slot])]
    for held, near in zip((work.table, *work.slots), (memory.table, *memory.slots), strict=True):
        pairs.append((held.at[rows], near.at[slot]))
    return [pltpu.make_async_copy(x, target, memory.fetched.at[slot]) for x, target in pairs]


def _writes(work: Work, memory: Memory, slot: Any) -> Sequence[Any]:
    """Return the indirect DMAs, not started, that write a chunk's rows and slots."""
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas import tpu_sc as plsc

    rows = plsc.Indices(memory.targets.at[slot], ignored_value=PADDING_ID)
    pairs = zip((memory.table, *memory.slots), (work.table, *work.slots), strict=True)
    done = memory.written.at[slot]
    return [pltpu.make_async_copy(near.at[slot], held.at[rows], done) for near, held in pairs]

"""What one vector subcore of a SparseCore does to update rows; see `sparsecore_update.py`.

As in `sparsecore_worker.py` it goes through its entries in chunks, and while it works on one chunk
it fetches what the next one needs. An entry names a partial sum and the merged sum (the segment)
that it is added to. The segment's row and slots are fetched to the place of the segment's last
entry, where its whole sum stands in the end; there they are changed, and sent back.

Input: refs to partial sums, numbers, table and slots in the device's memory. Output: rows and slots
of the worker's segments, changed in that memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpu_embed._types import PADDING_ID
from tpu_embed.kernels import sparsecore_rules as rules
from tpu_embed.kernels import sparsecore_subcore as subcore

_AT_A_TIME = 8
"""The vectors of a row that are loaded before the first of them is stored."""
_UNROLLED = 16
"""The vectors of a row that are changed by one stretch of code: a whole row of 128 by 8 lanes."""


@dataclasses.dataclass(frozen=True)
class RuleForm:
    """What is static of a `CompiledRule`.

    Attributes:
      kind: one of `sparsecore_rules.KINDS`.
      flag: its switch.
      decays: whether the row is multiplied with 1 - λ first.
      clips_gradient: whether the gradient has bounds.
      clips_row: whether the new row has bounds.
      dim: D, the numbers of a row that count.
    """

    kind: str
    flag: bool
    decays: bool
    clips_gradient: bool
    clips_row: bool
    dim: int


@dataclasses.dataclass(frozen=True)
class Work:
    """What all workers have to do: refs, but for the last two.

    Attributes:
      bounds: int32 `[n]`, as for `sparsecore_worker.run`.
      source: partial sums, float32 `[P, W]`, or uint32 `[P, W / 2]` with two numbers of bfloat16
        to a word; some words more than a row of the table are padding.
      index: int32 `[N]`, the partial sum of each entry; N is a multiple of `chunk`.
      segments: int32 `[N + lanes]`, non-decreasing and without gaps.
      row_ids: int32 `[M]`, the row of each segment, `PADDING_ID` for none; at least
        `chunk + 2 * lanes` more than there are segments.
      numbers: float32 `[2 * lanes]`, `CompiledRule.operand` and padding.
      table: float32 `[R, W]`.
      slots: float32, `[R, W]` or `[R]` each.
      form: the rule.
      chunk: how many entries are summed at a time.
    """

    bounds: Any
    source: Any
    index: Any
    segments: Any
    row_ids: Any
    numbers: Any
    table: Any
    slots: tuple[Any, ...]
    form: RuleForm
    chunk: int


@dataclasses.dataclass(frozen=True)
class _Memory:
    """What a worker keeps in its subcore's memory: refs.

    Attributes:
      bounds: int32 `[workers + WORDS]`.
      numbers: float32 `[2 * lanes]`.
      index: int32 `[chunk]`, the partial sum of each entry of the chunk that comes next.
      segments: int32 `[lanes + chunk + lanes]`: the end of the chunk before, the chunk, and the
        beginning of the chunk after it.
      row_ids: int32 `[chunk + 2 * lanes]`, the rows of these segments, from `first` on.
      starts: int32 `[2, chunk]`, 1 where a segment starts. The 2 are this chunk and the next,
        alternately, here and below.
      ids: int32 `[2, chunk]`, partial sums to fetch, `PADDING_ID` for none.
      targets: int32 `[2, chunk]`, where a segment ends its row, otherwise `PADDING_ID`.
      rows: `[2, chunk, …]`, fetched partial sums.
      sums: float32 `[2, chunk, W]`, running sums; the memory of `rows` unless these are packed.
      table: float32 `[2, chunk, W]`, the rows of `targets`.
      slots: float32 `[2, chunk, W]` or `[2, chunk]` each, their slots.
      running: float32 `[W]`, the running sum at the end of the chunk before.
      arrived: semaphore of numbers.
      fetched: semaphores `[2]` of `rows`, `table` and `slots`.
      written: semaphores `[2]` of `table` and `slots`.
    """

    bounds: Any
    numbers: Any
    index: Any
    segments: Any
    row_ids: Any
    starts: Any
    ids: Any
    targets: Any
    rows: Any
    sums: Any
    table: Any
    slots: tuple[Any, ...]
    running: Any
    arrived: Any
    fetched: Any
    written: Any
    factors: Any = None  # weights are in the partial sums already

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
        """Whether the partial sums are bfloat16, two to a word."""
        return self.sums is not self.rows

    @property
    def before(self) -> Any:
        """The last segment of the chunk that was prepared last."""
        from jax.experimental import pallas as pl

        return self.segments[pl.ds(0, self.lanes)][self.lanes - 1]


def run(work: Work) -> None:
    """Update the rows of this worker's segments."""
    from jax.experimental import pallas as pl

    def with_memory(memory: _Memory) -> None:
        subcore.copy_now(work.bounds, memory.bounds)
        subcore.copy_now(work.numbers, memory.numbers)

        def one_worker(number: Any) -> None:
            near = memory.bounds[pl.ds(number, memory.lanes)]
            _update_range(work, memory, near[0], near[1])

        subcore.on_each_worker(one_worker)

    _allocate(with_memory, work)


def _allocate(run: Callable[[_Memory], None], work: Work) -> None:
    """Call `run` with a worker's memory."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas import tpu_sc as plsc

    vmem, dma, int32, float32 = pltpu.VMEM, pltpu.SemaphoreType.DMA, jnp.int32, jnp.float32
    chunk, lanes = work.chunk, plsc.get_sparse_core_info().num_lanes
    words, packed = work.source.shape[1], work.source.dtype == jnp.uint32
    width = words * (2 if packed else 1)
    kinds = {
        "bounds": vmem(work.bounds.shape, int32),
        "numbers": vmem(work.numbers.shape, float32),
        "index": vmem((chunk,), int32),
        "segments": vmem((lanes + chunk + lanes,), int32),
        "row_ids": vmem((chunk + 2 * lanes,), int32),
        "starts": vmem((2, chunk), int32),
        "ids": vmem((2, chunk), int32),
        "targets": vmem((2, chunk), int32),
        "rows": vmem((2, chunk, words), work.source.dtype),
        "table": vmem((2, chunk, work.table.shape[1]), float32),
        "running": vmem((width,), float32),
        "arrived": dma(()),
        "fetched": dma((2,)),
        "written": dma((2,)),
    }
    if packed:
        kinds["sums"] = vmem((2, chunk, width), float32)
    slots = {f"slot{n}": vmem((2, chunk, *x.shape[1:]), float32) for n, x in enumerate(work.slots)}

    def with_refs(**refs: Any) -> None:
        own = tuple(refs.pop(name) for name in slots)
        run(_Memory(**({"sums": refs["rows"]} | refs), slots=own))

    pl.run_scoped(with_refs, **kinds, **slots)


def _update_range(work: Work, memory: _Memory, begin: Any, end: Any) -> None:
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
        for copy in _number_copies(work, memory, first):
            copy.start()
        _prepare(work, memory, (begin, end), first, 0, chunks > 1)

        @pl.loop(0, chunks)
        def _(k: Any) -> None:
            slot = k & 1

            @pl.when(k > 0)
            def _() -> None:
                for copy in _writes(work, memory, 1 - slot):
                    copy.wait()

            @pl.when(k + 1 < chunks)
            def _() -> None:
                bounds, number = (begin, end), first + k + 1
                _prepare(work, memory, bounds, number, 1 - slot, k + 2 < chunks)

            for copy in _fetches(work, memory, slot):
                copy.wait()
            subcore.sum_chunk(memory, slot)
            _apply(work.form, memory, slot)
            for copy in _writes(work, memory, slot):
                copy.start()

        for copy in _writes(work, memory, (chunks - 1) & 1):
            copy.wait()


def _prepare(
    work: Work, memory: _Memory, bounds: tuple[Any, Any], number: Any, slot: Any, more: Any
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

    for copy in _number_copies(work, memory, number):
        copy.wait()
    _mark(memory, bounds, number * memory.chunk, slot)
    for copy in _fetches(work, memory, slot):
        copy.start()
    # The end of this chunk is what the next chunk's first entry compares its segment with.
    lanes = memory.lanes
    memory.segments[pl.ds(0, lanes)] = memory.segments[pl.ds(memory.chunk, lanes)]

    @pl.when(more)
    def _() -> None:
        for copy in _number_copies(work, memory, number + 1):
            copy.start()


def _mark(memory: _Memory, bounds: tuple[Any, Any], offset: Any, slot: Any) -> None:
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
        row = _look_up(memory.row_ids, jnp.where(own, segment - first_row, zeros))
        memory.targets[slot, here] = jnp.where(closes, row, nothing)


def _aligned(segment: Any) -> Any:
    """Return the greatest position, not above that of a segment, at which a copy may begin."""
    return segment // 8 * 8


def _apply(form: RuleForm, memory: _Memory, slot: Any) -> None:
    """Change the rows of the segments that end in a chunk."""
    from jax.experimental import pallas as pl

    lanes = memory.lanes
    own = memory.numbers[pl.ds(0, lanes)], memory.numbers[pl.ds(lanes, lanes)]

    def number(i: int) -> Any:
        return own[i // lanes][i % lanes]

    @pl.loop(0, memory.chunk // lanes)
    def _(vector: Any) -> None:
        targets = memory.targets[slot, pl.ds(vector * lanes, lanes)]
        if form.kind == "rowwise_adagrad":
            rates = _row_rates(form, memory, slot, vector, number)
        for j in range(lanes):

            @pl.when(targets[j] >= 0)
            def _(i: Any = vector * lanes + j, j: int = j) -> None:
                if form.kind == "rowwise_adagrad":
                    _change_row(form, memory, slot, i, number, rates[j])
                else:
                    _change_row(form, memory, slot, i, number)


def _change_row(
    form: RuleForm, memory: _Memory, slot: Any, i: Any, number: rules.Numbers, rate: Any = None
) -> None:
    """Apply the rule to the row at place `i`, or to row-wise Adagrad's row its `rate`."""
    from jax.experimental import pallas as pl

    lanes, width = memory.lanes, memory.table.shape[2]

    refs = (memory.table, *([] if rate is not None else memory.slots))

    def changed(w: Any, held: list[Any], g: Any) -> list[Any]:
        w = rules.times(number(0), w) if form.decays else w
        if rate is not None:
            w, new = w - rules.times(g, rate), []
        else:
            w, new = rules.RULES[form.kind](w, held, g, number, form.flag)
        w = jnp.minimum(jnp.maximum(w, number(3)), number(4)) if form.clips_row else w
        return [w, *new]

    def change(vectors: Any) -> None:
        # All loads stand before all stores: the compiler keeps their order.
        places = [pl.ds(vector * lanes, lanes) for vector in vectors]
        given = [_gradient(form, memory, slot, i, here, number) for here in places]
        held = [[x[slot, i, here] for x in refs] for here in places]
        for here, old, g in zip(places, held, given, strict=True):
            for x, value in zip(refs, changed(old[0], old[1:], g), strict=True):
                x[slot, i, here] = value

    vectors = width // lanes
    for start in range(0, min(vectors, _UNROLLED), _AT_A_TIME):
        change(range(start, min(start + _AT_A_TIME, vectors)))
    if vectors > _UNROLLED:
        pl.loop(_UNROLLED, vectors)(lambda vector: change([vector]))


def _gradient(
    form: RuleForm, memory: _Memory, slot: Any, i: Any, here: Any, number: rules.Numbers
) -> Any:
    """Return a vector of the whole gradient of the row at place `i`, clipped."""
    g = memory.sums[slot, i, here]
    return jnp.minimum(jnp.maximum(g, number(1)), number(2)) if form.clips_gradient else g


def _row_rates(
    form: RuleForm, memory: _Memory, slot: Any, vector: Any, number: rules.Numbers
) -> Any:
    """Add to the accumulators of a vector of rows; return lr / (root of these + epsilon)."""
    from jax.experimental import pallas as pl

    lanes = memory.lanes
    here, lane = pl.ds(vector * lanes, lanes), jax.lax.iota(jnp.int32, memory.lanes)
    means = jnp.zeros(lanes, jnp.float32)
    for j in range(lanes):
        total = _sum_of_squares(form, memory, slot, vector * lanes + j, number)
        means = jnp.where(lane == j, rules.times(total, jnp.float32(1.0 / form.dim)), means)
    a = memory.slots[0][slot, here] + means
    memory.slots[0][slot, here] = a
    return number(5) * rules.over_root(a, None if form.flag else number(6))


def _sum_of_squares(form: RuleForm, memory: _Memory, slot: Any, i: Any, number: rules.Numbers):
    """Return the sum of a row's squared gradients, in the order of `optimizers.row_sums`."""
    from jax.experimental import pallas as pl

    lanes, width = memory.lanes, memory.table.shape[2]
    squares = []
    for start in range(0, width, lanes):
        g = _gradient(form, memory, slot, i, pl.ds(start, lanes), number)
        squares.append(rules.times(g, g))
    # The upper half is added to the lower half: vectors first, then the lanes of the last one.
    whole = 1 << max(0, form.dim - 1).bit_length()
    count = max(1, whole // lanes)
    parts: list[Any] = [squares[v] if v < len(squares) else None for v in range(count)]
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [
            low if high is None else low + high
            for low, high in zip(parts[:half], parts[half:], strict=True)
        ]
    lanes_left = [parts[0][j] for j in range(min(lanes, whole))]
    while len(lanes_left) > 1:
        half = len(lanes_left) // 2
        pairs = zip(lanes_left[:half], lanes_left[half:], strict=True)
        lanes_left = [low + high for low, high in pairs]
    return lanes_left[0]


# -- what a test replaces to run a worker on a CPU -------------------------------------------------


def _look_up(ref: Any, positions: Any) -> Any:
    """Return a vector of the numbers of a ref at some positions."""
    from jax.experimental.pallas import tpu_sc as plsc

    return plsc.load_gather(ref, [positions])


def _number_copies(work: Work, memory: _Memory, number: Any) -> Sequence[Any]:
    """Return the copies, not started, of a chunk's numbers into the worker's memory."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    chunk, lanes = memory.chunk, memory.lanes
    # Segments have no gaps: the chunk's first one is the last one before it, or the next.
    rows = pl.ds(pl.multiple_of(_aligned(memory.before), 8), chunk + 2 * lanes)
    pairs = [
        (work.index.at[pl.ds(number * chunk, chunk)], memory.index),
        (
            work.segments.at[pl.ds(number * chunk, chunk + lanes)],
            memory.segments.at[pl.ds(lanes, chunk + lanes)],
        ),
        (work.row_ids.at[rows], memory.row_ids),
    ]
    return [pltpu.make_async_copy(x, target, memory.arrived) for x, target in pairs]


def _fetches(work: Work, memory: _Memory, slot: Any) -> Sequence[Any]:
    """Return the indirect DMAs, not started, that fetch a chunk's partial sums, rows and slots."""
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas import tpu_sc as plsc

    partials = plsc.Indices(memory.ids.at[slot], ignored_value=PADDING_ID)
    rows = plsc.Indices(memory.targets.at[slot], ignored_value=PADDING_ID)
    pairs = [(work.source.at[partials], memory.rows.at[slot])]
    for held, near in zip((work.table, *work.slots), (memory.table, *memory.slots), strict=True):
        pairs.append((held.at[rows], near.at[slot]))
    return [pltpu.make_async_copy(x, target, memory.fetched.at[slot]) for x, target in pairs]


def _writes(work: Work, memory: _Memory, slot: Any) -> Sequence[Any]:
    """Return the indirect DMAs, not started, that write a chunk's rows and slots."""
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas import tpu_sc as plsc

    rows = plsc.Indices(memory.targets.at[slot], ignored_value=PADDING_ID)
    pairs = zip((memory.table, *memory.slots), (work.table, *work.slots), strict=True)
    done = memory.written.at[slot]
    return [pltpu.make_async_copy(near.at[slot], held.at[rows], done) for near, held in pairs]

"""Merge partial sums of gradients and update their rows with a TPU's SparseCores: one kernel.

An owner of rows has partial sums of their gradients, sorted by row. Without this kernel it merges
them, reads rows and slots, applies the rule on the TensorCore, and writes both: six passes over the
rows. Here a vector subcore (a worker) sums a row's partial sums in order, changes the row and its
slots in its own memory, and writes them where they were, so that every number moves once.

A worker goes through its entries in chunks, and while it works on one chunk it fetches what the
next one needs. An entry names a partial sum and the merged sum (the segment) that it is added to.
The segment's row and slots are fetched to the place of the segment's last entry, where its whole
sum stands in the end; there they are changed, and sent back.

Pallas cannot interpret the indirect DMA on a CPU, so this kernel has been compiled for every chip
in `sparsecore.KINDS` and interpreted with plain copies, but has not run on a TPU.

Input: partial sums, their order, and an owner's table and slots of 32-bit words. Output: table and
slots, in their own memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.kernels import sparsecore_rules as rules
from tpu_embed.kernels import sparsecore_subcore as subcore
from tpu_embed.kernels import sparsecore_sums, stochastic
from tpu_embed.kernels.operands import CompiledRule

AHEAD = 32
"""Two vectors of the widest subcore."""


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
      bounds: int32 `[n]`, as for `sparsecore_sums.worker_bounds`.
      source: partial sums, float32 `[P, W]`, or uint32 `[P, W / 2]` with two numbers of bfloat16
        to a word; some words more than a row of the table are padding.
      index: int32 `[N]`, the partial sum of each entry; N is a multiple of `chunk`.
      segments: int32 `[N + lanes]`, non-decreasing and without gaps.
      row_ids: int32 `[M]`, the row of each segment, `PADDING_ID` for none; at least
        `chunk + AHEAD + 8` more than there are segments.
      numbers: float32 `[AHEAD]`, `CompiledRule.operand` and padding.
      table: float32 `[R, W]`; or uint32 `[R, words]`, two numbers of bfloat16 to a word.
      slots: float32, `[R, W]` or `[R]` each.
      form: the rule.
      chunk: how many entries are summed at a time.
      keys: int32 `[M]`, for each segment what the random bits of its row depend on, as
        `stochastic.row_draws` says; None: rows are not rounded at random.
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
    keys: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory(subcore.SumMemory):
    """What a worker keeps in its subcore's memory: refs.

    Attributes:
      numbers: float32 `[AHEAD]`.
      row_ids: int32 `[chunk + AHEAD]`, the rows of the segments of the next chunk.
      table: `[2, chunk, …]`, the rows of `targets`.
      slots: float32 `[2, chunk, W]` or `[2, chunk]` each, their slots.
      keys: int32 `[chunk + AHEAD]`, those of the segments of the next chunk; or None.
      row_keys: int32 `[2, chunk]`, the key of each row of `targets`; or None.
    """

    numbers: Any
    row_ids: Any
    table: Any
    slots: tuple[Any, ...]
    keys: Any = None
    row_keys: Any = None

    @property
    def before(self) -> Any:
        """The last segment of the chunk that was prepared last."""
        return self.segments[pl.ds(0, self.lanes)][self.lanes - 1]


def _with_memory(run: Callable[[Memory], None], work: Work) -> None:
    """Call `run` with a worker's memory."""
    chunk, float32 = work.chunk, jnp.float32
    slots = {
        f"slot{n}": ((2, chunk, *x.shape[1:]), float32)
        for n, x in enumerate(work.slots)
    }

    def with_refs(refs):
        run(Memory(slots=tuple(refs.pop(name) for name in slots), **refs))

    others = {
        "numbers": (work.numbers.shape, float32),
        "row_ids": ((chunk + AHEAD,), jnp.int32),
        "table": ((2, chunk, work.table.shape[1]), work.table.dtype),
    }
    if work.keys is not None:
        others |= {
            "keys": ((chunk + AHEAD,), jnp.int32),
            "row_keys": ((2, chunk), jnp.int32),
        }
    subcore.with_memory(with_refs, work.bounds, work.source, chunk, **others, **slots)


def merge_update(
    sums: Array,
    index: Array,
    segments: Array,
    row_ids: Array,
    table: Array,
    slots: Sequence[Array],
    rule: CompiledRule,
    dim: int,
    keys: Array | None = None,
) -> tuple[Array, list[Array]]:
    """Add up the partial sums of each row, and apply the rule to row and slots, in place.

    Args:
      sums: float32 `[P, W]`, W a multiple of `sparsecore.WORDS`; or uint32, packed bfloat16.
      index: int32 `[N]`, the partial sums in the order in which they are added.
      segments: int32 `[N]`, the merged sum of each, from 0 on without gaps; U or more: left out.
      row_ids: int32 `[U]`, the row of each merged sum, all different; `PADDING_ID` for none.
      table: float32 `[R, W]`; or uint32, packed bfloat16.
      slots: float32, `[R, W]` or `[R]` each, in the order of the rule.
      rule: one that the kernel `takes`.
      dim: D, how many numbers of a row count.
      keys: uint32 `[U]`, `stochastic.row_draws` of the rows, to round packed rows at random; None:
        they are rounded to nearest.

    Returns:
      the table and the slots, with these rows changed.
    """
    if not (index.shape[0] and row_ids.shape[0] and sums.shape[0] and table.shape[0]):
        return table, list(slots)
    packed, workers = sums.dtype == jnp.uint32, sparsecore_sums._workers_here()
    columns = [x.shape[1] * (2 if x.dtype == jnp.uint32 else 1) for x in (sums, table)]
    chunk = rules.entries_at_a_time(rule, max(columns), packed)
    bounds = sparsecore_sums.worker_bounds(segments, workers, row_ids.shape[0])
    # No constant, which in the body of a loop over steps aborts libtpu 0.0.42.
    bounds, numbers = jax.lax.optimization_barrier((bounds, rule.operand()))
    operands = [bounds, sums, *_padded(index, segments, row_ids, numbers, chunk)]
    if keys is not None:
        bits = jax.lax.bitcast_convert_type(keys, jnp.int32)
        operands.append(jnp.pad(bits, (0, chunk + AHEAD + 8)))
    form, count = _form(rule, dim), len(slots)

    def kernel(*refs):
        bounds, sums, index, segments, row_ids, numbers, *keys, table = refs[
            : len(refs) - count
        ]
        given = bounds, sums, index, segments, row_ids, numbers
        held = table, refs[len(refs) - count :]
        _update_rows(Work(*given, *held, form, chunk, *keys))

    # Partial sums are read; rows and slots are read and written.
    words = sum(x.size // x.shape[0] for x in (table, *slots))
    moved = 2 * words * min(index.shape[0], row_ids.shape[0])
    size = 4 * (sum(x.size for x in operands) + moved)
    update = sparsecore_sums.on_subcores(kernel, "merge_update", size, ())
    table, *slots = pl.run_state(lambda held: update(*operands, *held))((table, *slots))
    return table, slots


def _padded(
    index: Array, segments: Array, row_ids: Array, numbers: Array, chunk: int
) -> tuple[Array, ...]:
    """Return the numbers of the entries, padded to what copies of whole chunks read."""
    # No worker's bounds include the padding of the entries; `row_ids` may be read behind its end.
    missing = -index.shape[0] % chunk
    return (
        jnp.pad(index, (0, missing)),
        jnp.pad(
            segments,
            (0, missing + rules.LEAST_ENTRIES),
            constant_values=row_ids.shape[0],
        ),
        jnp.pad(row_ids, (0, chunk + AHEAD + 8), constant_values=PADDING_ID),
        jnp.pad(numbers, (0, AHEAD - numbers.shape[0])),
    )


def _form(rule: CompiledRule, dim: int) -> RuleForm:
    """Return what is static of a rule."""
    flag = rule.flag
    if rule.kind in ("adagrad", "rowwise_adagrad"):
        flag = isinstance(rule.numbers[1], (int, float)) and rule.numbers[1] == 0
    return RuleForm(
        kind=rule.kind,
        flag=flag,
        decays=not isinstance(rule.keep, float) or rule.keep != 1,
        clips_gradient=rule.gradient_bounds != (None, None),
        clips_row=rule.weight_bounds != (None, None),
        dim=dim,
    )


def _update_rows(work: Work) -> None:
    """Update the rows of this worker's segments."""

    def update(memory):
        pltpu.sync_copy(work.bounds, memory.bounds)
        pltpu.sync_copy(work.numbers, memory.numbers)

        def one_worker(number):
            near = memory.bounds[pl.ds(number, memory.lanes)]
            _update_range(work, memory, near[0], near[1])

        subcore.on_each_worker(one_worker)

    _with_memory(update, work)


def _update_range(work: Work, memory: Memory, begin, end) -> None:
    """Update the rows of the entries `begin` to `end - 1`, chunk by chunk."""
    chunk, lanes = memory.chunk, memory.lanes
    first = begin // chunk
    chunks = jnp.where(end > begin, (end + chunk - 1) // chunk - first, 0)

    @pl.when(chunks > 0)
    def _():
        # The rows of the first chunk's segments begin with that of its first entry.
        start = pl.ds(first * chunk, lanes)
        pltpu.sync_copy(work.segments.at[start], memory.segments.at[pl.ds(0, lanes)])
        least = memory.segments[pl.ds(0, lanes)][0]
        memory.segments[pl.ds(0, lanes)] = jnp.full(lanes, least, jnp.int32)
        _start(_number_copies(work, memory, first))
        _prepare(work, memory, (begin, end), first, 0, chunks > 1)

        @pl.loop(0, chunks)
        def _(k):
            slot = k & 1

            @pl.when(k > 0)
            def _():
                _wait(_writes(work, memory, 1 - slot))

            @pl.when(k + 1 < chunks)
            def _():
                bounds, number = (begin, end), first + k + 1
                _prepare(work, memory, bounds, number, 1 - slot, k + 2 < chunks)

            _wait(_fetches(work, memory, slot))
            subcore.sum_chunk(memory, slot)
            change_rows(work.form, memory, slot)
            _start(_writes(work, memory, slot))

        _wait(_writes(work, memory, (chunks - 1) & 1))


def _prepare(
    work: Work, memory: Memory, bounds: tuple[Any, Any], number, slot, more
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
    _wait(_number_copies(work, memory, number))
    _mark(memory, bounds, number * memory.chunk, slot)
    _start(_fetches(work, memory, slot))
    # The end of this chunk is what the next chunk's first entry compares its segment with.
    lanes = memory.lanes
    memory.segments[pl.ds(0, lanes)] = memory.segments[pl.ds(memory.chunk, lanes)]

    @pl.when(more)
    def _():
        _start(_number_copies(work, memory, number + 1))


def _mark(memory: Memory, bounds: tuple[Any, Any], offset, slot) -> None:
    """Work out, for every entry of a chunk, what to fetch, where to restart and what to write."""
    # Segments (3, 3, 5 | 5, 6) with rows 3: 40, 5: 70 in a chunk of three: restart at (1, 0, 1),
    # and write to (none, 40, none), because segment 5 goes on in the next chunk.
    lanes, (begin, end) = memory.lanes, bounds
    zeros = jnp.zeros(lanes, jnp.int32)
    nothing, first_row = zeros + PADDING_ID, _aligned(memory.before)
    for start in range(0, memory.chunk, lanes):
        here, entry = (
            pl.ds(start, lanes),
            offset + start + jax.lax.iota(jnp.int32, lanes),
        )
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


def _aligned(segment):
    """Return the greatest position, not above that of a segment, at which a copy may begin."""
    return segment // 8 * 8


# -- what a test replaces to run a worker on a CPU -------------------------------------------------


def _look_up(ref, positions):
    """Return a vector of the numbers of a ref at some positions."""
    return plsc.load_gather(ref, [positions])


def _number_copies(work: Work, memory: Memory, number) -> Sequence[Any]:
    """Return the copies, not started, of a chunk's numbers into the worker's memory."""
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


def _fetches(work: Work, memory: Memory, slot) -> Sequence[Any]:
    """Return the indirect DMAs, not started, that fetch a chunk's partial sums, rows and slots."""
    partials = plsc.Indices(memory.ids.at[slot], ignored_value=PADDING_ID)
    rows = plsc.Indices(memory.targets.at[slot], ignored_value=PADDING_ID)
    pairs = [(work.source.at[partials], memory.rows.at[slot])]
    for held, near in zip(
        (work.table, *work.slots), (memory.table, *memory.slots), strict=True
    ):
        pairs.append((held.at[rows], near.at[slot]))
    return [
        pltpu.make_async_copy(x, target, memory.fetched.at[slot]) for x, target in pairs
    ]


def _writes(work: Work, memory: Memory, slot) -> Sequence[Any]:
    """Return the indirect DMAs, not started, that write a chunk's rows and slots."""
    rows = plsc.Indices(memory.targets.at[slot], ignored_value=PADDING_ID)
    pairs = zip((memory.table, *memory.slots), (work.table, *work.slots), strict=True)
    done = memory.written.at[slot]
    return [
        pltpu.make_async_copy(near.at[slot], held.at[rows], done)
        for near, held in pairs
    ]


_AT_A_TIME = 8
"""The vectors of a row that are loaded before the first of them is stored."""
_UNROLLED = 16
"""The vectors of a row that are changed by one stretch of code: a whole row of 128 by 8 lanes."""


def change_rows(form: RuleForm, memory: Memory, slot: Any) -> None:
    """Change the rows of the segments that end in a chunk."""
    lanes = memory.lanes
    own = memory.numbers[pl.ds(0, lanes)], memory.numbers[pl.ds(lanes, lanes)]

    def number(i):
        return own[i // lanes][i % lanes]

    @pl.loop(0, memory.chunk // lanes)
    def _(vector):
        targets = memory.targets[slot, pl.ds(vector * lanes, lanes)]
        if form.kind == "rowwise_adagrad":
            rates = _row_rates(form, memory, slot, vector, number)
        if memory.row_keys is not None:
            keys = memory.row_keys[slot, pl.ds(vector * lanes, lanes)]
        for j in range(lanes):

            @pl.when(targets[j] >= 0)
            def _(i=vector * lanes + j, j=j):
                rate = rates[j] if form.kind == "rowwise_adagrad" else None
                key = keys[j] if memory.row_keys is not None else None
                _change_row(_Row(form, memory, slot, i, number, rate, key))


class _Row(NamedTuple):
    """A row that is changed.

    Attributes:
      form: the rule.
      memory: the worker's.
      slot: which half of it the chunk uses.
      i: the row's place in the chunk.
      number: the numbers of the rule.
      rate: what row-wise Adagrad multiplies this row's gradient with; None for other rules.
      key: what the random bits of the row depend on; None: it is not rounded at random.
    """

    form: RuleForm
    memory: Memory
    slot: Any
    i: Any
    number: rules.Numbers
    rate: Any
    key: Any

    @property
    def packed(self) -> bool:
        """Whether it is bfloat16, two numbers to a word."""
        return self.memory.table.dtype == jnp.uint32


def _change_row(row: _Row) -> None:
    """Apply the rule to a row."""
    # Vectors of words: first those whose upper halves have numbers that count, then the others. 40
    # numbers are 32 words: 1 vector of 8 with both halves, and 3 of lower halves.
    lanes, words = row.memory.lanes, row.memory.table.shape[2]
    full = max(0, -(-(row.form.dim - words) // lanes)) if row.packed else 0
    each = 2 if row.packed else 1
    for halves, begin, end in [(2, 0, full), (1, full, words // lanes)]:
        most, step = _UNROLLED // each, _AT_A_TIME // each
        for start in range(begin, min(end, most), step):
            _change_vectors(row, range(start, min(start + step, end, most)), halves)
        if end > max(begin, most):
            pl.loop(max(begin, most), end)(
                lambda vector, halves=halves: _change_vectors(row, [vector], halves)
            )


def _change_vectors(row: _Row, vectors: Sequence[Any], halves: int) -> None:
    """Apply the rule to some vectors of the words of a row.

    Args:
      row: the row.
      vectors: their numbers.
      halves: 2 where a word has two numbers; 1: it has one, or its upper half is padding.
    """
    # All loads stand before all stores: the compiler keeps their order.
    memory, at, lanes = row.memory, (row.slot, row.i), row.memory.lanes
    slots = () if row.rate is not None else memory.slots
    here = [vector * lanes for vector in vectors]
    columns = [half * memory.table.shape[2] + c for half in range(halves) for c in here]
    places = [pl.ds(c, lanes) for c in columns]
    given = [_gradient(row.form, memory, *at, place, row.number) for place in places]
    held = [[x[*at, place] for x in slots] for place in places]
    numbers = [memory.table[*at, pl.ds(c, lanes)] for c in here]
    if row.packed:
        both = zip(*map(subcore.unpack_words, numbers), strict=True)
        numbers = [x for half in list(both)[:halves] for x in half]
    new = []
    for column, place, w, old, g in zip(
        columns, places, numbers, held, given, strict=True
    ):
        changed, *after = _changed(row, w, old, g)
        new.append((changed, _draws(row.key, column, lanes)))
        for x, value in zip(slots, after, strict=True):
            x[*at, place] = value
    for n, c in enumerate(here):
        # The lower half of a word and its upper half, if there is one.
        stored = _stored(new[n :: len(here)]) if row.packed else new[n][0]
        memory.table[*at, pl.ds(c, lanes)] = stored


def _changed(row: _Row, w, held: list[Any], g) -> list[Any]:
    """Return a vector of the new row, then one of each slot."""
    form, number = row.form, row.number
    w = rules.times(number(0), w) if form.decays else w
    if row.rate is not None:
        w, new = w - rules.times(g, row.rate), []
    else:
        w, new = rules.RULES[form.kind](w, held, g, number, form.flag)
    w = jnp.minimum(jnp.maximum(w, number(3)), number(4)) if form.clips_row else w
    return [w, *new]


def _stored(halves: Sequence[tuple[Any, Any]]):
    """Return words of the new numbers of both halves, or of the lower one, and their draws."""
    (lower, drawn), (upper, other) = (
        halves if len(halves) == 2 else (*halves, (None, None))
    )
    return subcore.pack_words(lower, upper, (drawn, other))


def _draws(key, column, lanes: int):
    """Return the random bits of a row's numbers from a column on; None without a key."""
    if key is None:
        return None
    numbers = jnp.full(lanes, key + column, jnp.int32) + jax.lax.iota(jnp.int32, lanes)
    return stochastic.mix(jax.lax.bitcast_convert_type(numbers, jnp.uint32))


def _gradient(form: RuleForm, memory: Memory, slot, i, here, number: rules.Numbers):
    """Return a vector of the whole gradient of the row at place `i`, clipped."""
    g = memory.sums[slot, i, here]
    return (
        jnp.minimum(jnp.maximum(g, number(1)), number(2)) if form.clips_gradient else g
    )


def _row_rates(form: RuleForm, memory: Memory, slot, vector, number: rules.Numbers):
    """Add to the accumulators of a vector of rows; return lr / (root of these + epsilon)."""
    lanes = memory.lanes
    here, lane = pl.ds(vector * lanes, lanes), jax.lax.iota(jnp.int32, memory.lanes)
    means = jnp.zeros(lanes, jnp.float32)
    for j in range(lanes):
        total = _sum_of_squares(form, memory, slot, vector * lanes + j, number)
        means = jnp.where(
            lane == j, rules.times(total, jnp.float32(1.0 / form.dim)), means
        )
    a = memory.slots[0][slot, here] + means
    memory.slots[0][slot, here] = a
    return number(5) * rules.over_root(a, None if form.flag else number(6))


def _sum_of_squares(form: RuleForm, memory: Memory, slot, i, number: rules.Numbers):
    """Return the sum of a row's squared gradients, in the order of `optimizers.row_sum`."""
    lanes, squares = memory.lanes, []
    for start in range(0, form.dim, lanes):
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

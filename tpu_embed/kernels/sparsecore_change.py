"""Change the rows of a chunk by an optimizer's rule, in a vector subcore's memory.

Input: running sums, and at the last entry of every segment its row and slots. Output: new rows and
slots, in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpu_embed.kernels import sparsecore_rounding, stochastic
from tpu_embed.kernels import sparsecore_rules as rules
from tpu_embed.kernels.sparsecore_memory import Memory, RuleForm

_AT_A_TIME = 8
"""The vectors of a row that are loaded before the first of them is stored."""
_UNROLLED = 16
"""The vectors of a row that are changed by one stretch of code: a whole row of 128 by 8 lanes."""


def change_rows(form: RuleForm, memory: Memory, slot: Any) -> None:
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
        if memory.row_keys is not None:
            keys = memory.row_keys[slot, pl.ds(vector * lanes, lanes)]
        for j in range(lanes):

            @pl.when(targets[j] >= 0)
            def _(i: Any = vector * lanes + j, j: int = j) -> None:
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
    from jax.experimental import pallas as pl

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
    from jax.experimental import pallas as pl

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
        both = zip(*map(sparsecore_rounding.unpacked, numbers), strict=True)
        numbers = [x for half in list(both)[:halves] for x in half]
    new = []
    for column, place, w, old, g in zip(columns, places, numbers, held, given, strict=True):
        changed, *after = _changed(row, w, old, g)
        new.append((changed, _draws(row.key, column, lanes)))
        for x, value in zip(slots, after, strict=True):
            x[*at, place] = value
    for n, c in enumerate(here):
        # The lower half of a word and its upper half, if there is one.
        stored = _stored(new[n :: len(here)]) if row.packed else new[n][0]
        memory.table[*at, pl.ds(c, lanes)] = stored


def _changed(row: _Row, w: Any, held: list[Any], g: Any) -> list[Any]:
    """Return a vector of the new row, then one of each slot."""
    form, number = row.form, row.number
    w = rules.times(number(0), w) if form.decays else w
    if row.rate is not None:
        w, new = w - rules.times(g, row.rate), []
    else:
        w, new = rules.RULES[form.kind](w, held, g, number, form.flag)
    w = jnp.minimum(jnp.maximum(w, number(3)), number(4)) if form.clips_row else w
    return [w, *new]


def _stored(halves: Sequence[tuple[Any, Any]]) -> Any:
    """Return words of the new numbers of both halves, or of the lower one, and their draws."""
    (lower, drawn), (upper, other) = halves if len(halves) == 2 else (*halves, (None, None))
    return sparsecore_rounding.packed(lower, upper, (drawn, other))


def _draws(key: Any, column: Any, lanes: int) -> Any:
    """Return the random bits of a row's numbers from a column on; None without a key."""
    if key is None:
        return None
    numbers = jnp.full(lanes, key + column, jnp.int32) + jax.lax.iota(jnp.int32, lanes)
    return stochastic.mix(jax.lax.bitcast_convert_type(numbers, jnp.uint32))


def _gradient(
    form: RuleForm, memory: Memory, slot: Any, i: Any, here: Any, number: rules.Numbers
) -> Any:
    """Return a vector of the whole gradient of the row at place `i`, clipped."""
    g = memory.sums[slot, i, here]
    return jnp.minimum(jnp.maximum(g, number(1)), number(2)) if form.clips_gradient else g


def _row_rates(
    form: RuleForm, memory: Memory, slot: Any, vector: Any, number: rules.Numbers
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


def _sum_of_squares(form: RuleForm, memory: Memory, slot: Any, i: Any, number: rules.Numbers):
    """Return the sum of a row's squared gradients, in the order of `optimizers.row_sum`."""
    from jax.experimental import pallas as pl

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

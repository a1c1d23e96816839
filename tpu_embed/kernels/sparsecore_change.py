"""Change the rows of a chunk by an optimizer's rule, in a vector subcore's memory.

Input: running sums, and at the last entry of every segment its row and slots. Output: new rows and
slots, in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
                _change_row(form, memory, slot, i, number, rate, key)


def _change_row(
    form: RuleForm, memory: Memory, slot: Any, i: Any, number: rules.Numbers, rate: Any, key: Any
) -> None:
    """Apply the rule to the row at place `i`.

    Args:
      form: the rule.
      memory: the worker's.
      slot: which half of it the chunk uses.
      i: the place.
      number: the numbers of the rule.
      rate: what row-wise Adagrad multiplies this row's gradient with; else None.
      key: what the random bits of the row depend on; None: it is not rounded at random.
    """
    from jax.experimental import pallas as pl

    lanes, slots = memory.lanes, () if rate is not None else memory.slots
    words, packed = memory.table.shape[2], memory.table.dtype == jnp.uint32

    def changed(w: Any, held: list[Any], g: Any) -> list[Any]:
        w = rules.times(number(0), w) if form.decays else w
        if rate is not None:
            w, new = w - rules.times(g, rate), []
        else:
            w, new = rules.RULES[form.kind](w, held, g, number, form.flag)
        w = jnp.minimum(jnp.maximum(w, number(3)), number(4)) if form.clips_row else w
        return [w, *new]

    def change(vectors: Any, halves: int) -> None:
        # All loads stand before all stores: the compiler keeps their order.
        here = [vector * lanes for vector in vectors]
        columns = [half * words + c for half in range(halves) for c in here]
        places = [pl.ds(c, lanes) for c in columns]
        given = [_gradient(form, memory, slot, i, place, number) for place in places]
        held = [[x[slot, i, place] for x in slots] for place in places]
        rows = [memory.table[slot, i, pl.ds(c, lanes)] for c in here]
        if packed:
            both = zip(*map(sparsecore_rounding.unpacked, rows), strict=True)
            rows = [x for half in list(both)[:halves] for x in half]
        new = []
        for place, w, old, g in zip(places, rows, held, given, strict=True):
            row, *after = changed(w, old, g)
            new.append((row, _draws(key, columns[len(new)], lanes)))
            for x, value in zip(slots, after, strict=True):
                x[slot, i, place] = value
        for n, c in enumerate(here):
            stored = _stored(new[n :: len(here)]) if packed else new[n][0]
            memory.table[slot, i, pl.ds(c, lanes)] = stored

    # Vectors of words, first those whose upper halves have numbers that count.
    full = max(0, -(-(form.dim - words) // lanes)) if packed else 0
    each = 2 if packed else 1
    for halves, begin, end in [(2, 0, full), (1, full, words // lanes)]:
        most, step = _UNROLLED // each, _AT_A_TIME // each
        for start in range(begin, min(end, most), step):
            change(range(start, min(start + step, end, most)), halves)
        if end > max(begin, most):
            pl.loop(max(begin, most), end)(lambda vector, halves=halves: change([vector], halves))


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
    """Return the sum of a row's squared gradients, in the order of `optimizers.row_sums`."""
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

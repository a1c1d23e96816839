"""Change the rows of a chunk by an optimizer's rule, in a vector subcore's memory.

Input: running sums, and at the last entry of every segment its row and slots. Output: new rows and
slots, in their place.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

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
        for j in range(lanes):

            @pl.when(targets[j] >= 0)
            def _(i: Any = vector * lanes + j, j: int = j) -> None:
                if form.kind == "rowwise_adagrad":
                    _change_row(form, memory, slot, i, number, rates[j])
                else:
                    _change_row(form, memory, slot, i, number)


def _change_row(
    form: RuleForm, memory: Memory, slot: Any, i: Any, number: rules.Numbers, rate: Any = None
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

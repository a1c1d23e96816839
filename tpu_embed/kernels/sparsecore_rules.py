"""Optimizers' rules as a TPU's vector subcore computes them, on vectors of a few numbers.

A subcore adds and multiplies float32 numbers with correct rounding, in the order of the CPU's
rules, so SGD and Momentum have the CPU's bits. It has no root, and dividing costs more than all the
rest, so Adagrad and Adam multiply with a reciprocal root found by Newton's method: their slots have
the CPU's bits, and a step differs from the CPU's by at most `STEP_ERROR` of itself.

Input: vectors of a row, its slots and its gradient, and the numbers of a `CompiledRule`. Output:
vectors of the new row and its new slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed.kernels.operands import CompiledRule

KINDS = ("sgd", "momentum", "adagrad", "rowwise_adagrad", "adam")
"""The kinds of `CompiledRule` that the subcores know. FTRL is not among them: it takes the
difference of two roots, in which their errors would be many times as large."""

STEP_ERROR = 1.1e-6
"""The greatest relative error of a step, for accumulators from 2⁻¹²⁵ to the greatest float32: the
reciprocal root is off by at most 4.8e-7 (of all mantissas), the reciprocal by 2⁻²², and at most six
more roundings by 2⁻²⁴ each."""

_OWN = 5
"""Where the rule's own numbers begin in `CompiledRule.operand`."""

_GREATEST = float(np.finfo(np.float32).max)

_MOST_ENTRIES, LEAST_ENTRIES = 128, 16
"""The most and the fewest entries of a chunk; the fewest are one vector of the widest subcore."""
_MOST_WORDS = 48 * 1024
"""The most words of a subcore's memory for rows, 192 KiB of 256 KiB or more."""

Numbers = Callable[[int], Any]
"""Gives a number of `CompiledRule.operand`, as a scalar."""


def takes(rule: CompiledRule, width: int, packed: bool = False) -> bool:
    """Return whether the kernel knows a rule, and has room for its rows.

    Args:
      rule: the rule.
      width: the numbers of a row as it is packed, or of its sum if these are more.
      packed: whether partial sums are bfloat16, two to a word.
    """
    return (
        rule.kind in KINDS and entries_at_a_time(rule, width, packed) >= LEAST_ENTRIES
    )


def entries_at_a_time(rule: CompiledRule, width: int, packed: bool) -> int:
    """Return the entries of a chunk, a power of two, or less than the fewest: no room."""
    # Two chunks, each of partial sums (packed ones and their sums take more), rows and slots.
    wide = 2 + len(rule.slots) * (rule.kind != "rowwise_adagrad") + packed / 2
    chunk = _MOST_ENTRIES
    while chunk >= LEAST_ENTRIES and 2 * chunk * width * wide > _MOST_WORDS:
        chunk //= 2
    return chunk


def sgd(w, slots, g, number, flag):
    """Return w - lr g."""
    del slots, flag
    return w - times(number(_OWN), g), []


def momentum(w, slots, g, number, flag):
    """Return w - lr m for m = μ m + g, or with Nesterov's step w - lr (g + μ m)."""
    mu = number(_OWN + 1)
    m = times(mu, slots[0]) + g
    return w - times(number(_OWN), g + times(mu, m) if flag else m), [m]


def adagrad(w, slots, g, number, flag):
    """Return w - lr g / (√a + ε) for a = a + g²; `flag` says whether ε is zero."""
    a = slots[0] + times(g, g)
    root = over_root(a, None if flag else number(_OWN + 1))
    return w - times(number(_OWN) * g, root), [a]


def adam(w, slots, g, number, flag):
    """Return w - α m / √(v + ε) for moving averages m and v; without `flag`, α m / (√v + ε)."""
    alpha, epsilon, keep_m, take_m, keep_v, take_v = (
        number(_OWN + i) for i in range(6)
    )
    m = times(keep_m, slots[0]) + times(take_m, g)
    v = times(keep_v, slots[1]) + times(take_v, times(g, g))
    root = over_root(v + epsilon, None) if flag else over_root(v, epsilon)
    return w - times(alpha * m, root), [m, v]


times = jnp.multiply
"""A product that is rounded before it is added, as a subcore does: it has no fused multiply-add. A
test on a CPU, whose compiler may fuse them, replaces it."""

RULES: dict[
    str, Callable[[Any, Sequence[Any], Any, Numbers, bool], tuple[Any, list[Any]]]
]
RULES = {"sgd": sgd, "momentum": momentum, "adagrad": adagrad, "adam": adam}
"""Those that change every number of a row by itself."""


def over_root(a: Any, epsilon: Any) -> Any:
    """Return 1 / (√a + ε); without ε, 1 / √a. Infinity counts as the greatest finite number."""
    a = jnp.minimum(a, _GREATEST)
    root = _reciprocal_root(a)
    return root if epsilon is None else _reciprocal(a * root + epsilon)


def _reciprocal_root(a):
    """Return 1 / √a of a finite number; of zero a large one, so that 0 / √0 is 0."""
    # Half the exponent, negated, and a line through the mantissa; then Newton's step twice. A plain
    # step has errors of one sign only, which these constants halve: the first leaves 1.3595 / √a
    # within 2⁻¹⁰·⁵, and the second takes the factor away.
    y = _float(jnp.int32(0x5F1D3788) - (_bits(a) >> 1))
    y = y * (2.3203299 - a * y * y)
    return y * (1.103322 - 0.19897698 * (a * y * y))


def _reciprocal(d):
    """Return 1 / d for a positive d."""
    y = _float(jnp.int32(0x7EF311C3) - _bits(d))
    for _ in range(3):
        y = y * (2.0 - d * y)
    return y


def _bits(x):
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _float(bits):
    return jax.lax.bitcast_convert_type(bits, jnp.float32)

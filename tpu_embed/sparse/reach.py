"""Which inputs of a jaxpr reach which of its outputs along differentiable equations.

A gradient can only be nonzero where there is such a path. Without a path to the result an argument
has no gradient, and a lookup touches no row.

An equation leads from its float and complex operands to its float and complex results.
`stop_gradient`, floor, ceil and round cut the path. Paths are followed into calls, conds, scans and
whiles. Any other equation with a program inside, such as a custom rule, is opaque: each of its
operands reaches each of its results.

Input: a jaxpr, and for each of its inputs the sources that it stands for.
Output: the sources that reach each output.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from tpu_embed._jaxprs import CALLS, REMATS, Inner, flow, inner_jaxprs, scan_counts


class Sources(NamedTuple):
    """Two sets of sources, each an integer with one bit per source.

    Attributes:
      reached: the sources that reach a value.
      looped: those of them with a path through a `while`, whose trip count is not known.
    """

    reached: int = 0
    looped: int = 0

    def __or__(self, other: Sources) -> Sources:
        """Return the union."""
        return Sources(self.reached | other.reached, self.looped | other.looped)


NOTHING = Sources()


def propagate(jaxpr: Any, sources: Sequence[Sources]) -> list[Sources]:
    """Return the sources that reach each output.

    Args:
      jaxpr: an open jaxpr.
      sources: the sources of each input; those of integer inputs reach nothing.
    """

    def step(eqn: Any, operands: list[Sources]) -> dict[Any, Sources]:
        references = list(filter(_is_reference, eqn.invars))
        if references:
            # What is written into a reference may be read from it later, so it counts as a result.
            return _inexact(dict.fromkeys([*references, *eqn.outvars], _union(operands)))
        rule = _RULES.get(eqn.primitive.name, _opaque)
        return _inexact(dict(zip(eqn.outvars, rule(eqn, operands), strict=True)))

    return flow(jaxpr, _inexact(dict(zip(jaxpr.invars, sources, strict=True))), step, NOTHING)


def _enter(inner: Inner, operands: Sequence[Sources]) -> list[Sources]:
    return propagate(inner.jaxpr, list(inner.marks(operands).values()))


def _inexact(sources: Mapping[Any, Sources]) -> dict[Any, Sources]:
    """Return the sources of those variables that are floats or complex numbers."""
    return {var: one for var, one in sources.items() if _is_inexact(var)}


def _is_inexact(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _is_reference(atom: Any) -> bool:
    return getattr(atom.aval, "inner_aval", None) is not None


def _union(sources: Iterable[Sources]) -> Sources:
    return functools.reduce(operator.or_, sources, NOTHING)


# -- one rule per primitive: from the sources of its operands to those of its results --------------

Rule = Callable[[Any, list[Sources]], Sequence[Sources]]


def _opaque(eqn: Any, operands: list[Sources]) -> list[Sources]:
    return [_union(operands)] * len(eqn.outvars)


def _cut(eqn: Any, operands: list[Sources]) -> list[Sources]:
    return [NOTHING] * len(eqn.outvars)


def _one_to_one(eqn: Any, operands: list[Sources]) -> list[Sources]:
    return operands


def _call(eqn: Any, operands: list[Sources]) -> list[Sources]:
    # A call runs one program, a cond one of several.
    results = [_enter(inner, operands) for inner in inner_jaxprs(eqn)]
    return [_union(same) for same in zip(*results, strict=True)]


def _loop(
    body: Any, before: list[Sources], carry: list[Sources], after: list[Sources]
) -> tuple[list[Sources], list[Sources]]:
    """Return the sources of a loop's carry at a fixed point, and those of its other results.

    The sources of the first carry are included, since it is the result of a loop that runs zero
    times.
    """
    # body (a, b) -> (b, x) with the sources a: {}, b: {}, x: {1}: after one walk b has {1}, after
    # two a has it as well, and the third changes nothing. Sets only grow, so this ends.
    while True:
        results = _enter(body, [*before, *carry, *after])
        grown = [a | b for a, b in zip(carry, results, strict=False)]
        if grown == carry:
            return carry, results[len(carry) :]
        carry = grown


def _scan(eqn: Any, operands: list[Sources]) -> list[Sources]:
    fixed, carried = scan_counts(eqn)
    first, rest = operands[fixed : fixed + carried], operands[fixed + carried :]
    (body,) = inner_jaxprs(eqn)
    carry, ys = _loop(body, operands[:fixed], first, rest)
    return [*carry, *ys]


def _while(eqn: Any, operands: list[Sources]) -> list[Sources]:
    # Operands are [constants of cond, constants of body, first carry]. The condition is a boolean,
    # so nothing is differentiated through it.
    _, body = inner_jaxprs(eqn)
    first = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    carry, _ = _loop(body, operands[:first], operands[first:], [])
    return [Sources(one.reached, one.reached) for one in carry]


_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("stop_gradient", "stopped", "floor", "ceil", "round"), _cut),
    **dict.fromkeys(("tag", "optimization_barrier"), _one_to_one),
    **dict.fromkeys((*CALLS, *REMATS, "cond"), _call),
    "scan": _scan,
    "while": _while,
}

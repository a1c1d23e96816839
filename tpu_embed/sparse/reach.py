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

from tpu_embed._jaxprs import CALLS, REMATS, flow, inner_jaxprs, scan_counts


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


def propagate(jaxpr: Any, sources: Mapping[Any, Sources] | None = None) -> list[Sources]:
    """Return the sources that reach each output.

    Args:
      jaxpr: an open jaxpr.
      sources: the sources of each input; those of integer inputs reach nothing. None: each input
        is a source of its own, whose bit is its number.
    """
    if sources is None:
        sources = {var: Sources(1 << i) for i, var in enumerate(jaxpr.invars)}

    def step(eqn: Any, operands: list[Sources]) -> dict[Any, Sources]:
        # What is written into a reference may be read from it later, so it counts as a result.
        references = [
            one for one in eqn.invars if getattr(one.aval, "inner_aval", None) is not None
        ]
        if references:
            return _inexact(dict.fromkeys([*references, *eqn.outvars], union(operands)))
        rule = _RULES.get(eqn.primitive.name, _opaque)
        return _inexact(dict(zip(eqn.outvars, rule(eqn, operands), strict=True)))

    return flow(jaxpr, _inexact(sources), step, NOTHING)


def _inexact(sources: Mapping[Any, Sources]) -> dict[Any, Sources]:
    """Return the sources of those variables that are floats or complex numbers."""
    # A token has no dtype. Booleans have one that is not inexact either.
    return {
        var: some
        for var, some in sources.items()
        if jnp.issubdtype(getattr(var.aval, "dtype", bool), jnp.inexact)
    }


def union(sources: Iterable[Sources]) -> Sources:
    """Return what is in any of some sets of sources."""
    return functools.reduce(operator.or_, sources, NOTHING)


# -- one rule per primitive: from the sources of its operands to those of its results --------------

Rule = Callable[[Any, list[Sources]], Sequence[Sources]]


def _opaque(eqn: Any, operands: list[Sources]) -> list[Sources]:
    return [union(operands)] * len(eqn.outvars)


def _call(eqn: Any, operands: list[Sources]) -> list[Sources]:
    # A call runs one program, a cond one of several.
    results = [propagate(inner.jaxpr, inner.marks(operands)) for inner in inner_jaxprs(eqn)]
    return [union(same) for same in zip(*results, strict=True)]


def _loop(eqn: Any, operands: list[Sources]) -> list[Sources]:
    """Return the sources of a loop's last carry, and those of the other results of a scan.

    The sources of the first carry are included, since it is the result of a loop that runs zero
    times.
    """
    # The operands of a scan are [constants, first carry, xs], those of a while [constants of cond,
    # constants of body, first carry]. The condition is a boolean, so nothing is differentiated
    # through it.
    *conditions, body = inner_jaxprs(eqn)
    if conditions:
        start = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        end = len(operands)
    else:
        start, carried = scan_counts(eqn)
        end = start + carried
    # body (a, b) -> (b, x) with the sources a: {}, b: {}, x: {1}: after one walk b has {1}, after
    # two a has it as well, and the third changes nothing. Sets only grow, so this ends.
    while True:
        results = propagate(body.jaxpr, body.marks(operands))
        carry = [a | b for a, b in zip(operands[start:end], results, strict=False)]
        if carry == operands[start:end]:
            break
        operands = [*operands[:start], *carry, *operands[end:]]
    if conditions:
        return [Sources(one.reached, one.reached) for one in carry]
    return [*carry, *results[end - start :]]


_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(
        ("stop_gradient", "stopped", "floor", "ceil", "round"),
        lambda eqn, _: [NOTHING] * len(eqn.outvars),
    ),
    **dict.fromkeys(("tag", "optimization_barrier"), lambda _, operands: operands),
    **dict.fromkeys((*CALLS, *REMATS, "cond"), _call),
    **dict.fromkeys(("scan", "while"), _loop),
}

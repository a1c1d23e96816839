"""Reading traced programs, whatever the release of JAX.

Enters: equations of a jaxpr. Leaves: their parts, and their results. So can a user's function be
followed equation by equation, or rerun with something added to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

__all__ = ["CALLS", "REMATS", "evaluate", "inner_jaxpr", "scan_counts", "subjaxprs"]

CALLS = ("jit", "pjit", "closed_call", "core_call")
"""Primitives that call a jaxpr; their names have changed between releases."""
REMATS = ("checkpoint", "remat2")
"""Primitives that call one, and once more in the backward pass."""


def evaluate(jaxpr: Any, eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Return the results of one equation of a jaxpr.

    Args:
      jaxpr: an open jaxpr.
      eqn: of it.
      values: of the equation's operands.
    """
    operands = zip(eqn.invars, values, strict=True)
    given = {var: value for var, value in operands if not isinstance(var, Literal)}
    alone = jaxpr.replace(
        constvars=[],
        invars=list(given),
        outvars=list(eqn.outvars),
        eqns=[eqn],
        effects=eqn.effects,
    )
    return jaxpr_as_fun(ClosedJaxpr(alone, ()))(*given.values())


def inner_jaxpr(eqn: Any) -> tuple[Any, Sequence[Any]]:
    """Return the open jaxpr of an equation that calls one, and its constants."""
    called = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return (called.jaxpr, called.consts) if hasattr(called, "consts") else (called, ())


def scan_counts(eqn: Any) -> tuple[int, int]:
    """Return how many operands of a scan are constants, and how many its carry."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    fixed, carried, _ = eqn.params["ft_in"].unpack()  # later releases of JAX
    return len(fixed), len(carried)


def subjaxprs(eqn: Any) -> Iterator[Any]:
    """Yield the open jaxprs among the parameters of an equation."""
    for value in eqn.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(one, "jaxpr", one)
            if hasattr(inner, "eqns"):
                yield inner

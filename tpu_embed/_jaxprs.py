"""Read traced programs (jaxprs), across the releases of JAX that name their parts differently.

A jaxpr is a list of equations, each a primitive with operands and results. With these functions a
user's program can be followed equation by equation, or run again with something added to it.

Input: equations of a jaxpr. Output: their parts, or their results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

CALLS = ("jit", "pjit", "closed_call", "core_call")
"""Primitives that call another jaxpr, by all names that they had in some release."""
REMATS = ("checkpoint", "remat2")
"""Primitives that call another jaxpr, and call it again in the backward pass."""


def checkpoint_like(eqn: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function under `jax.checkpoint`, with the options of a remat equation."""
    keep = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
    return jax.checkpoint(function, **keep)


def evaluate(jaxpr: Any, eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Return the results of one equation of a jaxpr.

    Args:
      jaxpr: an open jaxpr.
      eqn: one of its equations.
      values: the values of the equation's operands.
    """
    # Make a jaxpr of this equation alone. Its inputs are the operands that are variables, each
    # once: x * x has one input. Literals are part of the equation.
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
    """Return how many operands of a scan are constants, and how many are the initial carry."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    # Later releases of JAX keep the operands as trees: constants, carry, scanned arrays.
    fixed, carried, _ = eqn.params["ft_in"].unpack()
    return len(fixed), len(carried)


def scan_like(
    eqn: Any, body: Callable[[Any, Any], tuple[Any, Any]], first: Any, xs: Any
) -> tuple[Any, Any]:
    """Return the last carry and the ys of a body, scanned with the options of a scan equation.

    Args:
      eqn: an equation that is a scan.
      body: maps (carry, x) to (carry, y).
      first: the initial carry.
      xs: what is scanned over.
    """
    keep = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    return jax.lax.scan(body, first, xs, **keep)


def subjaxprs(eqn: Any) -> Iterator[Any]:
    """Yield the open jaxprs among the parameters of an equation."""
    # A parameter may be a jaxpr, a closed jaxpr (which has `.jaxpr`), or a tuple of branches.
    for value in eqn.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(one, "jaxpr", one)
            if hasattr(inner, "eqns"):
                yield inner

"""Find the lookups of a traced function, and run it again with a tap at each of them.

A tap is a further input in the shape of a lookup's result, whose gradient is that of the rows that
were looked up. A lookup inside a scan has one tap for all iterations, stacked. A lookup in a branch
of a cond returns padding for ids when another branch is taken.

Input: a jaxpr, and which of its inputs are tables.
Output: their lookups in program order (`find_lookups`); the results of the jaxpr and the ids and
weights of each lookup (`run_with_taps`).
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.sharding import AxisType

from tpu_embed._jaxprs import (
    CALLS,
    REMATS,
    checkpoint_like,
    evaluate,
    inner_jaxpr,
    scan_counts,
    scan_like,
    subjaxprs,
)
from tpu_embed._types import PADDING_ID, Array, Tracer
from tpu_embed.kernels.varying import as_varying, axes_of, varying_axes
from tpu_embed.sparse.engine_lookup import engine_lookup_p, opened_p
from tpu_embed.sparse.lookup import lookup_p

Tables = dict[Any, int]
"""Variable of a jaxpr that holds a table -> the number of the table."""
Asked = tuple[Array, ...]
"""The operands of a lookup that say what to look up: ids, and weights if it has any."""

LOOKUPS: Mapping[Any, Callable[[Any], int]] = {
    lookup_p: lambda eqn: 1,
    engine_lookup_p: lambda eqn: 1 + eqn.params["call"].weighted,
}
"""Primitive of a lookup -> how many of its operands are ids and weights."""


class Lookup(NamedTuple):
    """One lookup of a table.

    Attributes:
      table: the number of the table.
      eqn: the equation; its second operand is the ids, the third may be weights.
      lead: the numbers of iterations of the scans around it, outermost first.
    """

    table: int
    eqn: Any
    lead: tuple[int, ...]

    def tap(self) -> Array:
        """Return the lookup's tap: zeros like its result."""
        return self._full(self.eqn.outvars[0].aval, 0)

    def nothing(self) -> Asked:
        """Return ids that are all padding, and weights of zero."""
        ids, *weights = (var.aval for var in asked(self.eqn, self.eqn.invars))
        return (self._full(ids, PADDING_ID), *(self._full(aval, 0) for aval in weights))

    def _full(self, aval: Any, value: int) -> Array:
        shape = (*self.lead, *aval.shape)
        return as_varying(jnp.full(shape, value, aval.dtype), axes_of(aval))


def asked(eqn: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Return the operands of a lookup that are its ids and, if it has any, weights."""
    # lookup_p: (table, ids) -> (ids,). engine_lookup_p: (step, ids, weights, tables…) -> (ids,
    # weights).
    return tuple(operands[1 : 1 + LOOKUPS[eqn.primitive](eqn)])


class FoundLookups(NamedTuple):
    """The lookups of some tables in program order.

    Attributes:
      lookups: the lookups.
      passed: position of a result of the program that is a table itself -> number of the table.
    """

    lookups: list[Lookup]
    passed: dict[int, int]


def find_lookups(jaxpr: Any, tables: Tables) -> FoundLookups:
    """List the lookups of tables.

    Args:
      jaxpr: an open jaxpr.
      tables: the variables of the jaxpr that are tables.
    """
    tables, lookups = dict(tables), []
    for eqn in jaxpr.eqns:
        held = _held(eqn, tables)
        if not held:
            continue
        if eqn.primitive in LOOKUPS:
            if 0 in held:
                lookups.append(Lookup(held[0], eqn, ()))
        elif eqn.primitive.name in _STEPS:
            inside = _STEPS[eqn.primitive.name].find(eqn, tables)
            lookups += inside.lookups
            # A jit may return its table: the variable outside is then a table as well.
            tables |= {eqn.outvars[i]: number for i, number in inside.passed.items()}
        elif eqn.primitive.name in _SAME:
            tables[eqn.outvars[0]] = tables[eqn.invars[0]]
    return FoundLookups(lookups, _among(jaxpr.outvars, tables))


def count_lookups(jaxpr: Any, tables: Tables) -> collections.Counter[int]:
    """Count, per table, the lookups reachable from it.

    These are the lookups in the table and in whatever is computed from it, also inside of equations
    that `find_lookups` does not enter.

    Args:
      jaxpr: an open jaxpr.
      tables: the variables of the jaxpr that are tables.
    """
    return _count(jaxpr, {var: frozenset([number]) for var, number in tables.items()})


def _count(jaxpr: Any, sources: dict[Any, frozenset[int]]) -> collections.Counter[int]:
    """Count, per table, the lookups reachable from it; `sources` are the tables of a variable."""
    sources, counts = dict(sources), collections.Counter()
    for eqn in jaxpr.eqns:
        operands = [
            frozenset() if isinstance(var, Literal) else sources.get(var, frozenset())
            for var in eqn.invars
        ]
        together = frozenset().union(*operands)
        if not together:
            continue
        if eqn.primitive in LOOKUPS or eqn.primitive is opened_p:
            counts.update(operands[0])
        for inner in subjaxprs(eqn):
            # A cond's index, and a while's constants of the other jaxpr, come before the operands
            # that are passed in: the last n belong to the n inputs. With fewer operands than
            # inputs, any operand may be any input.
            n = len(inner.invars)
            given = operands[len(operands) - n :] if n <= len(operands) else [together] * n
            counts += _count(inner, dict(zip(inner.invars, given, strict=True)))
        sources |= dict.fromkeys(eqn.outvars, together)
    return counts


class Taps(NamedTuple):
    """Further inputs that a program is run with.

    Attributes:
      taps: one tap per lookup, in program order, as `Lookup.tap` makes them.
      arrays: the tables that the lookups read, by number. They are separate from the program's own
        inputs, so that the derivative by such an input covers only the table's other uses.
    """

    taps: list[Array]
    arrays: Mapping[int, Array]


def run_with_taps(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], tables: Tables, given: Taps
) -> tuple[list[Any], list[Asked]]:
    """Evaluate a jaxpr with a tap at each lookup.

    Args:
      jaxpr: an open jaxpr.
      consts: the values of its constants.
      args: the values of its inputs.
      tables: the variables of the jaxpr that are tables.
      given: the taps, and the tables that the lookups read.

    Returns:
      the results; the ids and weights of every lookup.
    """
    tables, taps = dict(tables), list(given.taps)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    ids: list[Asked] = []

    def read(var: Any) -> Any:
        return var.val if isinstance(var, Literal) else env[var]

    for eqn in jaxpr.eqns:
        values, held = [read(var) for var in eqn.invars], _held(eqn, tables)
        step = _STEPS.get(eqn.primitive.name)
        if 0 in held and eqn.primitive in LOOKUPS:
            table = as_varying(given.arrays[held[0]], axes_of(eqn.invars[0].aval))
            (found,) = evaluate(jaxpr, eqn, [table, *values[1:]])
            results = [tapped(found, taps.pop(0))]
            ids.append(_known_after(found, asked(eqn, values)))
        elif held and step is not None:
            found = step.find(eqn, tables)
            mine, taps = taps[: len(found.lookups)], taps[len(found.lookups) :]
            results, inside = step.run(eqn, values, tables, given._replace(taps=mine))
            ids += inside
            tables |= {eqn.outvars[i]: number for i, number in found.passed.items()}
        else:
            results = evaluate(jaxpr, eqn, values)
            if held and eqn.primitive.name in _SAME:
                tables[eqn.outvars[0]] = tables[eqn.invars[0]]
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(var) for var in jaxpr.outvars], ids


def _known_after(found: Array, operands: Asked) -> Asked:
    """Return the ids and weights of a lookup, with ids that depend on the lookup's result.

    This makes the update, which uses the ids, depend on the lookup; otherwise XLA copies the table.
    Each bag's ids get a zero added that XLA cannot recognise as a zero. An optimization barrier
    does not help, since XLA removes it before it decides about copies.
    """
    # result [B, …, D] -> first number of each bag, [B, …] -> as int32 bits -> zeros, one per entry
    # of the first axis of ids.
    ids, *weights = operands
    if not isinstance(ids, Tracer) or not ids.ndim or 0 in found.shape or _is_explicit(found):
        return operands
    first = jax.lax.stop_gradient(found)[(..., *[0] * (found.ndim - 1))].astype(jnp.float32)
    zeros = _zeros(jax.lax.bitcast_convert_type(first, jnp.int32), ids.dtype)
    # The packed ids of a placed batch are [devices, words]: one zero per device. A batch that only
    # some mesh axes split may have fewer bags than there are devices.
    even = zeros.size % ids.shape[0] == 0
    parts = zeros.reshape(ids.shape[0], -1)[:, 0] if even else jnp.max(zeros)[None]
    return (ids + parts.reshape(-1, *[1] * (ids.ndim - 1)), *weights)


def known_after(operands: Asked, other: Asked) -> Asked:
    """Return the ids and weights of a lookup, with ids that depend on those of another lookup.

    An update that uses only this lookup then also comes after the other lookup of the same table.

    Args:
      operands: the ids and weights of the lookup.
      other: those of the other lookup, as `run_with_taps` returns them.
    """
    (ids, *weights), later = operands, other[0]
    traced = isinstance(later, Tracer) and later.size
    if not traced or not varying_axes(later) <= varying_axes(ids):
        return operands
    return (ids + _zeros(jnp.max(later), ids.dtype), *weights)


def _zeros(bits: Array, dtype: Any) -> Array:
    """Return zeros that are computed from integers, so that XLA cannot recognise them as zeros."""
    # Without the sign bit a number is never negative, so its minimum with 0 is 0.
    return jnp.minimum(bits & 0x7FFFFFFF, 0).astype(dtype)


def _is_explicit(array: Array) -> bool:
    """Return whether the array's mesh has explicit axes, which do not allow the reshapes here."""
    kinds = jax.typeof(array).sharding.mesh.axis_types
    return any(kind == AxisType.Explicit for kind in kinds)


@jax.custom_jvp
def tapped(value: Array, tap: Array) -> Array:
    """Return the value unchanged; its gradient goes to the tap too, which has the same type."""
    return value


@tapped.defjvp
def _tapped_tangent(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    return primals[0], tangents[0] + tangents[1]


def _among(variables: Sequence[Any], tables: Tables) -> dict[int, int]:
    """Return the number of the table at each position that holds one."""
    return {
        i: tables[var]
        for i, var in enumerate(variables)
        if not isinstance(var, Literal) and var in tables
    }


def _held(eqn: Any, tables: Tables) -> dict[int, int]:
    return _among(eqn.invars, tables)


# -- equations with a program inside ---------------------------------------------------------------


class _Step(NamedTuple):
    """How to find the lookups inside an equation, and how to run it with taps."""

    find: Callable[[Any, Tables], FoundLookups]
    run: Callable[[Any, list[Any], Tables, Taps], tuple[list[Any], list[Asked]]]


def _inside(variables: Sequence[Any], operands: Sequence[Any], tables: Tables) -> Tables:
    """Return the variables of an inner jaxpr that are tables, from the operands of its call."""
    return {variables[i]: number for i, number in _among(operands, tables).items()}


def _find_call(eqn: Any, tables: Tables) -> FoundLookups:
    jaxpr, _ = inner_jaxpr(eqn)
    return find_lookups(jaxpr, _inside(jaxpr.invars, eqn.invars, tables))


def _run_call(eqn: Any, values: list[Any], tables: Tables, given: Taps) -> tuple:
    jaxpr, consts = inner_jaxpr(eqn)
    return run_with_taps(jaxpr, consts, values, _inside(jaxpr.invars, eqn.invars, tables), given)


def _run_remat(eqn: Any, values: list[Any], tables: Tables, given: Taps) -> tuple:
    def call(values: list[Any], taps: list[Array]) -> tuple:
        return _run_call(eqn, values, tables, given._replace(taps=taps))

    return checkpoint_like(eqn, call)(values, given.taps)


def _find_scan(eqn: Any, tables: Tables) -> FoundLookups:
    """Find lookups of tables among the scan's constants, which are the same in every iteration."""
    jaxpr, (fixed, _) = eqn.params["jaxpr"].jaxpr, scan_counts(eqn)
    found = find_lookups(jaxpr, _inside(jaxpr.invars[:fixed], eqn.invars[:fixed], tables))
    return FoundLookups(
        [x._replace(lead=(eqn.params["length"], *x.lead)) for x in found.lookups], {}
    )


def _run_scan(eqn: Any, values: list[Any], tables: Tables, given: Taps) -> tuple:
    # The operands are [constants, first carry, xs]. Taps [length, …] join the xs, and the ids of
    # every iteration join the ys.
    closed = eqn.params["jaxpr"]
    fixed, carried = scan_counts(eqn)
    inside = _inside(closed.jaxpr.invars[:fixed], eqn.invars[:fixed], tables)

    def body(carry: list[Any], xs: tuple[list[Any], list[Array]]) -> tuple:
        args = [*values[:fixed], *carry, *xs[0]]
        results, ids = run_with_taps(
            closed.jaxpr, closed.consts, args, inside, given._replace(taps=xs[1])
        )
        return results[:carried], (results[carried:], ids)

    first, rest = values[fixed : fixed + carried], values[fixed + carried :]
    carry, (ys, ids) = scan_like(eqn, body, first, (rest, given.taps))
    return [*carry, *ys], ids


def _branches(eqn: Any, tables: Tables) -> list[tuple[Any, Tables]]:
    closed = eqn.params["branches"]
    return [(c, _inside(c.jaxpr.invars, eqn.invars[1:], tables)) for c in closed]


def _find_cond(eqn: Any, tables: Tables) -> FoundLookups:
    found = [find_lookups(closed.jaxpr, inside) for closed, inside in _branches(eqn, tables)]
    return FoundLookups([lookup for branch in found for lookup in branch.lookups], {})


def _run_cond(eqn: Any, values: list[Any], tables: Tables, given: Taps) -> tuple:
    branches = _branches(eqn, tables)
    lookups = [find_lookups(closed.jaxpr, inside).lookups for closed, inside in branches]

    # Branches with 2 and 1 lookups: branch 0 takes taps[0:2] and returns its own ids and padding
    # for the third; branch 1 takes taps[2:3] and returns padding for the first two.
    def branch(k: int) -> Callable[..., tuple]:
        closed, inside = branches[k]
        start = sum(len(some) for some in lookups[:k])
        end = start + len(lookups[k])
        nothing = [[x.nothing() for x in some] for some in lookups]

        def run(values: list[Any], taps: list[Array]) -> tuple:
            mine = given._replace(taps=taps[start:end])
            results, ids = run_with_taps(closed.jaxpr, closed.consts, values, inside, mine)
            return results, [i for j, some in enumerate(nothing) for i in (ids if j == k else some)]

        return run

    index, *operands = values
    return jax.lax.switch(index, [branch(k) for k in range(len(branches))], operands, given.taps)


_SAME = frozenset({"pvary", "pcast", "copy"})
"""Names of primitives whose result is still the table."""

_STEPS: Mapping[str, _Step] = {
    **dict.fromkeys(CALLS, _Step(_find_call, _run_call)),
    **dict.fromkeys(REMATS, _Step(_find_call, _run_remat)),
    "scan": _Step(_find_scan, _run_scan),
    "cond": _Step(_find_cond, _run_cond),
}

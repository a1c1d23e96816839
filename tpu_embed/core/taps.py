"""Find the lookups of a traced function, and run it again with a tap at each of them.

Enters: a jaxpr, and which of its inputs are tables. `find_lookups` says which tables are only
looked up, and lists those lookups in program order; `run_with_taps` evaluates the jaxpr with an
extra input a lookup, whose gradient is that of the rows looked up, and returns the ids of each
beside the results. Called by `sparse_grad.py` and `training/gradients.py`.

A lookup inside a scan stands for one in every iteration, stacked; one in a branch of a cond has
padding for ids where another branch is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from tpu_embed._types import Array
from tpu_embed.core.jaxprs import (
    CALLS,
    REMATS,
    evaluate,
    inner_jaxpr,
    scan_counts,
    subjaxprs,
)
from tpu_embed.core.sparse_lookup import lookup_p
from tpu_embed.kernels.varying import as_varying, axes_of

Tables = dict[Any, int]
"""Variables of a jaxpr that hold a table -> its number."""


class Lookup(NamedTuple):
    """Where a table is looked up.

    Attributes:
      table: its number.
      size: V.
      lead: the shape of the ids, iterations of scans around them first.
      trailing: the shape of a row.
      dtype: of the rows.
      index_dtype: of the ids.
      axes: mesh axes over which they are known to differ.
    """

    table: int
    size: int
    lead: tuple[int, ...]
    trailing: tuple[int, ...]
    dtype: np.dtype
    index_dtype: np.dtype
    axes: frozenset[str]

    def tap(self) -> Array:
        """Return zeros for the lookup's tap."""
        return as_varying(jnp.zeros((*self.lead, *self.trailing), self.dtype), self.axes)

    def nothing(self) -> Array:
        """Return ids that are all padding."""
        return as_varying(jnp.full(self.lead, self.size, self.index_dtype), self.axes)


class Found(NamedTuple):
    """The lookups of some tables in program order, and the tables that are used otherwise too."""

    lookups: list[Lookup]
    dense: set[int]


def find_lookups(jaxpr: Any, tables: Tables) -> Found:
    """List the lookups of tables.

    Args:
      jaxpr: an open jaxpr.
      tables: which variables of it are tables.
    """
    tables, lookups, dense = dict(tables), [], set()
    for eqn in jaxpr.eqns:
        held = _held(eqn, tables)
        if not held:
            continue
        if eqn.primitive is lookup_p:
            lookups.append(_lookup_of(eqn, tables[eqn.invars[0]]))
        elif eqn.primitive.name in _SAME:
            tables[eqn.outvars[0]] = tables[eqn.invars[0]]
        elif eqn.primitive.name in _STEPS:
            inside = _STEPS[eqn.primitive.name].find(eqn, tables)
            lookups += inside.lookups
            dense |= inside.dense
        else:
            dense |= set(held.values())
    dense |= set(_among(jaxpr.outvars, tables).values())
    return Found(lookups, dense)


def tables_reaching_lookups(jaxpr: Any, tables: Tables) -> set[int]:
    """Return the tables that are looked up anywhere inside, they or what is computed from them.

    Args:
      jaxpr: an open jaxpr.
      tables: which variables of it are tables.
    """
    return _reaching(jaxpr, {var: frozenset([number]) for var, number in tables.items()})


def _reaching(jaxpr: Any, sources: dict[Any, frozenset[int]]) -> set[int]:
    """Return which sources reach the table of a lookup, given those of some variables."""
    sources, reaching = dict(sources), set()
    for eqn in jaxpr.eqns:
        operands = [
            frozenset() if isinstance(var, Literal) else sources.get(var, frozenset())
            for var in eqn.invars
        ]
        together = frozenset().union(*operands)
        if not together:
            continue
        if eqn.primitive is lookup_p:
            reaching |= operands[0]
        for inner in subjaxprs(eqn):
            n = len(inner.invars)  # operands of a cond or while that are not passed in come first
            given = operands[len(operands) - n :] if n <= len(operands) else [together] * n
            reaching |= _reaching(inner, dict(zip(inner.invars, given, strict=True)))
        sources |= dict.fromkeys(eqn.outvars, together)
    return reaching


def _lookup_of(eqn: Any, table: int) -> Lookup:
    (size, *trailing), ids = eqn.invars[0].aval.shape, eqn.invars[1].aval
    rows = eqn.outvars[0].aval
    return Lookup(
        table, size, ids.shape, tuple(trailing), rows.dtype, np.dtype(ids.dtype), axes_of(rows)
    )


def run_with_taps(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], tables: Tables, taps: Sequence[Array]
) -> tuple[list[Any], list[Array]]:
    """Evaluate a jaxpr.

    Args:
      jaxpr: an open jaxpr.
      consts: values of its constants.
      args: of its inputs.
      tables: which variables are tables; none is among the `dense` ones of `find_lookups`.
      taps: `Lookup.tap` of every lookup.

    Returns:
      its results; the ids of every lookup.
    """
    tables, taps = dict(tables), list(taps)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    ids: list[Array] = []

    def read(var: Any) -> Any:
        return var.val if isinstance(var, Literal) else env[var]

    for eqn in jaxpr.eqns:
        values, held = [read(var) for var in eqn.invars], _held(eqn, tables)
        step = _STEPS.get(eqn.primitive.name)
        if held and eqn.primitive is lookup_p:
            results = [tapped(lookup_p.bind(*values), taps.pop(0))]
            ids.append(values[1])
        elif held and step is not None:
            n = len(step.find(eqn, tables).lookups)
            mine, taps = taps[:n], taps[n:]
            results, inside = step.run(eqn, values, tables, mine)
            ids += inside
        else:
            results = evaluate(jaxpr, eqn, values)
            if held and eqn.primitive.name in _SAME:
                tables[eqn.outvars[0]] = tables[eqn.invars[0]]
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(var) for var in jaxpr.outvars], ids


@jax.custom_jvp
def tapped(value: Array, tap: Array) -> Array:
    """Return the value, bit for bit; the tap, of its shape and dtype, gets its gradient too."""
    return value


@tapped.defjvp
def _tapped_tangent(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    return primals[0], tangents[0] + tangents[1]


def _among(variables: Sequence[Any], tables: Tables) -> dict[int, int]:
    """Return place -> number of the table there."""
    return {
        i: tables[var]
        for i, var in enumerate(variables)
        if not isinstance(var, Literal) and var in tables
    }


def _held(eqn: Any, tables: Tables) -> dict[int, int]:
    return _among(eqn.invars, tables)


# -- equations with a program inside ---------------------------------------------------------------


class _Step(NamedTuple):
    """How lookups inside an equation are found, and how it runs with taps."""

    find: Callable[[Any, Tables], Found]
    run: Callable[[Any, list[Any], Tables, list[Array]], tuple[list[Any], list[Array]]]


def _inside(variables: Sequence[Any], operands: Sequence[Any], tables: Tables) -> Tables:
    """Return which variables of an inner jaxpr are tables, given what it is called with."""
    return {variables[i]: number for i, number in _among(operands, tables).items()}


def _find_call(eqn: Any, tables: Tables) -> Found:
    jaxpr, _ = inner_jaxpr(eqn)
    return find_lookups(jaxpr, _inside(jaxpr.invars, eqn.invars, tables))


def _run_call(eqn: Any, values: list[Any], tables: Tables, taps: list[Array]) -> tuple:
    jaxpr, consts = inner_jaxpr(eqn)
    return run_with_taps(jaxpr, consts, values, _inside(jaxpr.invars, eqn.invars, tables), taps)


def _run_remat(eqn: Any, values: list[Any], tables: Tables, taps: list[Array]) -> tuple:
    def call(values: list[Any], taps: list[Array]) -> tuple:
        return _run_call(eqn, values, tables, taps)

    keep = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
    return jax.checkpoint(call, **keep)(values, taps)


def _find_scan(eqn: Any, tables: Tables) -> Found:
    """A table must be the same in every iteration: among the constants."""
    jaxpr, (fixed, _) = eqn.params["jaxpr"].jaxpr, scan_counts(eqn)
    found = find_lookups(jaxpr, _inside(jaxpr.invars[:fixed], eqn.invars[:fixed], tables))
    lookups = [x._replace(lead=(eqn.params["length"], *x.lead)) for x in found.lookups]
    return Found(lookups, found.dense | set(_among(eqn.invars[fixed:], tables).values()))


def _run_scan(eqn: Any, values: list[Any], tables: Tables, taps: list[Array]) -> tuple:
    params, closed = eqn.params, eqn.params["jaxpr"]
    fixed, carried = scan_counts(eqn)
    inside = _inside(closed.jaxpr.invars[:fixed], eqn.invars[:fixed], tables)

    def body(carry: list[Any], xs: tuple[list[Any], list[Array]]) -> tuple:
        args = [*values[:fixed], *carry, *xs[0]]
        results, ids = run_with_taps(closed.jaxpr, closed.consts, args, inside, xs[1])
        return results[:carried], (results[carried:], ids)

    first, rest = values[fixed : fixed + carried], values[fixed + carried :]
    keep = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, (ys, ids) = jax.lax.scan(body, first, (rest, taps), **keep)
    return [*carry, *ys], ids


def _branches(eqn: Any, tables: Tables) -> list[tuple[Any, Tables]]:
    closed = eqn.params["branches"]
    return [(c, _inside(c.jaxpr.invars, eqn.invars[1:], tables)) for c in closed]


def _find_cond(eqn: Any, tables: Tables) -> Found:
    lookups, dense = [], set()
    for closed, inside in _branches(eqn, tables):
        found = find_lookups(closed.jaxpr, inside)
        lookups += found.lookups
        dense |= found.dense
    return Found(lookups, dense)


def _run_cond(eqn: Any, values: list[Any], tables: Tables, taps: list[Array]) -> tuple:
    branches = _branches(eqn, tables)
    lookups = [find_lookups(closed.jaxpr, inside).lookups for closed, inside in branches]

    def branch(k: int) -> Callable[..., tuple]:
        closed, inside = branches[k]
        start = sum(len(some) for some in lookups[:k])
        end = start + len(lookups[k])
        nothing = [[x.nothing() for x in some] for some in lookups]

        def run(values: list[Any], taps: list[Array]) -> tuple:
            mine = taps[start:end]
            results, ids = run_with_taps(closed.jaxpr, closed.consts, values, inside, mine)
            return results, [i for j, some in enumerate(nothing) for i in (ids if j == k else some)]

        return run

    index, *operands = values
    return jax.lax.switch(index, [branch(k) for k in range(len(branches))], operands, taps)


_SAME = frozenset({"pvary", "pcast", "copy"})
"""Primitives whose result is the table itself."""

_STEPS: Mapping[str, _Step] = {
    **dict.fromkeys(CALLS, _Step(_find_call, _run_call)),
    **dict.fromkeys(REMATS, _Step(_find_call, _run_remat)),
    "scan": _Step(_find_scan, _run_scan),
    "cond": _Step(_find_cond, _run_cond),
}

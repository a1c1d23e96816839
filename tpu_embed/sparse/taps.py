"""Find the lookups of a traced function, and run it again with a tap at each of them.

A tap is a further input in the shape of a lookup's result, whose gradient is that of the rows that
were looked up. A lookup inside a scan has one tap for all iterations, stacked. A lookup in a branch
of a cond returns padding for ids when another branch is taken.

Input: a jaxpr, and which of its inputs are tables.
Output: their lookups in program order (`find_lookups`); the results of the jaxpr and the ids of
each lookup (`run_with_taps`).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import AxisType

from tpu_embed._jaxprs import (
    CALLS,
    REMATS,
    Path,
    Site,
    evaluate,
    flow,
    inner_jaxprs,
    rerun,
    scan_counts,
)
from tpu_embed._types import PADDING_ID, Array, Tracer
from tpu_embed.kernels.varying import as_varying, axes_of, varying_axes
from tpu_embed.sparse.lookup import lookup_p

Tables = dict[Any, int]
"""Variable of a jaxpr that holds a table -> the number of the table."""


@dataclasses.dataclass(frozen=True)
class Lookup(Site):
    """One lookup of a table, an equation of `(table, ids)`.

    Attributes:
      table: the number of the table.
    """

    table: int

    def tap(self) -> Array:
        """Return the lookup's tap: zeros like its result."""
        return self._full(self.eqn.outvars[0].aval, 0)

    def nothing(self) -> Array:
        """Return ids that are all padding."""
        return self._full(self.eqn.invars[1].aval, PADDING_ID)

    def _full(self, aval: Any, value: int) -> Array:
        # Leading axes are the iterations of the scans around the lookup, outermost first.
        lead = [eqn.params["length"] for eqn in self.around if eqn.primitive.name == "scan"]
        shape = (*lead, *aval.shape)
        return as_varying(jnp.full(shape, value, aval.dtype), axes_of(aval))


def find_lookups(jaxpr: Any, tables: Tables) -> list[Lookup]:
    """List the lookups of tables in program order.

    Args:
      jaxpr: an open jaxpr.
      tables: the variables of the jaxpr that are tables.
    """
    lookups: list[Lookup] = []
    _find(lookups, jaxpr, tables, ())
    return lookups


_SAME = frozenset({"pvary", "pcast", "copy"})
"""Names of primitives whose result is still the table."""


def _find(lookups: list[Lookup], jaxpr: Any, tables: Mapping[Any, Any], around: Path) -> list[Any]:
    """Append the lookups in a jaxpr, and return the number of the table that each result is."""

    def rule(eqn: Any, held: list[int | None]) -> Iterable[tuple[Any, Any]]:
        name, called = eqn.primitive.name, (*CALLS, *REMATS)
        if eqn.primitive is lookup_p and held[0] is not None:
            lookups.append(Lookup((*around, (eqn, 0)), held[0]))
        if name == "scan":
            # A scan's constants are the same in every iteration; a table in the carry may not be.
            fixed, _ = scan_counts(eqn)
            held = [one if i < fixed else None for i, one in enumerate(held)]
        if name in (*called, "scan", "cond"):
            inside = [
                _find(lookups, inner.jaxpr, inner.marks(held), (*around, (eqn, number)))
                for number, inner in enumerate(inner_jaxprs(eqn))
            ]
            # A jit may return its table: the variable outside is then a table as well.
            held = inside[0] if name in called else []
        return zip(eqn.outvars, held, strict=False) if name in (*called, *_SAME) else ()

    return flow(jaxpr, tables, rule, None)


def count_lookups(jaxpr: Any, tables: Tables) -> collections.Counter[int]:
    """Count, per table, the lookups reachable from it.

    These are the lookups in the table and in whatever is computed from it, also inside of equations
    that `find_lookups` does not enter.

    Args:
      jaxpr: an open jaxpr.
      tables: the variables of the jaxpr that are tables.
    """
    counts = collections.Counter()

    def rule(eqn: Any, operands: list[frozenset[int]]) -> Iterable[tuple[Any, Any]]:
        together = frozenset().union(*operands)
        if eqn.primitive is lookup_p:
            counts.update(operands[0])
        for inner in inner_jaxprs(eqn):
            count(inner.jaxpr, inner.marks(operands, unknown=together))
        return dict.fromkeys(eqn.outvars, together).items()

    def count(jaxpr: Any, sources: Mapping[Any, frozenset[int]]) -> None:
        flow(jaxpr, sources, rule, frozenset())

    count(jaxpr, {var: frozenset([number]) for var, number in tables.items()})
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
    closed: ClosedJaxpr, args: Sequence[Any], lookups: Sequence[Lookup], given: Taps
) -> tuple[list[Any], list[Array]]:
    """Evaluate a jaxpr with a tap at each lookup.

    Args:
      closed: the jaxpr.
      args: the values of its inputs.
      lookups: its lookups, as `find_lookups` returns them.
      given: the taps, and the tables that the lookups read.

    Returns:
      the results; the ids of every lookup.
    """

    def at(lookup: Lookup, values: list[Any], tap: Array) -> tuple[list[Array], Array]:
        table = as_varying(given.arrays[lookup.table], axes_of(lookup.eqn.invars[0].aval))
        (found,) = evaluate(closed.jaxpr, lookup.eqn, [table, *values[1:]])
        return [tapped(found, tap)], known_after(found, values[1])

    return rerun(at, closed, args, lookups, given.taps)


def known_after(found: Array, ids: Array) -> Array:
    """Return the ids of a lookup, which then depend on its result.

    This makes the update, which uses the ids, depend on the lookup; otherwise XLA copies the table.
    Each bag's ids get a zero added that XLA cannot recognise as a zero. An optimization barrier
    does not help, since XLA removes it before it decides about copies.
    """
    if not isinstance(ids, Tracer) or not ids.ndim or 0 in found.shape or _is_explicit(found):
        return ids
    # result [B, …, D] -> first number of each bag, [B, …] -> as int32 bits -> zeros, one per entry
    # of the first axis of ids.
    first = jax.lax.stop_gradient(found)[(..., *[0] * (found.ndim - 1))].astype(jnp.float32)
    zeros = _zeros(jax.lax.bitcast_convert_type(first, jnp.int32), ids.dtype)
    # The packed ids of a placed batch are [devices, words]: one zero per device. A batch that only
    # some mesh axes split may have fewer bags than there are devices.
    even = zeros.size % ids.shape[0] == 0
    parts = zeros.reshape(ids.shape[0], -1)[:, 0] if even else jnp.max(zeros)[None]
    return ids + parts.reshape(-1, *[1] * (ids.ndim - 1))


def known_after_ids(ids: Array, later: Array) -> Array:
    """Return the ids of a lookup, which then depend on those of another lookup.

    An update that uses only this lookup then also comes after the other lookup of the same table.

    Args:
      ids: of the lookup.
      later: of the other lookup, as `run_with_taps` returns them.
    """
    traced = isinstance(later, Tracer) and later.size
    if not traced or not varying_axes(later) <= varying_axes(ids):
        return ids
    return ids + _zeros(jnp.max(later), ids.dtype)


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

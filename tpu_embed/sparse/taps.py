"""Find the lookups of a traced function, and run each of them with a tap.

A tap is a further input in the shape of a lookup's result, whose gradient is that of the rows that
were looked up. A lookup inside a scan has one tap for all iterations, stacked. A lookup in a branch
of a cond returns padding for ids when another branch is taken.

Input: a jaxpr, whose inputs may be tables.
Output: its lookups in program order, together with other equations that the caller asks for
(`find_sites`); what a lookup with a tap returns (`Lookup.run`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad
from jax.sharding import AxisType

from tpu_embed._jaxprs import CALLS, REMATS, Path, Site, flow, inner_jaxprs, scan_counts, walk
from tpu_embed._types import PADDING_ID, Array, Tracer
from tpu_embed.kernels.varying import as_varying, axes_of, varying_axes
from tpu_embed.sparse.lookup import lookup_p


@dataclasses.dataclass(frozen=True)
class Lookup(Site):
    """One lookup of a table, an equation of `(table, ids)`.

    Attributes:
      table: the number of the input that is the table.
    """

    table: int

    def taps(self) -> list[Array]:
        """Return the lookup's tap: zeros like its result."""
        return [self._full(self.eqn.outvars[0].aval, 0)]

    def run(
        self, values: Sequence[Array], taps: Sequence[Array], guard: Array
    ) -> tuple[list[Array], Array]:
        """Return the rows, whose gradient goes to the tap and not to the table, and the ids."""
        table, ids = values
        found = lookup_p.bind(stopped_p.bind(table, guard), ids)
        return [tapped(found, taps[0])], known_after(ids, found)

    def nothing(self) -> Array:
        """Return ids that are all padding."""
        return self._full(self.eqn.invars[1].aval, PADDING_ID)

    def _full(self, aval: Any, number: int) -> Array:
        # Leading axes are the iterations of the scans around the lookup, outermost first.
        lead = [eqn.params["length"] for eqn in self.around if eqn.primitive.name == "scan"]
        return full(aval, number, lead)


def full(aval: Any, number: float, lead: Sequence[int] = ()) -> Array:
    """Return an array filled with a number, in an aval's shape, dtype and varying mesh axes.

    Args:
      aval: the abstract value.
      number: the number.
      lead: sizes of further axes before those of the aval.
    """
    return as_varying(jnp.full((*lead, *aval.shape), number, aval.dtype), axes_of(aval))


_SAME = frozenset({"pvary", "pcast", "copy"})
"""Names of primitives whose result is still the table."""


def find_sites(
    jaxpr: Any, others: Mapping[Primitive, Callable[[Path], Site | None]] = {}
) -> list[Any]:
    """List the lookups of inputs, and other equations, in program order.

    Lookups are found in the jaxpr, and in calls, scans and conds; other equations everywhere.

    Args:
      jaxpr: an open jaxpr.
      others: for each primitive to find what makes a site of a path, or None to leave it out.
    """
    sites: list[Any] = []

    def find(jaxpr: Any, tables: Mapping[Any, int | None], around: Path) -> list[int | None]:
        """Append the sites in a jaxpr, and return the number of the table that each result is."""

        def step(eqn: Any, held: list[int | None]) -> Iterable[tuple[Any, Any]]:
            name, called, path = eqn.primitive.name, (*CALLS, *REMATS), (*around, (eqn, 0))
            if eqn.primitive is lookup_p and held[0] is not None:
                sites.append(Lookup(path, held[0]))
            if eqn.primitive in others and (site := others[eqn.primitive](path)):
                sites.append(site)
            # A scan's constants are the same in every iteration; a table in the carry may not be.
            known = scan_counts(eqn)[0] if name == "scan" else len(held)
            entered = name in (*called, "scan", "cond")
            marks = [one if entered and i < known else None for i, one in enumerate(held)]
            inside = [
                find(inner.jaxpr, inner.marks(marks), (*around, (eqn, number)))
                for number, inner in enumerate(inner_jaxprs(eqn))
            ]
            # A jit may return its table: the variable outside is then a table as well.
            passed = inside[0] if name in called else held if name in _SAME else ()
            return zip(eqn.outvars, passed, strict=False)

        return walk(jaxpr, tables, step, lambda _: None)

    find(jaxpr, {var: i for i, var in enumerate(jaxpr.invars)}, ())
    return sites


def looked_up(jaxpr: Any) -> set[int]:
    """Return the numbers of the inputs that are looked up in, or something computed from them.

    This includes lookups inside of equations in which `find_sites` finds none.

    Args:
      jaxpr: an open jaxpr.
    """
    found: set[int] = set()

    def rule(eqn: Any, operands: list[frozenset[int]]) -> Iterable[tuple[Any, Any]]:
        together = frozenset().union(*operands)
        if eqn.primitive is lookup_p:
            found.update(operands[0])
        for inner in inner_jaxprs(eqn):
            flow(inner.jaxpr, inner.marks(operands, unknown=together), rule, frozenset())
        return dict.fromkeys(eqn.outvars, together).items()

    flow(jaxpr, {var: frozenset([i]) for i, var in enumerate(jaxpr.invars)}, rule, frozenset())
    return found


def known_after(ids: Array, found: Array) -> Array:
    """Return the ids of a lookup, which then depend on its result.

    This makes the update, which uses the ids, depend on the lookup; otherwise XLA copies the table.
    Each bag's ids get a zero added that XLA cannot recognise as a zero. An optimization barrier
    does not help, since XLA removes it before it decides about copies.
    """
    # A mesh with explicit axes does not allow the reshapes here.
    explicit = AxisType.Explicit in jax.typeof(found).sharding.mesh.axis_types
    if not isinstance(ids, Tracer) or not ids.ndim or 0 in found.shape or explicit:
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
      later: of the other lookup, as `known_after` returns them.
    """
    traced = isinstance(later, Tracer) and later.size
    if not traced or not varying_axes(later) <= varying_axes(ids):
        return ids
    return ids + _zeros(jnp.max(later), ids.dtype)


def _zeros(bits: Array, dtype: Any) -> Array:
    """Return zeros that are computed from integers, so that XLA cannot recognise them as zeros."""
    # Without the sign bit a number is never negative, so its minimum with 0 is 0.
    return jnp.minimum(bits & 0x7FFFFFFF, 0).astype(dtype)


@jax.custom_jvp
def tapped(value: Array, tap: Array) -> Array:
    """Return the value unchanged; its gradient goes to the tap too, which has the same type."""
    return value


@tapped.defjvp
def _tapped_tangent(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    return primals[0], tangents[0] + tangents[1]


def _stopped_tangent(primals: Sequence[Any], _: Any) -> tuple[Any, Any]:
    # The value is returned as it is, without binding the primitive again: it is constant in this
    # differentiation only, and one around it must see the identity.
    return primals[0], ad.Zero(jax.typeof(primals[0]).to_tangent_aval())


stopped_p = Primitive("stopped")
"""Maps a value and a guard to the value, which is constant in a differentiation by the guard.

`stop_gradient` would make it constant in every differentiation. JAX applies the rule below only in
those of which an operand has a tangent; the guard, a scalar, has one also where the value has none.
Such a differentiation leaves none of these equations, so they need no other rules.
"""

stopped_p.def_abstract_eval(lambda value, guard: value)
ad.primitive_jvps[stopped_p] = _stopped_tangent

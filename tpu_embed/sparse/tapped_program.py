"""A program with a tap at each lookup of its tables, and what reaches its results.

Each lookup gets a tap, an input whose gradient is that of the rows looked up, and reads its table
from a separate input. Every question about what reaches a result is then about inputs: a lookup
does if its tap does, and a table is used in another way than by lookups if its original input does.

Input: a program, the values of its inputs, and which of them are tables.
Output: `TappedProgram`, the same program with more inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from tpu_embed._types import Array
from tpu_embed.sparse.reach import NOTHING, Sources, propagate
from tpu_embed.sparse.taps import Lookup, Taps, find_lookups, known_after_ids, run_with_taps


class Reached(NamedTuple):
    """What reaches some results of a program along differentiable equations.

    Attributes:
      inputs: the numbers of inputs that reach them, other than through a lookup that has a tap.
      lookups: the numbers of lookups that reach them, in program order.
      looped: the numbers of those inputs, and of those lookups' tables, that have a path through a
        `while`.
    """

    inputs: frozenset[int] = frozenset()
    lookups: frozenset[int] = frozenset()
    looped: frozenset[int] = frozenset()

    @staticmethod
    def any_of(several: Iterable[Reached]) -> Reached:
        """Return what reaches any of several results."""
        return Reached(
            *(frozenset().union(*sets) for sets in zip(Reached(), *several, strict=True))
        )


class TappedProgram(NamedTuple):
    """A program that can be run with other inputs and taps.

    Attributes:
      closed: maps [inputs, tables as the lookups read them, taps] to [results, ids of each lookup].
      inputs: the values of the program's inputs.
      tables: the value of each input that is looked up, by the number of the input.
      lookups: the lookups in program order.
      num_results: the number of results of the program.
    """

    closed: ClosedJaxpr
    inputs: list[Array]
    tables: dict[int, Array]
    lookups: list[Lookup]
    num_results: int

    def reach(self, inputs: Iterable[int]) -> list[Reached]:
        """Return what reaches each result.

        Args:
          inputs: the numbers of the inputs to follow. All lookups are followed.
        """
        # n inputs and K lookups: bits 0 to n - 1 are inputs, bits n to n + K - 1 are taps.
        n, wanted = len(self.inputs), frozenset(inputs)
        sources = [Sources(1 << i) if i in wanted else NOTHING for i in range(n)]
        taps = [Sources(1 << (n + k)) for k in range(len(self.lookups))]
        found = propagate(self.closed.jaxpr, [*sources, *[NOTHING] * len(self.tables), *taps])
        return [self._reached(one) for one in found[: self.num_results]]

    def _reached(self, sources: Sources) -> Reached:
        n, tables = len(self.inputs), [lookup.table for lookup in self.lookups]
        # n = 3 and lookups of the tables 1 and 1: places [0, 1, 2, 1, 1] by bit. The bits 10010
        # (bits 1 and 4) are input 1 and lookup 1.
        places = [*range(n), *tables]
        by_bit = [sources.reached >> i & 1 for i in range(len(places))]
        inputs = frozenset(i for i in range(n) if by_bit[i])
        lookups = frozenset(k for k in range(len(tables)) if by_bit[n + k])
        looped = frozenset(place for i, place in enumerate(places) if sources.looped >> i & 1)
        return Reached(inputs, lookups, looped)

    def taps(self, lookups: Iterable[int]) -> dict[int, Array]:
        """Return the taps of some lookups, to differentiate `run` by."""
        return {k: self.lookups[k].tap() for k in sorted(lookups)}

    def run(
        self, inputs: Mapping[int, Any], taps: Mapping[int, Array]
    ) -> tuple[list[Any], dict[int, Array]]:
        """Return the results, and the ids of the lookups whose taps are given.

        Args:
          inputs: values that replace the program's own inputs, by number.
          taps: the taps of some lookups, by number.
        """
        values = [inputs.get(i, value) for i, value in enumerate(self.inputs)]
        tables = [self.tables[i] for i in sorted(self.tables)]
        every = [taps[k] if k in taps else one.tap() for k, one in enumerate(self.lookups)]
        flat = list(map(_array, jaxpr_as_fun(self.closed)(*values, *tables, *every)))
        ids = flat[self.num_results :]
        wanted = {k: ids[k] for k in taps}
        # One update of a table uses all its wanted lookups. It must come after every lookup of the
        # table, so one of the wanted is made to depend on those that are left out.
        one_of = {self.lookups[k].table: k for k in taps}
        for k, lookup in enumerate(self.lookups):
            if k not in taps and lookup.table in one_of:
                one = one_of[lookup.table]
                wanted[one] = known_after_ids(wanted[one], ids[k])
        return flat[: self.num_results], wanted


def _array(result: Any) -> Array:
    """Return a result of a jaxpr as an array; one that is a literal there is a Python number."""
    return result if isinstance(result, jax.Array) else jnp.asarray(result)


def tap_lookups(
    closed: ClosedJaxpr, inputs: Sequence[Array], tables: Iterable[int]
) -> TappedProgram:
    """Return a program with a tap at each lookup of some of its inputs.

    Args:
      closed: the program.
      inputs: the values of its inputs.
      tables: the numbers of the inputs that may be tables.
    """
    program, jaxpr, inputs = closed, closed.jaxpr, list(inputs)
    numbers = {jaxpr.invars[i]: i for i in tables}
    lookups = find_lookups(jaxpr, numbers)
    arrays = {lookup.table: inputs[lookup.table] for lookup in lookups}

    def run(inputs: list[Array], arrays: dict[int, Array], taps: list[Array]) -> Any:
        return run_with_taps(program, inputs, lookups, Taps(taps, arrays))

    if lookups:
        closed = jax.make_jaxpr(run)(inputs, arrays, [lookup.tap() for lookup in lookups])
    return TappedProgram(closed, inputs, arrays, lookups, len(jaxpr.outvars))


def differentiable(arrays: Sequence[Array]) -> list[int]:
    """Return the numbers of the arrays that have gradients: those of floats or complex numbers."""
    return [i for i, x in enumerate(arrays) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]

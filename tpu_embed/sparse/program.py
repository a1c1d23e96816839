"""A traced program with taps, what reaches its results, and its gradients.

A *place* is something to differentiate by: an input of the program, or a tap, which is a further
input that stands for a value inside. The result of a lookup has a tap, and then passes no gradient
on to its table. Every question about what reaches a result is so about places: a lookup does if its
tap does, and a table is used in another way than by lookups if its own input does.

Input: a program, the values of its inputs, and where it gets taps.
Output: `Program`, the same program with more inputs; its results and gradients (`pull_back`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from tpu_embed._jaxprs import rerun
from tpu_embed._snapshot import as_array
from tpu_embed._types import Array
from tpu_embed.sparse.indexed_slices import IndexedSlices
from tpu_embed.sparse.reach import Sources, propagate, union
from tpu_embed.sparse.taps import Lookup, known_after_ids


class Program(NamedTuple):
    """A program that can be differentiated by places.

    Attributes:
      closed: maps `values` to [results, ids of each lookup].
      values: of the inputs and of the taps, by place; then the guard of `stopped_p`.
      taps: the places of the taps of each site.
      tables: the place of each lookup's tap -> that of its table, in program order.
      reached: for each result the places that reach it.
    """

    closed: ClosedJaxpr
    values: list[Array]
    taps: list[list[int]]
    tables: dict[int, int]
    reached: list[Sources]

    def reaching(self, results: Iterable[int]) -> tuple[set[int], set[int]]:
        """Return the places that reach any of some results, and those that do through a `while`."""
        # Bits 10010: the places 1 and 4.
        both = union(self.reached[i] for i in results)
        reached, looped = ({i for i in range(len(self.values)) if b >> i & 1} for b in both)
        return reached, looped


def tap(closed: ClosedJaxpr, inputs: Sequence[Array], sites: Sequence[Any]) -> Program:
    """Return a program with taps.

    Args:
      closed: the program.
      inputs: the values of its inputs.
      sites: some of what `find_sites` returns. Each has `taps()`, the values of its taps, and
        `run(values, taps, guard)`, what `rerun` does there.
    """

    def run(inputs: list[Array], taps: list[list[Array]], guard: Array) -> Any:
        at = lambda site, values, mine: site.run(values, mine, guard)  # noqa: E731
        return rerun(at, closed, inputs, sites, taps)

    given = (list(inputs), [site.taps() for site in sites], jnp.zeros(()))
    values, structure = jax.tree.flatten(given)
    _, taps, _ = structure.unflatten(range(len(values)))
    each = zip(sites, taps, strict=True)
    tables = {mine[0]: one.table for one, mine in each if isinstance(one, Lookup)}
    tapped = jax.make_jaxpr(run)(*given)
    reached = propagate(tapped.jaxpr)[: len(closed.out_avals)]
    return Program(tapped, values, taps, tables, reached)


def pull_back(
    program: Program, wanted: Collection[int], cotangents: Mapping[int, Array | None]
) -> tuple[list[Array], dict[int, Any]]:
    """Return the results of a program, and the gradients by place.

    A place gets a dense gradient, a table of wanted taps gets slices, and a place that is both gets
    their sum, which is dense.

    Args:
      program: the program.
      wanted: the places to differentiate by.
      cotangents: the cotangents of some of the results, by the number of the result; None for ones.
    """
    count, tables = len(program.reached), program.tables

    def run(chosen: dict[int, Array]) -> tuple[list[Array], tuple]:
        values = [chosen.get(i, value) for i, value in enumerate(program.values)]
        # A result that is a literal of the jaxpr is a Python number.
        flat = list(map(as_array, jaxpr_as_fun(program.closed)(*values)))
        return [flat[i] for i in cotangents], (flat[:count], flat[count:])

    chosen = {i: program.values[i] for i in sorted({*wanted, len(program.values) - 1})}
    ys, back, (results, ids) = jax.vjp(run, chosen, has_aux=True)
    given = zip(ys, cotangents.values(), strict=True)
    (found,) = back([jnp.ones_like(y) if c is None else c for y, c in given])
    asked = dict(zip(tables, ids, strict=True))
    gradients = {i: found[i] for i in wanted if i not in tables}
    # Lookups with the taps 7 and 9 read table 5: its slices hold the ids of 7, then those of 9.
    for table in sorted({tables[k] for k in tables if k in wanted}):
        lookups = [k for k in tables if tables[k] == table]
        mine = [k for k in lookups if k in wanted]
        # One update of a table uses all its wanted lookups. It must come after every lookup of the
        # table, so one of the wanted is made to depend on those that are left out.
        for k in {*lookups} - {*mine}:
            asked[mine[0]] = known_after_ids(asked[mine[0]], asked[k])
        # Ids [2, 3] with rows [2, 3, D] and ids [4] with rows [4, D]: indices [10], values [10, D].
        # An id outside of the table (-1) becomes the index V, which is padding, with a zero row.
        shape = program.values[table].shape
        wide = np.result_type(*(asked[k].dtype for k in mine))
        joined = jnp.concatenate([asked[k].reshape(-1).astype(wide) for k in mine])
        rows = jnp.concatenate([found[k].reshape(asked[k].size, *shape[1:]) for k in mine])
        absent = (joined < 0) | (joined >= shape[0])
        indices = jnp.where(absent, jnp.asarray(shape[0], wide), joined)
        values = jnp.where(absent.reshape(-1, *[1] * (rows.ndim - 1)), 0, rows)
        if table in gradients:
            gradients[table] = gradients[table].at[indices].add(values, mode="drop")
        else:
            gradients[table] = IndexedSlices(values, indices, shape)
    return results, gradients

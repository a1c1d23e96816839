"""The gradients of a tapped program: from cotangents of its results to gradients by its inputs.

The program is differentiated by inputs and by the taps of lookups. The gradients by the taps of one
table's lookups are then joined to that table's gradient.

Input: a `TappedProgram`, what to differentiate by, and cotangents of some results.
Output: the results, and the gradients by the number of the input; sparse for tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import Array
from tpu_embed.sparse.indexed_slices import IndexedSlices
from tpu_embed.sparse.tapped_program import Reached, TappedProgram


def pull_back(
    program: TappedProgram,
    wanted: Reached,
    cotangents: Mapping[int, Array | None],
    *,
    also: Iterable[int] = (),
) -> tuple[list[Any], dict[int, Any]]:
    """Return the results of a program, and the gradients by the number of the input.

    An input gets a dense gradient, a table of the wanted lookups gets slices, and an input that is
    both gets their sum, which is dense.

    Args:
      program: the program.
      wanted: the inputs and lookups to differentiate by.
      cotangents: the cotangents of some of the results, by the number of the result; None for ones.
      also: inputs that JAX must differentiate by too, although their gradients are not returned.
    """

    def run(inputs: dict[int, Array], taps: dict[int, Array]) -> tuple[list[Any], tuple]:
        results, asked = program.run(inputs, taps)
        return [results[i] for i in cotangents], (results, asked)

    inputs = {i: program.inputs[i] for i in sorted(wanted.inputs.union(also))}
    taps = program.taps(wanted.lookups)
    chosen, back, (results, asked) = jax.vjp(run, inputs, taps, has_aux=True)
    given = zip(chosen, cotangents.values(), strict=True)
    by_input, by_lookup = back([jnp.ones_like(y) if c is None else c for y, c in given])
    dense = {i: by_input[i] for i in wanted.inputs}
    return results, _with_slices(dense, program, asked, by_lookup)


def _with_slices(
    dense: Mapping[int, Array],
    program: TappedProgram,
    asked: Mapping[int, Array],
    rows: Mapping[int, Array],
) -> dict[int, Any]:
    """Return the gradients by input: an array, slices, or for an input with both, their sum.

    Args:
      dense: dense gradients by the number of the input.
      program: the program that was differentiated.
      asked: the ids of some lookups, by the number of the lookup.
      rows: the gradients by the taps of these lookups.
    """
    # Lookups 0 and 2 read input 5: its slices hold the ids of lookup 0, then those of lookup 2.
    result: dict[int, Any] = dict(dense)
    for i in sorted({program.lookups[k].table for k in rows}):
        mine = [k for k in sorted(rows) if program.lookups[k].table == i]
        ids = [asked[k] for k in mine]
        slices = _slices(program.inputs[i].shape, ids, [rows[k] for k in mine])
        result[i] = _add_slices(result[i], slices) if i in result else slices
    return result


def _add_slices(dense: Array, slices: IndexedSlices) -> Array:
    """Return a dense gradient with slices added to it, in their order."""
    return dense.at[slices.indices].add(slices.values, mode="drop")


def _slices(shape: tuple[int, ...], ids: Sequence[Array], rows: Sequence[Array]) -> IndexedSlices:
    """Return the gradient by a table from the gradients by its looked-up rows.

    Args:
      shape: the shape of the table.
      ids: the ids of each lookup; at least one lookup.
      rows: the gradient by each lookup's tap.
    """
    # Ids [2, 3] with rows [2, 3, D] and ids [4] with rows [4, D]: indices [10], values [10, D]. An
    # id outside of the table (-1) becomes the index V, which is padding, with a zero row.
    wide = np.result_type(*(i.dtype for i in ids))
    joined = jnp.concatenate([i.reshape(-1).astype(wide) for i in ids])
    absent = (joined < 0) | (joined >= shape[0])
    joined = jnp.where(absent, jnp.asarray(shape[0], wide), joined)
    values = [g.reshape(i.size, *shape[1:]) for g, i in zip(rows, ids, strict=True)]
    together = jnp.concatenate(values)
    outside = absent.reshape(-1, *[1] * (together.ndim - 1))
    return IndexedSlices(jnp.where(outside, 0, together), joined, shape)

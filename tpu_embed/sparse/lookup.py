"""A lookup in a table that the user holds as a plain array: `table[ids]`, with bags and weights.

The gather is a primitive of its own. That lets `sparse_value_and_grad` find the lookups in a traced
function and return a sparse gradient. Under plain `jax.grad` the table's gradient is dense, as for
`table[ids]`.

Input: a table and ids, inside or outside a jit.
Output: activations.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from tpu_embed._checks import check_choice, check_integers, refuse
from tpu_embed._types import PADDING_ID, Array, ArrayLike, Tracer, as_array
from tpu_embed.core.ids import gains_in_program, is_real, narrow_ids
from tpu_embed.kernels import dispatch
from tpu_embed.kernels.tracing import as_varying, varying_axes


def embedding_lookup(
    table: ArrayLike,
    ids: ArrayLike,
    weights: ArrayLike | None = None,
    combiner: str | None = None,
) -> Array:
    """Look ids up in a table: `table[ids]`, or a combination of the rows of every bag.

    With the rows w of a bag and their weights c (ones if not given): Σ c w (sum), Σ c w / Σ c
    (mean), Σ c w / √Σ c² (sqrtn); a zero row if the denominator is zero.

    Args:
      table: float `[V, …]`.
      ids: integers of any shape; with a combiner `[…, H]`, whose last axis is the bag. -1 is
        padding, which gives a zero row, or adds nothing to a bag.
      weights: floats or integers in the shape of the ids; None means ones. Without a combiner a
        weight multiplies its row.
      combiner: "sum", "mean", "sqrtn", or None for one row per id.

    Returns:
      `[*ids.shape, …]` in the table's dtype; with a combiner `[*ids.shape[:-1], …]`, float32 at
      least.

    Raises:
      TypeError: the table is not float, or the ids are not integers.
      ValueError: shapes that do not fit, an unknown combiner, or ids outside [-1, V) whose values
        are known. Inside a jit such ids count as padding.

    Example:
      >>> table = jnp.arange(10.0).reshape(5, 2)
      >>> embedding_lookup(table, np.array([[4, 1], [0, -1]]), combiner="sum").tolist()
      [[10.0, 12.0], [0.0, 1.0]]
    """
    table, c = as_array(table), None if weights is None else as_array(weights)
    if not jnp.issubdtype(table.dtype, jnp.floating):
        refuse(
            "embedding_lookup: table",
            expected="a float dtype",
            got=str(table.dtype),
            error=TypeError,
        )
    if table.ndim < 1:
        refuse("embedding_lookup: table", expected="[V, …]", got="rank 0")
    ids = _checked_ids(ids, table.shape[0])
    check_choice("embedding_lookup: combiner", combiner, (None, "sum", "mean", "sqrtn"))
    check_weights("embedding_lookup: weights", c, ids)
    axes = varying_axes(table) | varying_axes(ids)
    rows = lookup_p.bind(as_varying(table, axes), as_varying(ids, axes))
    trailing = (1,) * (table.ndim - 1)
    present = (ids >= 0) & (ids < table.shape[0])
    if combiner is None:
        if c is None:
            return rows
        kept = jnp.where(present, c, 0).astype(rows.dtype)
        return rows * kept.reshape(*ids.shape, *trailing)
    if ids.ndim == 0:
        refuse("embedding_lookup: ids", expected="bags […, H] to combine", got="rank 0")
    wide = np.promote_types(table.dtype, np.float32)
    c = present.astype(wide) if c is None else jnp.where(present, c.astype(wide), 0)
    gains = gains_in_program(c, combiner).reshape(*ids.shape, *trailing)
    return jnp.sum(rows.astype(wide) * gains, axis=ids.ndim - 1)


def check_weights(what: str, weights: Any, ids: Any) -> None:
    """Check that weights fit ids.

    Args:
      what: what the weights are, for messages.
      weights: an array, or None.
      ids: an array.

    Raises:
      ValueError: weights of another shape than the ids, or no real numbers.
    """
    if weights is not None and (
        weights.shape != ids.shape or not is_real(weights.dtype)
    ):
        refuse(
            what,
            expected=f"real numbers of the ids' shape {ids.shape}",
            got=f"{weights.dtype} of shape {weights.shape}",
            remedy="give one weight per id, or None",
        )


def _checked_ids(ids: ArrayLike, size: int) -> Array:
    # Check NumPy arrays and lists as given: JAX without x64 would wrap an int64 into int32 first.
    dtype = np.dtype(getattr(ids, "dtype", None) or np.asarray(ids).dtype)
    check_integers("embedding_lookup: ids", dtype)
    if not isinstance(ids, Tracer):
        numbers = np.asarray(ids)
        bad = (numbers < PADDING_ID) | (numbers >= size)
        if bad.any():
            first = np.argwhere(bad)[0].tolist()
            refuse(
                "embedding_lookup: ids",
                expected=f"numbers in [0, {size}), or -1 for padding",
                got=f"{numbers[tuple(first)]} at {first}",
            )
    array = as_array(ids)
    if array.dtype in (jnp.int32, jnp.int64):
        return array
    return narrow_ids(array, np.int32)


# -- the primitive: rows of a table, zeros for ids outside it --------------------------------------


def _gather(table: Array, ids: Array) -> Array:
    # ids [3, 5] of a table [V, D]: gather [15, D], then [3, 5, D].
    # An id that is a literal of the program is a Python number under vmap.
    rows = dispatch.gather_rows(table, jnp.ravel(ids))
    return rows.reshape(*jnp.shape(ids), *table.shape[1:])


def _abstract(table: Any, ids: Any) -> Any:
    """Return the type of the rows: unsharded, varying over the same axes as the table."""
    shape = (*ids.shape, *table.shape[1:])
    sharding = table.sharding.update(spec=PartitionSpec(*[None] * len(shape)))
    return table.update(shape=shape, weak_type=False, sharding=sharding)


def _batched(arrays: tuple, dims: tuple) -> tuple[Array, int]:
    (table, ids), (table_dim, ids_dim) = arrays, dims
    # Batched ids of one table are just more ids. A batch of tables has no row of a table `[V, …]`
    # to look up, so it becomes a plain gather.
    if table_dim is None:
        return lookup_p.bind(table, jnp.moveaxis(ids, ids_dim, 0)), 0
    return jax.vmap(_gather, dims)(table, ids), 0


def _tangent(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    (table, ids), (table_dot, _) = primals, tangents
    rows = lookup_p.bind(table, ids)
    if type(table_dot) is ad.Zero:
        return rows, jnp.zeros_like(rows)
    return rows, lookup_p.bind(table_dot, ids)


def _transposed(cotangent: Any, table: Any, ids: Array) -> tuple[Any, None]:
    if type(cotangent) is ad.Zero:
        return ad.Zero(table.aval), None
    # The dense gradient: scatter-add of [N, D] into zeros [V, D]. `at` would count a negative id
    # from the end, so -1 becomes V, which is dropped.
    aval = table.aval
    absent = jnp.where(ids < 0, aval.shape[0], ids)
    return jnp.zeros(aval.shape, aval.dtype).at[absent].add(
        cotangent, mode="drop"
    ), None


lookup_p = Primitive("embedding_lookup")
"""Maps `(table [V, …], ids […])` to rows `[…, …]`; linear in the table."""

lookup_p.def_impl(jax.jit(_gather))
lookup_p.def_abstract_eval(_abstract)
mlir.register_lowering(lookup_p, mlir.lower_fun(_gather, multiple_results=False))
batching.primitive_batchers[lookup_p] = _batched
ad.primitive_jvps[lookup_p] = _tangent
ad.primitive_transposes[lookup_p] = _transposed

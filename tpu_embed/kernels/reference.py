"""The meaning of every kernel, in jnp, for every platform.

Rows are numbered from 0; `PADDING_ID` or any other number outside the table is an absent row: it
reads as zeros and is never written. Sums are taken in the order of their entries, so that their
bits do not depend on the program.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import Array
from tpu_embed.kernels import storage


def gather_rows(table: Array, rows: Array) -> Array:
    """Return `table[rows]`, zeros where a row is absent.

    Args:
      table: `[R, …]`, any dtype.
      rows: integer `[N]`.

    Returns:
      `[N, …]`, the table's dtype.
    """
    if not table.shape[0]:
        return jnp.zeros((rows.shape[0], *table.shape[1:]), table.dtype)
    rows = _in_32_bits(rows, table.shape[0])
    return table.at[rows].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def set_rows(table: Array, rows: Array, values: Array) -> Array:
    """Return `table` with `values` at `rows`; absent rows are not written.

    Args:
      table: `[R, …]`.
      rows: integer `[U]`; present rows are different from each other.
      values: `[U, …]`, the table's dtype.
    """
    rows = _in_32_bits(rows, table.shape[0])
    return table.at[rows].set(values, mode="drop", wrap_negative_indices=False, unique_indices=True)


def sort_rows(rows: Array) -> tuple[Array, Array]:
    """Return `rows` in ascending order, equal ones in theirs, and the position each came from.

    Args:
      rows: integer `[N]`.

    Returns:
      sorted rows `[N]`; int32 positions `[N]`.
    """
    positions = jnp.arange(rows.shape[0], dtype=jnp.int32)
    ordered, order = jax.lax.sort((rows, positions), num_keys=1, is_stable=True)
    return ordered, order


def segment_sum(values: Array, segments: Array, num_segments: int) -> Array:
    """Sum runs of entries, each run from its first entry to its last, starting from zero.

    Sequential on CPU and TPU, where XLA expands a scatter-add into a loop over its entries.

    Args:
      values: `[N, …]`.
      segments: integer `[N]`, non-decreasing; `num_segments` or more: the entry is left out.
      num_segments: n.

    Returns:
      `[n, …]`.
    """
    zeros = jnp.zeros((num_segments, *values.shape[1:]), values.dtype)
    return zeros.at[_in_32_bits(segments, num_segments)].add(
        values, mode="drop", wrap_negative_indices=False, indices_are_sorted=True
    )


def segment_sum_scan(values: Array, segments: Array, num_segments: int) -> Array:
    """Sum runs of entries by a segmented scan: repeatable where a scatter-add is not (GPU atomics).

    Same arguments and result as `segment_sum`, within rounding: the scan adds in a tree.
    """
    if values.shape[0] == 0:
        return jnp.zeros((num_segments, *values.shape[1:]), values.dtype)
    change = segments[1:] != segments[:-1]
    edge = jnp.ones((1,), bool)
    starts = jnp.concatenate([edge, change]).reshape((-1,) + (1,) * (values.ndim - 1))

    def add_unless_start(left: tuple[Array, Array], right: tuple[Array, Array]):
        (left_start, left_sum), (right_start, right_sum) = left, right
        return left_start | right_start, jnp.where(right_start, right_sum, left_sum + right_sum)

    _, sums = jax.lax.associative_scan(add_unless_start, (starts, values))
    ends = jnp.concatenate([change, edge])
    return set_rows(
        jnp.zeros((num_segments, *values.shape[1:]), values.dtype),
        jnp.where(ends, segments, num_segments),
        sums,
    )


def gather_sum(
    source: Array,
    index: Array,
    segments: Array,
    weights: Array | None,
    factors: Array | None,
    *,
    bags: tuple[int, ...],
    examples: int,
    segment_sum: Callable[[Array, Array, int], Array] = segment_sum,
) -> tuple[Array, ...]:
    """Sum rows of `source`, each times its weight, into segments; multiply each sum.

    A segment is a bag: segments are numbered by example, then by column, the bags that an example
    has of all features. Products and sums are rounded one by one, in the order of the entries.

    Args:
      source: `[R, D]` float, or bfloat16 stored as uint16, which is summed in float32.
      index: integer `[N]`, rows of `source`; absent ones are left out.
      segments: int32 `[N]`, non-decreasing; those past the last one are left out.
      weights: `[N]`, or None: all ones.
      factors: of every segment, or None: all ones.
      bags: columns of every feature.
      examples: e.
      segment_sum: how runs are summed.

    Returns:
      per feature `[e * bags, D]`.
    """
    present = (index >= 0) & (index < source.shape[0])
    rows = storage.widened(gather_rows(source, index))
    if weights is not None:
        kept = jnp.where(present, weights, jnp.zeros_like(weights))
        rows = jax.lax.optimization_barrier(rows * kept[:, None])
    columns = sum(bags)
    sums = segment_sum(rows, segments, examples * columns)
    if factors is not None:
        sums = scale(sums, factors)
    if len(bags) == 1:
        return (sums,)
    parts = jnp.split(sums.reshape(examples, columns, -1), np.cumsum(bags)[:-1].tolist(), axis=1)
    return tuple(part.reshape(-1, source.shape[1]) for part in parts)


def scale(values: Array, factors: Array) -> Array:
    """Return `values * factors`, row by row; zeros where the factor is zero, whatever the value.

    Args:
      values: `[n, D]`.
      factors: `[n]`.
    """
    zero = (factors == 0)[:, None]
    return jnp.where(zero, jnp.zeros_like(values), values * factors[:, None])


def _in_32_bits(rows: Array, size: int) -> Array:
    """Return rows whose low 32 bits are absent where they are, in the same order.

    JAX indexes an array of less than 2³¹ rows with those bits alone: 2³² would be row 0.
    """
    return jnp.clip(rows, -1, size) if rows.dtype.itemsize > 4 else rows

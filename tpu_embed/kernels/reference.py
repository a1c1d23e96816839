"""The reference implementation of every kernel, in JAX's own operations, for every platform.

It defines the results that faster implementations must give. Rows are numbered from 0. `PADDING_ID`
and every other number outside the table stand for an absent row, which is read as zeros and never
written. Sums are taken in the order of their entries, so that their bits do not depend on the
program.

Input: tables, row numbers and values. Output: rows, tables with rows set, or sums of rows.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import Array, PyTree
from tpu_embed.kernels import storage
from tpu_embed.kernels.operands import RowsToSum, SumLayout


def gather_rows(table: Array, row_ids: Array) -> Array:
    """Return `table[row_ids]`, zeros where a row is absent.

    Args:
      table: `[R, …]`, any dtype.
      row_ids: integer `[N]`.

    Returns:
      `[N, …]`, the table's dtype.
    """
    # JAX refuses to index an axis of length 0, even with rows that are all absent.
    if not table.shape[0]:
        return jnp.zeros((row_ids.shape[0], *table.shape[1:]), table.dtype)
    row_ids = _in_32_bits(row_ids, table.shape[0])
    return table.at[row_ids].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def set_rows(table: Array, row_ids: Array, values: Array) -> Array:
    """Return `table` with `values` at `row_ids`; absent rows are not written.

    Args:
      table: `[R, …]`.
      row_ids: integer `[U]`; present rows are all different.
      values: `[U, …]`, the table's dtype.
    """
    # Without wrap_negative_indices=False, -1 would be the last row instead of an absent one.
    row_ids = _in_32_bits(row_ids, table.shape[0])
    return table.at[row_ids].set(
        values, mode="drop", wrap_negative_indices=False, unique_indices=True
    )


def sort_rows(row_ids: Array) -> tuple[Array, Array]:
    """Return `row_ids` in ascending order, and the position that each came from.

    Equal rows keep their order.

    Args:
      row_ids: integer `[N]`.

    Returns:
      sorted rows `[N]`; int32 positions `[N]`.
    """
    # (7, 3, 7) -> (3, 7, 7) from (1, 0, 2). The sort carries the positions along with the rows.
    positions = jnp.arange(row_ids.shape[0], dtype=jnp.int32)
    ordered, order = jax.lax.sort((row_ids, positions), num_keys=1, is_stable=True)
    return ordered, order


def sort_with(row_ids: Array, payload: PyTree) -> tuple[Array, Array, PyTree]:
    """Return sorted rows and their positions as `sort_rows` does, and `payload` in that order.

    Args:
      row_ids: integer `[N]`.
      payload: a pytree of arrays `[N]`.

    Returns:
      sorted rows `[N]`; int32 positions `[N]`; the payload.
    """
    # On a TPU a gather of N numbers costs ten times as much as sorting them, so everything that has
    # to follow the rows takes part in the sort. Positions are the second key: so equal rows keep
    # their order, and the sort need not be a stable one, which would carry positions of its own.
    positions = jnp.arange(row_ids.shape[0], dtype=jnp.int32)
    leaves, structure = jax.tree.flatten(payload)
    operands = (row_ids, positions, *leaves)
    ordered, order, *carried = jax.lax.sort(operands, num_keys=2, is_stable=False)
    return ordered, order, jax.tree.unflatten(structure, carried)


def sort_pairs(row_ids: Array, values: Array) -> tuple[Array, Array]:
    """Return sorted rows, and their values in the same order.

    Args:
      row_ids: integer `[N]`.
      values: integer `[N]`, non-decreasing, so that values of one row stay in their order.
    """
    # The values are a second key, so no positions need take part: one operand less for a TPU.
    return jax.lax.sort((row_ids, values), num_keys=2, is_stable=False)  # type: ignore[return-value]


def compact(values: Array, kept: Array, fill: int) -> Array:
    """Return the kept values, followed by as many times `fill` as values were left out.

    Args:
      values: integer `[N]`; those that are kept ascend, and none exceeds `fill`.
      kept: bool `[N]`.
      fill: a number of the values' dtype.
    """
    # Values (3, 7, 7, 9) of which the first two are kept, fill 10: (3, 7, 10, 10).
    marked = jnp.where(kept, values, jnp.asarray(fill, values.dtype))
    return jax.lax.sort(marked, is_stable=False)


def occurs(row_ids: Array, size: int) -> Array:
    """Tell of each row 0 … `size` - 1 whether it is among `row_ids`, bool `[size]`.

    Args:
      row_ids: int32 `[N]`; others than 0 … `size` - 1 count for nothing.
      size: the number of rows, less than 2³⁰.
    """
    # Rows 2, 0, 2 of 3. An occurrence of row r is the key 2 r, row r itself the key 2 r + 1. Sorted
    # they are 0 1 3 4 4 5: a row occurs if the number before its own is 2 r.
    present = (row_ids >= 0) & (row_ids < size)
    rows = 2 * jnp.arange(size, dtype=jnp.int32) + 1
    keys = jnp.concatenate([jnp.where(present, 2 * row_ids, 2 * size), rows])
    keys = jax.lax.sort(keys, is_stable=False)
    before = jnp.concatenate([jnp.full((1,), -1, jnp.int32), keys[:-1]])
    # A second sort moves the rows to the front, as 2 r if they occur and 2 r + 1 if not: 0 3 4.
    told = jnp.where(before == keys - 1, keys - 1, keys)
    told = jax.lax.sort(jnp.where(keys % 2 == 1, told, 2 * size), is_stable=False)
    return told[:size] % 2 == 0


def segment_sum(values: Array, segments: Array, num_segments: int) -> Array:
    """Return the sums of runs of entries, each added from its first entry to its last.

    On CPU and TPU the order is certain, because XLA expands a scatter-add into a loop there.

    Args:
      values: `[N, …]`.
      segments: integer `[N]`, the sum that each entry goes to, non-decreasing; entries with
        `num_segments` or more are left out.
      num_segments: the number n of sums.

    Returns:
      `[n, …]`.
    """
    # Values (a, b, c, d), segments (0, 0, 2, 3) and n = 3: (a + b, 0, c).
    zeros = jnp.zeros((num_segments, *values.shape[1:]), values.dtype)
    return zeros.at[_in_32_bits(segments, num_segments)].add(
        values, mode="drop", wrap_negative_indices=False, indices_are_sorted=True
    )


def segment_sum_scan(values: Array, segments: Array, num_segments: int) -> Array:
    """Return the same sums as `segment_sum`, by a scan, which is repeatable on GPUs.

    A GPU's scatter-add uses atomics, in an order that changes from run to run. The scan adds in a
    tree, always the same one, so its sums differ from those of `segment_sum` by rounding only.
    """
    if values.shape[0] == 0:
        return jnp.zeros((num_segments, *values.shape[1:]), values.dtype)
    change = segments[1:] != segments[:-1]
    edge = jnp.ones((1,), bool)
    starts = jnp.concatenate([edge, change]).reshape((-1,) + (1,) * (values.ndim - 1))

    # Running sums that restart where a segment starts. Values (1, 2, 3, 4) of segments (0, 0, 1, 1)
    # have running sums (1, 3, 3, 7); the last one of each segment is its sum: 3 and 7.
    def add_unless_start(left, right):
        (left_start, left_sum), (right_start, right_sum) = left, right
        return left_start | right_start, jnp.where(
            right_start, right_sum, left_sum + right_sum
        )

    _, sums = jax.lax.associative_scan(add_unless_start, (starts, values))
    ends = jnp.concatenate([change, edge])
    return set_rows(
        jnp.zeros((num_segments, *values.shape[1:]), values.dtype),
        jnp.where(ends, segments, num_segments),
        sums,
    )


def gather_sum(
    rows: RowsToSum,
    layout: SumLayout,
    segment_sum: Callable[[Array, Array, int], Array] = segment_sum,
) -> tuple[Array, ...]:
    """Sum rows of `source`, each times its weight, by bag.

    Products and sums are rounded one by one, in the order of the entries.

    Args:
      rows: the rows, and the sum that each is added to.
      layout: how the sums are numbered.
      segment_sum: the function that sums runs.

    Returns:
      one array `[bags[f], D]` per feature f.
    """
    present = (rows.index >= 0) & (rows.index < rows.source.shape[0])
    values = storage.widened(gather_rows(rows.source, rows.index))
    if rows.weights is not None:
        kept = jnp.where(present, rows.weights, jnp.zeros_like(rows.weights))
        # Zero times infinity is NaN. The derivative by a weight of zero is that of finite rows.
        finite = jnp.abs(values) <= jnp.finfo(values.dtype).max
        nothing = (kept == 0)[:, None] & ~finite
        values = jnp.where(nothing, jnp.zeros_like(values), values)
        # The barrier keeps XLA from turning products and sums into multiply-adds, which round once.
        values = jax.lax.optimization_barrier(values * kept[:, None])
    return by_feature(segment_sum(values, rows.segments, sum(layout.bags)), layout)


def by_feature(sums: Array, layout: SumLayout) -> tuple[Array, ...]:
    """Return the sums of every feature's bags, `[bags[f], D]` each, from `[sum(bags), D]`."""
    return tuple(jnp.split(sums, np.cumsum(layout.bags)[:-1].tolist()))


def _in_32_bits(row_ids: Array, size: int) -> Array:
    """Return rows with every absent one clipped to -1 or `size`, so that they fit in 32 bits.

    JAX indexes an array of less than 2³¹ rows with the low 32 bits alone: 2³² would be row 0.
    """
    return jnp.clip(row_ids, -1, size) if row_ids.dtype.itemsize > 4 else row_ids

"""Sequences of different lengths, one after the other in an array: the arithmetic of their places.

A segment is one sequence. Segments of lengths 2, 0 and 1 in an array of 4 places have the splits
(0, 2, 2, 3): segment e takes the places from split e up to split e + 1, and the last place is free.

Input: row splits `[n + 1]` and values `[C, …]` of one replica. Output: the segment and position of
every place; values moved to other places; sums per segment.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from tpu_embed._types import Array
from tpu_embed.kernels import dispatch, reference


def segment_ids(row_splits: Array, capacity: int) -> Array:
    """Return the segment of every place, int32 `[C]`; n, one past the last, for free places.

    Args:
      row_splits: int32 `[n + 1]`.
      capacity: C.
    """
    # Splits (0, 2, 2, 3) and C = 5: the ends 2, 2 and 3 are counted where they are, (0, 0, 2, 1,
    # 0), and the running sum (0, 0, 2, 3, 3) is the number of segments that have ended before.
    ends = jnp.zeros((capacity,), jnp.int32).at[row_splits[1:]].add(1, mode="drop")
    return jnp.cumsum(ends, dtype=jnp.int32)


def positions(row_splits: Array, capacity: int) -> Array:
    """Return the position of every place in its segment, int32 `[C]`; 0 for free places."""
    places = jnp.arange(capacity, dtype=jnp.int32)
    ids = segment_ids(row_splits, capacity)
    # Segments (0, 0, 2, 3, 3) begin at places 0, 2 and 3. The latest beginning up to each place is
    # (0, 0, 2, 3, 3), and places (0, 1, 2, 3, 4) are so far from it: (0, 1, 0, 0, 1).
    begins = jnp.concatenate([jnp.ones((1,), bool), ids[1:] != ids[:-1]])[:capacity]
    begun = jax.lax.cummax(jnp.where(begins, places, 0))
    return jnp.where(places < row_splits[-1], places - begun, 0)


def pad(row_splits: Array, values: Array, length: int) -> tuple[Array, Array]:
    """Return a row of L places per segment, `[n, L, …]`, and which are filled, bool `[n, L]`.

    Of longer segments the first L values are taken.
    """
    wanted = jnp.arange(length, dtype=jnp.int32)
    mask = wanted < (row_splits[1:] - row_splits[:-1])[:, None]
    return _take(values, row_splits[:-1, None] + wanted, mask), mask


def first(row_splits: Array, values: Array) -> Array:
    """Return the first value of each segment, `[n, …]`; zeros where it is empty."""
    return _take(values, row_splits[:-1], row_splits[:-1] < row_splits[1:])


def last(row_splits: Array, values: Array) -> Array:
    """Return the last value of each segment, `[n, …]`; zeros where it is empty."""
    return _take(values, row_splits[1:] - 1, row_splits[:-1] < row_splits[1:])


def causal(row_splits: Array, capacity: int) -> Array:
    """Return whether place j is in the segment of place i and not after it, bool `[C, C]`."""
    ids, places = (
        segment_ids(row_splits, capacity),
        jnp.arange(capacity, dtype=jnp.int32),
    )
    used = ids < row_splits.shape[0] - 1
    return (ids[:, None] == ids) & (places <= places[:, None]) & used[:, None]


def unpad(padded: Array, lengths: Array, capacity: int) -> tuple[Array, Array]:
    """Return row splits `[n + 1]` and values `[C, …]` of the first values of each row.

    Args:
      padded: `[n, L, …]`.
      lengths: int32 `[n]`; those outside of 0 … L count as the nearest of them.
      capacity: C; what does not fit is cut off the end.
    """
    rows, length = padded.shape[:2]
    ends = jnp.cumsum(jnp.clip(lengths, 0, length), dtype=jnp.int32)
    splits = jnp.minimum(jnp.concatenate([jnp.zeros((1,), jnp.int32), ends]), capacity)
    # The value at position p of row e has number e L + p among all places of the rows.
    ids, position = segment_ids(splits, capacity), positions(splits, capacity)
    places = padded.reshape(rows * length, *padded.shape[2:])
    return splits, _take(places, ids * length + position, ids < rows)


def join(row_splits: Sequence[Array], values: Sequence[Array]) -> tuple[Array, Array]:
    """Return row splits and values of segments that are joined from those of several parts.

    Args:
      row_splits: `[n + 1]` per part.
      values: `[C, …]` per part, alike but for C.
    """
    # A split says how many values come before it, so the splits of the parts add up.
    joined, capacity = (
        sum(row_splits[1:], row_splits[0]),
        sum(len(part) for part in values),
    )
    ids, position = segment_ids(joined, capacity), positions(joined, capacity)
    # Parts of lengths 2 and 1: positions 0 and 1 are in the first part, position 2 is the first of
    # the second. So subtract the length of one part after the other: the value is in the part where
    # the position is within the length. Parts stand one after the other in `source`.
    source, offset = jnp.zeros_like(position), 0
    for splits, part in zip(row_splits, values, strict=True):
        begin, length = splits[ids], (splits[1:] - splits[:-1]).at[ids].get(mode="fill")
        here = (position >= 0) & (position < length)
        source = jnp.where(here, offset + begin + position, source)
        position, offset = position - length, offset + len(part)
    return joined, _take(jnp.concatenate(values), source, ids < len(joined) - 1)


def sum_segments(row_splits: Array, values: Array) -> Array:
    """Return the sum of each segment, `[n, …]`; floats are summed in float32 at least."""
    values = _widen(values)
    ids, segments = segment_ids(row_splits, values.shape[0]), row_splits.shape[0] - 1
    # Not `dispatch.segment_sum`: a jit cannot split its compiled kernel over the devices.
    otherwise = functools.partial(reference.segment_sum, num_segments=segments)
    if not isinstance(values.shape[0], int):
        # A program for any batch size knows no number of places, without which there is no scan.
        return otherwise(values, ids)
    scan = functools.partial(reference.segment_sum_scan, num_segments=segments)
    return dispatch.choose(values, ids, otherwise=otherwise, gpu=scan)


def spread(row_splits: Array, of_segments: Array, capacity: int) -> Array:
    """Return the value of each place's segment, `[C, …]`; zeros for free places.

    Its gradient is the sum over the places of each segment, as `sum_segments` takes it.

    Args:
      row_splits: int32 `[n + 1]`.
      of_segments: `[n, …]`, of any dtype.
      capacity: C.
    """
    if not of_segments.shape[0]:  # JAX refuses to index an axis of length 0
        return jnp.zeros((capacity, *of_segments.shape[1:]), of_segments.dtype)
    ids, wide = segment_ids(row_splits, capacity), _widen(of_segments)

    def take(values, ids):
        return values.at[ids].get(mode="fill", fill_value=0, indices_are_sorted=True)

    def transpose_sum(values, ids):
        add = functools.partial(
            reference.segment_sum_scan, segments=ids, num_segments=len(values)
        )
        like = jax.ShapeDtypeStruct((capacity, *values.shape[1:]), values.dtype)
        return jax.linear_transpose(add, like)(values)[0]

    if isinstance(capacity, int) and jnp.issubdtype(wide.dtype, jnp.floating):
        found = dispatch.choose(wide, ids, otherwise=take, gpu=transpose_sum)
    else:
        found = take(wide, ids)
    return found.astype(of_segments.dtype)


def _widen(values: Array) -> Array:
    """Return floats of fewer than 32 bits as float32, and anything else as it is."""
    if jnp.issubdtype(values.dtype, jnp.floating) and jnp.finfo(values.dtype).bits < 32:
        return values.astype(jnp.float32)
    return values


def _take(values: Array, places: Array, wanted: Array) -> Array:
    """Return `values[places]`, zeros where nothing is wanted.

    Args:
      values: `[C, …]`.
      places: int32 of any shape; those that are wanted are in 0 … C - 1, and all different.
      wanted: bool, shaped like `places`.
    """
    if not values.shape[0]:  # JAX refuses to index an axis of length 0
        return jnp.zeros((*places.shape, *values.shape[1:]), values.dtype)
    # No place occurs twice, also outside of the values, so the derivative is a scatter without
    # collisions, which needs no atomics.
    outside = values.shape[0] + jnp.arange(places.size, dtype=jnp.int32).reshape(
        places.shape
    )
    places = jnp.where(wanted, places, outside)
    return values.at[places].get(mode="fill", fill_value=0, unique_indices=True)

"""What one device's line of a packed batch holds: the fields of every stack, one after another.

All numbers that a step needs travel in a single int32 array `[devices, L]`, because one large
transfer is faster than many small ones. A line holds, for one stack after another, either the ids,

    row_ids         [N]      the physical rows of the device's ids, feature after feature
    bags            [N]      the bag of each id, unless all features have a width
    gains           [N]      the gain of each id, unless those of all features are 1
    blocks          [N]      the block of each id's example, where gradients are not summed

or, where the host has routed them, instead of the rows:

    index           [N]      where each id's row comes back: its place among the fetched rows
    asked           [S, C]   the local rows that the devices ask this owner for, by source
    bags            [N]      as above
    gains           [N]      as above
    sum_index       [N]      the bag of each id, sorted by the sum that its gradient is added to
    sum_segments    [N]      that sum
    sum_gains       [N]      its gain, unless all are 1
    merge_index     [P]      the partial sums that arrive, sorted by row
    merge_segments  [P]      the merged sum that each is added to
    merged          [U]      the local row of each merged sum

For every jagged feature, by its number, there is

    row_splits/f    [B/S + 1]  where each example's row begins among the feature's places

`asked` and the merge are the owner's only where the host knows the whole batch. With several
processes `asked` is what this device asks of each shard, and instead of the merge there is

    sent            [S, C']  the local row of each partial sum that this device sends

Numbers of 64 bits take two places.

Input: a spec and a layout. Output: the fields, and views of them in a packed array.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import Array
from tpu_embed.core.batch.spec import BatchSpec
from tpu_embed.core.batch.stack_view import StackView, view_stacks
from tpu_embed.core.layout import Layout

INT32 = np.dtype(np.int32)

ROW_SPLITS = "row_splits/"
"""What the names of fields begin with that end with the number of a jagged feature."""


class LineField(NamedTuple):
    """One array of one stack in a line.

    Attributes:
      name: its name, see above.
      shape: its shape on one device.
      dtype: its dtype.
      start: where it begins in the line, in int32 numbers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    start: int

    @property
    def words(self) -> int:
        """How many int32 numbers it takes."""
        return math.prod(self.shape) * (self.dtype.itemsize // 4)


@functools.lru_cache(256)  # every step asks several times, mostly for the same spec
def line_of(spec: BatchSpec, layout: Layout) -> tuple[tuple[LineField, ...], ...]:
    """Return the fields of every stack."""
    stacks, end = [], 0
    for view in view_stacks(spec, layout):
        fields = []
        for name, shape, dtype in _fields(view):
            fields.append(LineField(name, shape, dtype, end))
            end += fields[-1].words
        stacks.append(tuple(fields))
    return tuple(stacks)


def line_length(stacks: tuple[tuple[LineField, ...], ...]) -> int:
    """Return L, the length of a line with these fields in int32 numbers."""
    return max(field.start + field.words for fields in stacks for field in fields)


def fields_of(packed: np.ndarray, fields: tuple[LineField, ...]) -> dict[str, np.ndarray]:
    """Return the fields of one stack as views `[devices, …]` into a packed array."""
    return {
        field.name: packed[:, field.start : field.start + field.words]
        .view(field.dtype)
        .reshape(packed.shape[0], *field.shape)
        for field in fields
    }


def read_line(line: Array, fields: tuple[LineField, ...]) -> dict[str, Array]:
    """Return the fields of one stack from one device's line, inside a program."""
    found = {}
    for field in fields:
        piece, words = line[field.start : field.start + field.words], field.dtype.itemsize // 4
        if words > 1:
            piece = piece.reshape(-1, words)
        if field.dtype != INT32:
            piece = jax.lax.bitcast_convert_type(piece, jnp.dtype(field.dtype))
        found[field.name] = piece.reshape(field.shape)
    return found


def _fields(view: StackView) -> list[Any]:
    """Return name, shape and dtype of the fields of a stack."""
    ids, stack, room = (view.num_ids,), view.stack, view.room
    shards, index, gains = stack.num_shards, stack.index_dtype, stack.compute_dtype
    routed, sums, merges = view.is_routed, view.routes_update, view.merges_on_host
    asks, parcels = routed and shards > 1, sums and not view.by_psum
    # Where the update is not routed, the devices sort the physical rows.
    sorts = asks and view.updates and not view.accumulates
    # Whether a stack has a field; its name, shape and dtype.
    found: list[tuple[bool, str, tuple[int, ...], Any]] = [
        (routed, "index", ids, INT32 if asks else index),
        (asks, "asked", (shards, max(1, room.row_capacity)), index),
        (sorts or not routed, "row_ids", ids, index),
        (not view.is_dense, "bags", ids, INT32),
        (view.has_gains, "gains", ids, gains),
        (view.needs_blocks and not sums, "blocks", ids, INT32),
        (sums, "sum_index", ids, INT32),
        (sums, "sum_segments", ids, INT32),
        (sums and view.has_gains, "sum_gains", ids, gains),
        (parcels and not merges, "sent", (shards, view.parcel_size), index),
        (parcels and merges and not view.is_local, "merge_index", (view.num_partials,), INT32),
        (parcels and merges, "merge_segments", (view.num_partials,), INT32),
        (merges, "merged", (view.num_merged,), index),
    ]
    each = zip(view.features, view.sizes, view.shapes, strict=True)
    found += [(own.has_places, f"{ROW_SPLITS}{f}", (n + 1,), INT32) for f, n, own in each]
    return [field for there, *field in found if there]

"""Ids become physical rows, packed into one int32 array, and unpacked again on the devices.

The array has one line per device. A line holds, for one stack after another,

    the physical rows of the device's ids, in batch order        [N]
    the bag of each id, unless all features are dense            [N]
    the weight of each id, if any feature of the stack has them  [N]

In a dense stack every example has the same number of id columns, so the bag of an id follows from
its position. Numbers of 64 bits take two places.

Input: one validated `HostIds` per feature. Output: an int32 array `[replicas, L]`, sent to the
devices in one transfer; there, `unpack` returns the ids of every stack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.batch.located import LocalIds
from tpu_embed.core.batch.spec import BatchSpec, StackSpec
from tpu_embed.core.batch.stack_view import StackView, view_stacks
from tpu_embed.core.ids import HostIds
from tpu_embed.core.layout import Layout, Stack

INT32 = np.dtype(np.int32)


class Part(NamedTuple):
    """Where the row ids, bags and weights of one stack begin in a packed line.

    Offsets count int32 numbers. -1 means that the line has no bags, or no weights, of the stack;
    `end` is where the next stack begins.
    """

    row_ids: int
    bags: int
    weights: int
    end: int


def parts(spec: BatchSpec, layout: Layout) -> tuple[Part, ...]:
    """Return where every stack's numbers are in a packed line."""
    found, end = [], 0
    for view in view_stacks(spec, layout):
        n, stack = view.num_ids, view.stack
        # 100 flat ids with weights, int32 and float32: rows at 0, bags at 100, weights at 200.
        row_ids, end = end, end + n * (stack.index_dtype.itemsize // 4)
        bags = weights = -1
        if not view.is_dense:
            bags, end = end, end + n
        if view.is_weighted:
            weights, end = end, end + n * (stack.compute_dtype.itemsize // 4)
        found.append(Part(row_ids, bags, weights, end))
    return tuple(found)


def natural_spec(hosts: Sequence[HostIds], layout: Layout, replicas: int) -> BatchSpec:
    """Return the spec that fits these ids exactly, before its exchange capacities are counted.

    Args:
      hosts: the ids of every feature.
      layout: the engine's layout.
      replicas: how many parts the ids are split into: the replicas of this process.

    Raises:
      ValueError: the features' batch sizes differ, or do not divide over the replicas.
    """
    shapes = tuple(host.shape for host in hosts)
    bare = [StackSpec(layout.features_of(g), 0, 0, 0) for g in range(len(layout.stacks))]
    spec = BatchSpec(replicas, shapes, tuple(bare))
    spec.check_batch([feature.path for feature in layout.features])
    sized = tuple(
        dataclasses.replace(view.room, ids=_ids_per_device(hosts, view))
        for view in view_stacks(spec, layout)
    )
    return dataclasses.replace(spec, stacks=sized)


def _ids_per_device(hosts: Sequence[HostIds], view: StackView) -> int:
    """Return the number of ids of a stack on the device that has the most."""
    if view.is_dense:
        return view.num_ids
    spec = view.spec
    per_device = np.zeros(spec.replicas, np.int64)
    for f in view.features:
        host = hosts[f]
        bags = spec.local_batch * host.shape.bags
        # A dense feature of a flat stack is packed without its padding. In a flat feature, device
        # d holds the bags from d * bags to (d + 1) * bags; they are sorted, so bisect.
        if host.bags is None:
            per_device += np.count_nonzero(host.ids.reshape(spec.replicas, -1) >= 0, axis=1)
        else:
            bounds = np.arange(spec.replicas + 1) * bags
            per_device += np.diff(np.searchsorted(host.bags, bounds))
    return int(per_device.max())


def pack(hosts: Sequence[HostIds], spec: BatchSpec, layout: Layout) -> np.ndarray:
    """Write all ids into one array, int32 `[replicas, L]`.

    Args:
      hosts: the ids of every feature; they fit the spec.
      spec: the static shape to pack them in; its exchange capacities are not used.
      layout: the engine's layout.
    """
    places = parts(spec, layout)
    packed = np.empty((spec.replicas, places[-1].end), np.int32)
    for view, place in zip(view_stacks(spec, layout), places, strict=True):
        n, stack = view.num_ids, view.stack
        # Views [replicas, N] into the packed array: what is written to them needs no copy.
        row_ids = _view(packed, place.row_ids, n, stack.index_dtype)
        weights = None
        if view.is_weighted:
            weights = _view(packed, place.weights, n, stack.compute_dtype)
        if view.is_dense:
            _pack_dense(hosts, view, row_ids, weights)
        else:
            bags = _view(packed, place.bags, n, INT32)
            _pack_flat(hosts, view, row_ids, bags, weights)
    return packed


def packed_row_ids(
    packed: np.ndarray, view: StackView, part: Part
) -> tuple[np.ndarray, np.ndarray]:
    """Return the physical rows of a packed stack, and the local example of each; `[replicas, N]`.

    In a flat stack the example of padding is one past the last.
    """
    n = view.num_ids
    row_ids = _view(packed, part.row_ids, n, view.stack.index_dtype)
    if not view.is_dense:
        return row_ids, _view(packed, part.bags, n, INT32) // view.bags_per_example
    examples = np.arange(n, dtype=np.int32) // max(1, sum(view.columns))
    return row_ids, np.broadcast_to(examples, row_ids.shape)


def _view(packed: np.ndarray, start: int, n: int, dtype: np.dtype) -> np.ndarray:
    """Return n numbers of `dtype` per line of the packed array as a view, `[replicas, n]`."""
    return packed[:, start : start + n * (dtype.itemsize // 4)].view(dtype)


def _pack_dense(
    hosts: Sequence[HostIds], view: StackView, row_ids: np.ndarray, weights: np.ndarray | None
) -> None:
    """Write the ids of a dense stack: per example, the id columns of one feature after another.

    With features of 2 and 3 columns, a line is a0 a0 b0 b0 b0 | a1 a1 b1 b1 b1 | … by example.
    """
    spec, start = view.spec, 0
    if not sum(view.columns):
        row_ids.fill(PADDING_ID)
        return
    for f, shape, count in zip(view.features, view.shapes, view.columns, strict=True):
        if not count:
            continue
        host = hosts[f]
        place = (spec.replicas, spec.local_batch, shape.bags, shape.width or 0)
        # The spec may be wider than this batch: the last positions of each bag become padding.
        ids = host.ids.reshape(*place[:3], -1)
        given = np.s_[..., : ids.shape[-1]]
        here = _columns(row_ids, view, start, count).reshape(place)
        here[..., ids.shape[-1] :] = PADDING_ID
        here[given] = _physical(ids, view.layout, f)
        if host.padded:
            here[given][ids < 0] = PADDING_ID
        if weights is not None:
            scale = _columns(weights, view, start, count).reshape(place)
            scale[..., ids.shape[-1] :] = 0
            scale[given] = 1 if host.weights is None else host.weights.reshape(ids.shape)
        start += count


def _columns(line: np.ndarray, view: StackView, start: int, count: int) -> np.ndarray:
    """Return a feature's columns of a dense stack as a view `[replicas, examples, count]`."""
    spec = view.spec
    by_example = line.reshape(spec.replicas, spec.local_batch, sum(view.columns))
    return by_example[:, :, start : start + count]


def _physical(ids: np.ndarray, layout: Layout, f: int) -> np.ndarray:
    """Return the physical rows of feature f's ids; for padding the result is meaningless."""
    feature = layout.features[f]
    stack: Stack = layout.stacks[feature.stack]
    return stack.physical(ids.astype(stack.index_dtype, copy=False), feature.table)


def _pack_flat(
    hosts: Sequence[HostIds],
    view: StackView,
    row_ids: np.ndarray,
    bags: np.ndarray,
    weights: np.ndarray | None,
) -> None:
    """Write the ids of a flat stack in batch order: by example, then feature, then position.

    For example, one device with 2 examples: feature a has the ids 5 | 6 7, feature b has 8 | 9. The
    line is 5 8 6 7 9. The ids of feature a move from the positions 0 | 1 2 to 0 | 2 3, so its
    shifts are 0 and 1; those of feature b move from 0 | 1 to 1 | 4, so its shifts are 1 and 3.
    """
    spec, offsets, per_example = view.spec, view.bag_offsets, view.bags_per_example
    features, shapes = view.features, view.shapes
    # What no id overwrites is padding: absent rows, in a bag after the last one.
    row_ids.fill(PADDING_ID)
    bags.fill(spec.local_batch * per_example)
    if weights is not None:
        weights.fill(0)
    flat = [_flatten(hosts[f]) for f in features]
    examples = [bag // shape.bags for shape, (_, bag, _) in zip(shapes, flat, strict=True)]
    shifts = _shifts(examples, spec.replicas, spec.batch)
    for column, (f, (ids, bag, weight)) in enumerate(zip(features, flat, strict=True)):
        example = examples[column]
        device = example // spec.local_batch
        position = np.arange(ids.size) + shifts[example, column]
        row_ids[device, position] = _physical(ids, view.layout, f)
        # Global bag -> bag on the device: the example's first bag, the feature's offset within an
        # example, and the bag's number within the feature.
        local = (example - device * spec.local_batch) * per_example + offsets[column]
        bags[device, position] = local + (bag - example * shapes[column].bags)
        if weights is not None:
            weights[device, position] = 1.0 if weight is None else weight


def _shifts(examples: Sequence[np.ndarray], replicas: int, batch: int) -> np.ndarray:
    """Return how far the ids of each example and feature move in a line, int64 `[B, features]`.

    Args:
      examples: the global example of each id `[N]`, non-decreasing, of every feature.
      replicas: the number of lines.
      batch: B, the examples of all lines.
    """
    # How many ids each example has of each feature, and how many ids precede these on their line;
    # both [B, features].
    counts = np.stack([np.bincount(example, minlength=batch) for example in examples], axis=1)
    by_device = counts.reshape(replicas, -1)
    starts = (np.cumsum(by_device, axis=1) - by_device).reshape(counts.shape)
    # Among the feature's own ids, those of an example begin after the ids of earlier examples.
    return starts - (np.cumsum(counts, axis=0) - counts)


def _flatten(host: HostIds) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return ids, global bags and weights of one feature, in batch order without padding."""
    if host.bags is not None:
        return host.ids, host.bags, host.weights
    # Dense ids [B, bags, width]: the flat index of an id, divided by the width, is its bag.
    index = np.flatnonzero(host.ids >= 0)
    weights = None if host.weights is None else host.weights.reshape(-1)[index]
    return host.ids.reshape(-1)[index], index // max(1, host.ids.shape[-1]), weights


def unpack(line: Array, spec: BatchSpec, layout: Layout) -> tuple[LocalIds, ...]:
    """Return the ids of every stack from one device's packed line; the inverse of `pack`.

    Args:
      line: int32 `[L]`.
      spec: the batch's spec.
      layout: the engine's layout.
    """
    unpacked = []
    for view, place in zip(view_stacks(spec, layout), parts(spec, layout), strict=True):
        n, stack = view.num_ids, view.stack
        row_ids = _numbers(line, place.row_ids, n, stack.index_dtype)
        bags = _numbers(line, place.bags, n, INT32) if place.bags >= 0 else view.dense_bags()
        weights = None
        if place.weights >= 0:
            weights = _numbers(line, place.weights, n, stack.compute_dtype)
        unpacked.append(LocalIds(row_ids, bags, weights))
    return tuple(unpacked)


def _numbers(line: Array, start: int, n: int, dtype: np.dtype) -> Array:
    """Return n numbers of `dtype` from a packed line, `[n]`."""
    # A 64-bit number is made of two int32 numbers: [2n] -> [n, 2], then bitcast to [n].
    words = dtype.itemsize // 4
    piece = line[start : start + n * words]
    if words > 1:
        piece = piece.reshape(n, words)
    return piece if dtype == np.int32 else jax.lax.bitcast_convert_type(piece, jnp.dtype(dtype))

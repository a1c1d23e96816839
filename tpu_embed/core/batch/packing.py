"""The ids of all features packed into one array a batch, with NumPy on the host.

Enters: `HostIds` a feature, validated. Leaves: one int32 array `[replicas, L]`, which `place.py`
makes a `Batch`, sent in one transfer. Called by `place.py`; `Batch.locate` is the inverse, inside a
compiled program.

A device's line holds, stack after stack: the physical rows of its ids in batch order, then, where
the features are not all dense, the bag of each id, then, where any feature has weights, the
weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.batch.located import LocalIds, bag_offsets, dense_bags
from tpu_embed.core.batch.spec import BatchSpec, StackSpec
from tpu_embed.core.ids import HostIds
from tpu_embed.core.layout import Layout, Stack

INT32 = np.dtype(np.int32)


class Part(NamedTuple):
    """Where one stack's ids stand in a packed line: offsets in int32 numbers, -1 for none."""

    row_ids: int
    bags: int
    weights: int
    end: int


def parts(spec: BatchSpec, layout: Layout) -> tuple[Part, ...]:
    """Return where every stack's ids stand in a packed line."""
    found, end = [], 0
    for g, stack in enumerate(layout.stacks):
        n = spec.ids(g)
        rows, end = end, end + n * (stack.index_dtype.itemsize // 4)
        bags = weights = -1
        if not spec.is_dense(g):
            bags, end = end, end + n
        if spec.is_weighted(g):
            weights, end = end, end + n * (stack.compute_dtype.itemsize // 4)
        found.append(Part(rows, bags, weights, end))
    return tuple(found)


def natural_spec(hosts: Sequence[HostIds], layout: Layout, replicas: int) -> BatchSpec:
    """Return the spec of the features' own forms and exact numbers of ids.

    The exchange capacities are not counted yet.

    Args:
      hosts: the ids of every feature.
      layout: the engine's.
      replicas: parts that the ids are split into; of many processes, those of this one.

    Raises:
      ValueError: the features' batch sizes differ, or do not divide over the replicas.
    """
    forms = tuple(host.shape for host in hosts)
    bare = [StackSpec(layout.features_of(g), 0, 0, 0) for g in range(len(layout.stacks))]
    spec = BatchSpec(replicas, forms, tuple(bare))
    spec.check_batch([feature.path for feature in layout.features])
    sized = tuple(
        dataclasses.replace(one, ids=_ids_per_device(hosts, spec, g)) for g, one in enumerate(bare)
    )
    return dataclasses.replace(spec, stacks=sized)


def _ids_per_device(hosts: Sequence[HostIds], spec: BatchSpec, stack: int) -> int:
    if spec.is_dense(stack):
        return spec.ids(stack)
    per_device = np.zeros(spec.replicas, np.int64)
    for f in spec.stacks[stack].features:
        host = hosts[f]
        bags = spec.local_batch * host.shape.bags
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
      spec: forms and numbers of ids.
      layout: the engine's.
    """
    places = parts(spec, layout)
    packed = np.empty((spec.replicas, places[-1].end), np.int32)
    for g, (stack, place) in enumerate(zip(layout.stacks, places, strict=True)):
        n = spec.ids(g)
        rows = _view(packed, place.row_ids, n, stack.index_dtype)
        weights = None
        if spec.is_weighted(g):
            weights = _view(packed, place.weights, n, stack.compute_dtype)
        if spec.is_dense(g):
            _pack_dense(hosts, spec, layout, g, rows, weights)
        else:
            bags = _view(packed, place.bags, n, INT32)
            _pack_flat(hosts, spec, layout, g, rows, bags, weights)
    return packed


def packed_rows(
    packed: np.ndarray, spec: BatchSpec, layout: Layout, stack: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the physical rows of a packed stack `[replicas, N]`, and their examples likewise."""
    place, n = parts(spec, layout)[stack], spec.ids(stack)
    rows = _view(packed, place.row_ids, n, layout.stacks[stack].index_dtype)
    if not spec.is_dense(stack):
        _, bags = bag_offsets(spec, stack)
        return rows, _view(packed, place.bags, n, INT32) // bags
    examples = np.arange(n, dtype=np.int32) // max(1, sum(spec.columns(stack)))
    return rows, np.broadcast_to(examples, rows.shape)


def _view(packed: np.ndarray, start: int, n: int, dtype: np.dtype) -> np.ndarray:
    """Return n numbers of `dtype` a line of the packed array, as a view."""
    return packed[:, start : start + n * (dtype.itemsize // 4)].view(dtype)


def _pack_dense(
    hosts: Sequence[HostIds],
    spec: BatchSpec,
    layout: Layout,
    g: int,
    rows: np.ndarray,
    weights: np.ndarray | None,
) -> None:
    columns = spec.columns(g)
    if not sum(columns):
        rows.fill(PADDING_ID)
        return
    start = 0
    for f, count in zip(spec.stacks[g].features, columns, strict=True):
        if not count:
            continue
        form, host = spec.feature_shapes[f], hosts[f]
        place = (spec.replicas, spec.local_batch, form.bags, form.width or 0)
        ids = host.ids.reshape(*place[:3], -1)
        given = np.s_[..., : ids.shape[-1]]
        here = _columns(rows, spec, g, start, count).reshape(place)
        here[..., ids.shape[-1] :] = PADDING_ID
        here[given] = _physical(ids, layout, f)
        if host.padded:
            here[given][ids < 0] = PADDING_ID
        if weights is not None:
            scale = _columns(weights, spec, g, start, count).reshape(place)
            scale[..., ids.shape[-1] :] = 0
            scale[given] = 1 if host.weights is None else host.weights.reshape(ids.shape)
        start += count


def _columns(line: np.ndarray, spec: BatchSpec, g: int, start: int, count: int) -> np.ndarray:
    """Return a feature's columns of a dense stack as a view `[replicas, examples, count]`."""
    by_example = line.reshape(spec.replicas, spec.local_batch, sum(spec.columns(g)))
    return by_example[:, :, start : start + count]


def _physical(ids: np.ndarray, layout: Layout, f: int) -> np.ndarray:
    """Return the physical rows of ids of feature f; meaningless ones of padding."""
    feature = layout.features[f]
    stack: Stack = layout.stacks[feature.stack]
    return stack.physical(ids.astype(stack.index_dtype, copy=False), feature.table)


def _pack_flat(
    hosts: Sequence[HostIds],
    spec: BatchSpec,
    layout: Layout,
    g: int,
    rows: np.ndarray,
    bags: np.ndarray,
    weights: np.ndarray | None,
) -> None:
    """Merge the features' ids into batch order: by example, then feature, then position."""
    offsets, per_example = bag_offsets(spec, g)
    features = spec.stacks[g].features
    rows.fill(PADDING_ID)
    bags.fill(spec.local_batch * per_example)
    if weights is not None:
        weights.fill(0)
    flat = [_flatten(hosts[f]) for f in features]
    examples = [
        bag // spec.feature_shapes[f].bags for f, (_, bag, _) in zip(features, flat, strict=True)
    ]
    batch = spec.feature_shapes[features[0]].batch
    counts = np.stack([np.bincount(example, minlength=batch) for example in examples], axis=1)
    by_device = counts.reshape(spec.replicas, -1)
    starts = (np.cumsum(by_device, axis=1) - by_device).reshape(counts.shape)
    for column, (f, (ids, bag, weight)) in enumerate(zip(features, flat, strict=True)):
        example = examples[column]
        shift = starts[:, column] - (np.cumsum(counts[:, column]) - counts[:, column])
        device = example // spec.local_batch
        position = np.arange(ids.size) + shift[example]
        rows[device, position] = _physical(ids, layout, f)
        local = (example - device * spec.local_batch) * per_example + offsets[column]
        bags[device, position] = local + (bag - example * spec.feature_shapes[f].bags)
        if weights is not None:
            weights[device, position] = 1.0 if weight is None else weight


def _flatten(host: HostIds) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return ids, global bags and weights of one feature, in batch order without padding."""
    if host.bags is not None:
        return host.ids, host.bags, host.weights
    index = np.flatnonzero(host.ids >= 0)
    weights = None if host.weights is None else host.weights.reshape(-1)[index]
    return host.ids.reshape(-1)[index], index // max(1, host.ids.shape[-1]), weights


def unpack(line: Array, spec: BatchSpec, layout: Layout) -> tuple[LocalIds, ...]:
    """Return the ids of every stack from one device's packed line; the inverse of `pack`.

    Args:
      line: int32 `[L]`.
      spec: the batch's.
      layout: the engine's.
    """
    unpacked = []
    for g, (stack, place) in enumerate(zip(layout.stacks, parts(spec, layout), strict=True)):
        n = spec.ids(g)
        rows = _numbers(line, place.row_ids, n, stack.index_dtype)
        bags = _numbers(line, place.bags, n, INT32) if place.bags >= 0 else dense_bags(spec, g)
        weights = None
        if place.weights >= 0:
            weights = _numbers(line, place.weights, n, stack.compute_dtype)
        unpacked.append(LocalIds(rows, bags, weights))
    return tuple(unpacked)


def _numbers(line: Array, start: int, n: int, dtype: np.dtype) -> Array:
    """Return n numbers of `dtype` from a packed line."""
    words = dtype.itemsize // 4
    piece = line[start : start + n * words]
    if words > 1:
        piece = piece.reshape(n, words)
    return piece if dtype == np.int32 else jax.lax.bitcast_convert_type(piece, jnp.dtype(dtype))

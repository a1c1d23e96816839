"""How many rows a batch exchanges: counted if the ids are given, expected if only shapes are.

Input: a batch, or its shapes. Output: a `BatchSpec`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from tpu_embed._checks import message
from tpu_embed._types import PyTree
from tpu_embed.core.batch import (
    BatchSpec,
    StackSpec,
    StackView,
    may_gather,
    view_stacks,
    worst_case,
)
from tpu_embed.core.ids import (
    FeatureRules,
    HostIds,
    Structure,
    check_dtype,
    dense_shape,
    host_ids,
)
from tpu_embed.core.layout import FeatureLayout, Layout, roomy
from tpu_embed.core.place import exact_spec, give_rows_of


def spec_of(declared: Structure, layout: Layout, batch: PyTree) -> BatchSpec:
    """Return the spec of a program for batches like the given one.

    Args:
      declared: the features.
      layout: where the rows of their tables live.
      batch: the global batch in the structure of the features: either ids, or a
        `jax.ShapeDtypeStruct` of dense ids for every feature. For shapes, ids are assumed to be
        uniform, which gives the most distinct rows.

    Returns:
      A spec whose capacities are padded for random variation and rounded to buckets, as those of
      `EmbeddingEngine.place` are.

    Raises:
      TypeError: the containers have another type, or the ids are not integers.
      ValueError: ids and shapes are mixed; the structure differs; the batch size does not divide.
    """
    leaves = declared.match(batch, what="batch", columns=True)
    shapes = [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    if not shapes:
        return _exact(layout, leaves).bucketed()
    if len(shapes) < len(leaves):
        remedy, got = "give one or the other for all features", "some of each"
        expected = "ids, or shapes (jax.ShapeDtypeStruct)"
        raise ValueError(message("batch", expected=expected, got=got, remedy=remedy))
    return _expected(layout, shapes)


def _exact(layout: Layout, leaves: list[Any]) -> BatchSpec:
    hosts = [
        host_ids(f"feature {feature.path!r}", feature.config, feature.table.name, ids, None)
        for feature, ids in zip(layout.features, leaves, strict=True)
    ]
    hosts = [_with_some_rows(*pair) for pair in zip(layout.features, hosts, strict=True)]
    return exact_spec(hosts, layout)


def _with_some_rows(feature: FeatureLayout, host: HostIds) -> HostIds:
    """Return the ids of a feature, with rows that keys of a living vocabulary might have."""
    if host.keys is None:
        return host
    # The low bits of mixed keys, so that all features of a table give a key the same row.
    mixed = (host.keys * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    rows = (mixed % np.uint64(feature.table.vocabulary_size)).astype(np.int32)
    return give_rows_of(feature, host, rows)


def _expected(layout: Layout, shapes: list[jax.ShapeDtypeStruct]) -> BatchSpec:
    dense_shapes = []
    for feature, leaf in zip(layout.features, shapes, strict=True):
        path = f"feature {feature.path!r}"
        check_dtype(FeatureRules(path, feature.config, feature.table.name), leaf)  # type: ignore[arg-type]
        shape = dense_shape(path, feature.config, leaf.shape, weighted=False)
        if shape.capacity is not None:
            # A placed batch has a place per id, here for rows that are all full.
            places = shape.batch * shape.bags // layout.axes.replicas
            shape = dataclasses.replace(shape, inner=(), width=None, capacity=max(1, places))
        dense_shapes.append(shape)
    bare = tuple(StackSpec(layout.features_of(g), 0, 0, 0) for g in range(len(layout.stacks)))
    spec = BatchSpec(layout.axes.replicas, tuple(dense_shapes), bare, "update")
    spec.check_batch([feature.path for feature in layout.features])
    stacks = tuple(
        dataclasses.replace(one, **_capacities(view))
        for one, view in zip(bare, view_stacks(spec, layout), strict=True)
    )
    # Padding must not exceed the worst case of this many ids.
    most = worst_case(spec, layout).stacks
    fitted = [
        StackSpec(one.features, one.ids, *map(min, one.sizes[1:], worst.sizes[1:]))
        for one, worst in zip(stacks, most, strict=True)
    ]
    return dataclasses.replace(spec, stacks=tuple(fitted))


def _capacities(view: StackView) -> dict[str, int]:
    """Return the expected room for a stack's exchange.

    Of n uniform ids of a table, `_distinct(n, V)` differ, and a shard owns `share` of them. Sums
    are made per block of the batch: with gradient accumulation a device sends one sum per distinct
    row and block, otherwise one per id.
    """
    stack, spec, layout = view.stack, view.spec, view.layout
    replicas = layout.axes.replicas
    if stack.num_shards == 1 and replicas == 1 and not view.is_routed:
        return {"row_capacity": 0, "partials": 0}
    blocks = view.blocks_per_device
    rows = partials = merged = entries = 0.0
    for table in stack.tables:
        mine = [f for f in view.features if layout.features[f].table == table]
        shapes = [(spec.local_sizes[f], spec.feature_shapes[f]) for f in mine]
        ids = sum(
            (shape.capacity or 0) if shape.has_places else size * shape.bags * (shape.width or 0)
            for size, shape in shapes
        )
        share = min(1.0, table.rows_per_shard / table.vocabulary_size)
        rows += share * _distinct(ids, table.vocabulary_size)
        summed = blocks * _distinct(ids / blocks, table.vocabulary_size)
        partials += share * (summed if view.accumulates else ids)
        merged += share * _distinct(ids * replicas, table.vocabulary_size)
        entries += share * ids * replicas
    room = {"row_capacity": rows, "partials": partials}
    if view.merges_on_host:
        room["merged"] = merged
    if may_gather(view):
        room["entries"] = entries
    return {name: roomy(math.ceil(size)) for name, size in room.items()}


def _distinct(draws: float, size: int) -> float:
    """Return how many of n uniform draws from V values are distinct: V (1 - (1 - 1/V)ⁿ)."""
    return -size * np.expm1(draws * np.log1p(-1 / size)) if size > 1 else min(1.0, draws)

"""How many rows a batch has and exchanges: counted if ids are given, expected if only shapes are.

Input: a batch, or its shapes. Output: a `BatchSpec`, or distinct rows by table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tpu_embed._checks import message
from tpu_embed._types import PyTree
from tpu_embed.core.batch import (
    BatchSpec,
    StackSpec,
    StackView,
    view_stacks,
)
from tpu_embed.core.ids import (
    FeatureRules,
    FeatureShape,
    HostIds,
    Structure,
    check_dtype,
    dense_shape,
    host_ids,
)
from tpu_embed.core.layout import FeatureLayout, Layout, TableSlice, roomy
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
    leaves, are_shapes = _leaves(declared, batch)
    if are_shapes:
        return _expected(layout, leaves)
    hosts = _host_ids(layout, leaves)
    stored = _keys(layout, hosts, [table for _, table in layout.on_host])
    places = {name: _places(layout, name, keys) for name, keys in stored.items()}
    pairs = zip(layout.features, hosts, strict=True)
    return exact_spec([_with_some_rows(*pair, places) for pair in pairs], layout).bucketed()


def distinct_rows(declared: Structure, layout: Layout, batch: PyTree) -> dict[str, int]:
    """Return how many distinct rows of each table on the host a batch has.

    Args:
      declared, layout, batch: as for `spec_of`. For shapes, ids are assumed to be uniform, but no
        batch has more rows of a table than the devices hold.

    Raises:
      TypeError, ValueError: as for `spec_of`.
    """
    leaves, are_shapes = _leaves(declared, batch)
    if not are_shapes:
        found = _keys(layout, _host_ids(layout, leaves), [table for _, table in layout.on_host])
        return {name: keys.size for name, keys in found.items()}
    ids = _ids_by_table(layout, leaves)
    return {t.name: math.ceil(_distinct_in(t, ids[t.name])) for _, t in layout.on_host}


def _ids_by_table(layout: Layout, shapes: list[Any]) -> dict[str, int]:
    """Return how many ids a batch of these shapes has of each table."""
    ids: dict[str, int] = {}
    for feature, shape in zip(layout.features, _feature_shapes(layout, shapes), strict=True):
        counted = _num_ids(shape.batch, shape, replicas=layout.axes.replicas)
        ids[feature.table.name] = ids.get(feature.table.name, 0) + counted
    return ids


def lookahead_rows(
    declared: Structure, layout: Layout, batch: PyTree, lookahead: int
) -> dict[str, int]:
    """Return how many rows may have to stay on the devices together, of each table that has a map.

    They are those of `lookahead + 1` batches. Of ids, the batches are taken to share no row; of
    shapes, all ids to be uniform.

    Args:
      declared, layout, batch: as for `spec_of`.
      lookahead: the batches before a batch whose rows stay, too.

    Raises:
      TypeError, ValueError: as for `spec_of`.
    """
    leaves, are_shapes = _leaves(declared, batch)
    batches = lookahead + 1
    if are_shapes:
        ids = _ids_by_table(layout, leaves)
        return {
            t.name: math.ceil(_distinct(batches * ids[t.name], t.declared_size))
            for _, t in layout.living
        }
    found = _keys(layout, _host_ids(layout, leaves), [table for _, table in layout.living])
    every = {table.name: table for _, table in layout.living}
    return {
        # Of keys there may be more than rows; of row numbers there are not.
        name: batches * keys.size
        if _has_keys(every[name])
        else min(batches * keys.size, every[name].declared_size)
        for name, keys in found.items()
    }


def _has_keys(table: TableSlice) -> bool:
    """Return whether the ids of a table that has a map are keys."""
    return not table.is_on_host or table.key_table is not None


def _leaves(declared: Structure, batch: PyTree) -> tuple[list[Any], bool]:
    """Return the batch by feature, and whether it is shapes."""
    leaves = declared.match(batch, what="batch", columns=True)
    shapes = [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    if shapes and len(shapes) < len(leaves):
        remedy, got = "give one or the other for all features", "some of each"
        expected = "ids, or shapes (jax.ShapeDtypeStruct)"
        raise ValueError(message("batch", expected=expected, got=got, remedy=remedy))
    return leaves, bool(shapes)


def _host_ids(layout: Layout, leaves: list[Any]) -> list[HostIds]:
    return [
        host_ids(f"feature {feature.path!r}", feature.config, feature.table.name, ids, None)
        for feature, ids in zip(layout.features, leaves, strict=True)
    ]


def _keys(
    layout: Layout, hosts: list[HostIds], tables: Sequence[TableSlice]
) -> dict[str, np.ndarray]:
    """Return the distinct ids of tables that have a map, uint64 `[n]`, ascending."""
    found = {}
    for table in tables:
        pairs = zip(layout.features, hosts, strict=True)
        some = [host.keys for feature, host in pairs if feature.table == table]
        found[table.name] = np.unique(np.concatenate(some))  # type: ignore[arg-type]
    return found


class _Places(NamedTuple):
    """The ids of a table on the host in a batch, uint64 `[n]`, and their places, int32 `[n]`."""

    keys: np.ndarray
    rows: np.ndarray


def _places(layout: Layout, name: str, keys: np.ndarray) -> _Places:
    """Give distinct ids of a table on the host places on the devices, any that there are.

    Raises:
      ValueError: they are more than the devices hold.
    """
    _, table = layout.table(name)
    if keys.size > table.vocabulary_size:
        expected = f"at most {table.vocabulary_size} distinct ids in a batch"
        remedy = f"give it HostStorage(device_rows={keys.size}) or more, or smaller batches"
        got = f"{keys.size}"
        raise ValueError(message(f"table {name!r}", expected=expected, got=got, remedy=remedy))
    draw = np.random.default_rng(0)
    rows = draw.choice(table.vocabulary_size, keys.size, replace=False, shuffle=False)
    return _Places(keys, rows.astype(np.int32))


def _with_some_rows(
    feature: FeatureLayout, host: HostIds, places: Mapping[str, _Places]
) -> HostIds:
    """Return the ids of a feature, with rows that its keys might have."""
    if host.keys is None:
        return host
    if feature.table.is_on_host:
        here = places[feature.table.name]
        at = np.searchsorted(here.keys, host.keys)
        return give_rows_of(feature, host, here.rows[at])
    # The low bits of mixed keys, so that all features of a table give a key the same row.
    mixed = (host.keys * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    rows = (mixed % np.uint64(feature.table.vocabulary_size)).astype(np.int32)
    return give_rows_of(feature, host, rows)


def _feature_shapes(layout: Layout, shapes: list[jax.ShapeDtypeStruct]) -> list[FeatureShape]:
    """Return the shape of each feature of a placed batch."""
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
    return dense_shapes


def _num_ids(size: int, shape: FeatureShape, *, replicas: int = 1) -> int:
    """Return how many ids a feature of `size` examples, or of some replicas, has."""
    if shape.has_places:
        return replicas * (shape.capacity or 0)
    return size * shape.bags * (shape.width or 0)


def _expected(layout: Layout, shapes: list[jax.ShapeDtypeStruct]) -> BatchSpec:
    dense_shapes = _feature_shapes(layout, shapes)
    bare = tuple(StackSpec(layout.features_of(g), 0, 0, 0) for g in range(len(layout.stacks)))
    spec = BatchSpec(layout.axes.replicas, tuple(dense_shapes), bare, "update")
    spec.check_batch([feature.path for feature in layout.features])
    stacks = tuple(
        dataclasses.replace(one, **_capacities(view))
        for one, view in zip(bare, view_stacks(spec, layout), strict=True)
    )
    return dataclasses.replace(spec, stacks=stacks)


def _capacities(view: StackView) -> dict[str, int]:
    """Return the expected room for a stack's exchange.

    Of n uniform ids of a table, `_distinct(n, V)` differ, and a shard owns `owned` of them. A
    device sends one sum per distinct row and block of the batch.
    """
    stack, spec, layout = view.stack, view.spec, view.layout
    replicas, n = layout.axes.replicas, view.num_ids
    if not view.is_routed:
        return {"row_capacity": 0, "partials": 0}
    blocks = view.blocks_per_device
    rows = partials = merged = 0.0
    for table in stack.tables:
        mine = [f for f in view.features if layout.features[f].table == table]
        shapes = [(spec.local_sizes[f], spec.feature_shapes[f]) for f in mine]
        ids = sum(_num_ids(*one) for one in shapes)
        owned = min(1.0, table.rows_per_shard / table.vocabulary_size)
        rows += owned * _distinct_in(table, ids)
        summed = blocks * _distinct_in(table, ids / blocks)
        partials += owned * summed
        merged += owned * _distinct_in(table, ids * replicas)
    # Padding must not exceed what any ids of this number need: a distinct row is asked for once, a
    # sum is of one row and one block, and an owner gets rows of its own from all replicas.
    room = {
        "row_capacity": (rows, min(n, stack.num_rows)),
        "partials": (partials, min(n, stack.num_rows * blocks) if view.accumulates else 0),
    }
    if view.merges_on_host:
        room["merged"] = (merged, min(n * replicas, stack.num_rows))
    return {name: min(roomy(math.ceil(size)), most) for name, (size, most) in room.items()}


def _distinct_in(table: TableSlice, ids: float) -> float:
    """Return how many of some uniform ids of a table are distinct, and have room on the devices."""
    return min(_distinct(ids, table.declared_size), table.vocabulary_size)


def _distinct(draws: float, size: int) -> float:
    """Return how many of n uniform draws from V values are distinct: V (1 - (1 - 1/V)ⁿ)."""
    return -size * np.expm1(draws * np.log1p(-1 / size)) if size > 1 else min(1.0, draws)

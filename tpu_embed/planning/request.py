"""What is to be planned: features with their placements, and what a batch of them has.

Tables with `placement="auto"` are tiny and on every device, or sharded. The rows that a batch has
and exchanges are counted if ids are given, and expected if only shapes are.

Input: feature configs, an optimizer, a mesh or a topology, a batch or its shapes. Output: a
`Request`; a `BatchSpec`, distinct rows by table; configs without "auto".
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tpu_embed._checks import refuse
from tpu_embed._types import PyTree
from tpu_embed.config import TableConfig
from tpu_embed.core.batch import (
    BatchSpec,
    StackView,
    view_stacks,
)
from tpu_embed.core.ids import (
    FeatureRules,
    HostIds,
    Structure,
    check_dtype,
    dense_shape,
    host_ids,
    structure,
)
from tpu_embed.core.layout import (
    ExchangeDtype,
    FeatureLayout,
    Layout,
    Stack,
    TableSlice,
    make_axes,
    make_layout,
    roomy,
)
from tpu_embed.core.place import exact_spec, give_rows_of
from tpu_embed.core.state import check_rule, slot_shapes
from tpu_embed.kernels.formats import packing_of
from tpu_embed.optimizers import TableOptimizer
from tpu_embed.planning import costs
from tpu_embed.planning.costs import Size, readable, tiled_bytes, untiled_bytes
from tpu_embed.planning.host import HitRate, HostPlan, host_plans, moving_bytes
from tpu_embed.planning.targets import Target

REPLICATED_BYTES = 2**16
"""A table of at most this many bytes is replicated, up to 1,024 times as many bytes in all.

Its lookups need no exchange then, and its block sums are a psum of at most half a MiB."""

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float64": 8}


def resolve(feature_config: PyTree, optimizer: Any = None, *, mesh: Mesh | None = None) -> PyTree:
    """Return feature configs whose tables have no `placement="auto"`.

    A table of at most `REPLICATED_BYTES` becomes "replicated", any other "mod". A tiny table is
    "mod", too, on one device, if it is at home on the host or has `shard_axes`, if its optimizer
    does not accumulate gradients, or once `1024 * REPLICATED_BYTES` are replicated. `plan` gives
    the reason for each.

    Args:
      feature_config: as for `EmbeddingEngine`.
      optimizer: as for `EmbeddingEngine`.
      mesh: the devices; None: the mesh of `jax.set_mesh`, or else one axis over all devices.

    Returns:
      The same nesting. Features that shared a table share the new one; tables that were not "auto"
      are the same objects.

    Raises:
      ValueError: whatever `EmbeddingEngine` refuses about feature configs.

    Example:
      >>> import tpu_embed
      >>> days = tpu_embed.TableConfig(7, 4, placement="auto", name="days")
      >>> resolved = resolve({"day": tpu_embed.FeatureConfig(days)})
      >>> resolved["day"].table.placement in ("mod", "replicated")
      True
    """
    declared = structure.flatten(feature_config)
    chosen = placements(declared, optimizer, devices=make_axes(mesh, None).mesh.size)
    if not chosen:
        return feature_config
    return with_tables(declared, {name: {"placement": to} for name, (to, _) in chosen.items()})


def placements(declared: Structure, optimizer: Any, *, devices: int) -> dict[str, tuple[str, str]]:
    """Return table -> (placement, reason) for the tables that are "auto".

    Args:
      declared: the features.
      optimizer: the optimizer of tables without one of their own.
      devices: the number of devices.
    """
    chosen, left = {}, 1024 * REPLICATED_BYTES
    named = zip(declared.table_names, declared.tables, strict=True)
    # The smallest tables first, until the bytes for replicated tables are used up.
    for name, table in sorted(named, key=lambda item: _bytes(item[1])):
        if table.placement == "auto":
            against = _against_replication(table, optimizer, devices, left)
            if against:
                chosen[name] = "mod", against
            else:
                left -= _bytes(table)
                chosen[name] = "replicated", f"tiny, {readable(_bytes(table))}"
    return chosen


def with_tables(declared: Structure, changes: Mapping[str, Mapping[str, Any]]) -> PyTree:
    """Return the feature configs with some tables changed.

    Args:
      declared: the features.
      changes: table -> field of `TableConfig` -> value.
    """
    # By identity: features that share a table object share its changed copy.
    new = {
        id(table): dataclasses.replace(table, name=name, **changes[name])
        for name, table in zip(declared.table_names, declared.tables, strict=True)
        if name in changes
    }
    return declared.unflatten(
        [
            dataclasses.replace(feature, table=new.get(id(feature.table), feature.table))
            for feature in declared.features
        ]
    )


def _against_replication(table: TableConfig, optimizer: Any, devices: int, left: int) -> str:
    """Return the reason why a table must not be replicated, or "" if there is none."""
    if table.storage is not None:
        return "at home on the host"
    if devices == 1:
        return "one device"
    if table.shard_axes is not None:
        return "shard_axes given"
    if _bytes(table) > REPLICATED_BYTES:
        return f"{readable(_bytes(table))}, over {readable(REPLICATED_BYTES)}"
    rule = optimizer if table.optimizer is None else table.optimizer
    sums = not isinstance(rule, TableOptimizer) or rule.use_gradient_accumulation
    if table.trainable and not sums:
        return "its optimizer does not accumulate gradients"
    return "" if _bytes(table) <= left else "enough tables are replicated"


def _bytes(table: TableConfig) -> int:
    return table.vocabulary_size * table.dim * _ITEMSIZE[table.dtype]


MISSES = "misses"
"""The name in `passing` of rows that come from home and go there."""

AHEAD = "ahead"
"""The name in `passing` of the batches that wait for their update while another is trained on."""


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """The arguments of `plan`, and what is computed from them on demand.

    Each remedy is another request, so that its plan is computed in the same way.
    """

    target: Target
    declared: Structure
    optimizer: Any
    batch: PyTree
    hit_rates: HitRate | Mapping[str, HitRate] | None = None
    touched_rows: Mapping[str, int] | None = None
    exchange_dtype: ExchangeDtype | None = None
    lookahead: int = 0

    @property
    def memory(self) -> int:
        """Bytes per device, where they are known; else there is room for everything."""
        return self.target.memory or 2**63

    @functools.cached_property
    def chosen(self) -> dict[str, tuple[str, str]]:
        """Table -> (placement, reason) for the tables that are "auto"."""
        return placements(self.declared, self.optimizer, devices=self.target.axes.mesh.size)

    @functools.cached_property
    def layout(self) -> Layout:
        """Where each row lives."""
        placed = {name: {"placement": to} for name, (to, _) in self.chosen.items()}
        layout = make_layout(
            self.changed(placed).declared,
            self.optimizer,
            self.target.axes,
            sum_blocks=8,
            stack_tables=True,
            exchange_dtype=self.exchange_dtype,
        )
        for pair in layout.on_host:
            check_rule(*pair)
        return layout

    @property
    def size(self) -> Size:
        """The function that returns the bytes of an array on such a device."""
        return untiled_bytes if packing_of(self.target.axes.device) == "none" else tiled_bytes

    @functools.cached_property
    def held(self) -> dict[str, int]:
        """Bytes that a device always holds, independent of the batch."""
        held = self._of_stacks(costs.stack_bytes)
        for stack in self.layout.stacks:
            for slot in slot_shapes(stack).values():
                if not slot.per_row:
                    held["slots"] += self.size(slot.shape, slot.dtype)
        return held

    def _of_stacks(self, bytes_of: Callable[[Stack, int, Size], tuple[int, int]]) -> dict[str, int]:
        pairs = [bytes_of(g, g.num_rows, self.size) for g in self.layout.stacks]
        return dict(zip(("tables", "slots"), map(sum, zip(*pairs, strict=True)), strict=True))

    @functools.cached_property
    def spec(self) -> BatchSpec:
        """The shape of the batch, for which a step is compiled."""
        return spec_of(self.declared, self.layout, self.batch)

    @functools.cached_property
    def host(self) -> dict[str, HostPlan]:
        """What tables on the host have there, and what they move, by table."""
        rows = self.distinct_rows()
        return host_plans(self.layout, rows, self.hit_rates, self.touched_rows)

    def distinct_rows(self, batches: int = 1) -> dict[str, int]:
        """Return how many distinct rows of each table that has a map there are.

        Of ids, the batches are taken to share no row; of shapes, all ids to be uniform.

        Args:
          batches: how many batches like the given one are counted together.

        Raises:
          TypeError, ValueError: as for `spec_of`.
        """
        layout, (leaves, are_shapes) = self.layout, _leaves(self.declared, self.batch)
        if are_shapes:
            ids: dict[str, int] = collections.Counter()
            for f, feature in enumerate(layout.features):
                room = self.spec.feature_shapes[f].room_per_bag or 0
                rows = layout.axes.replicas * self.spec.activation_rows(f)
                ids[feature.table.name] += batches * rows * room
            sizes = {table.name: table.declared_size for _, table in layout.living}
            counts = {name: math.ceil(_distinct(ids[name], size)) for name, size in sizes.items()}
        else:
            _, keys = _read_ids(layout, leaves)
            counts = {name: batches * some.size for name, some in keys.items()}
        # Of keys there may be more than rows; of row numbers there are not.
        return {
            table.name: min(counts[table.name], table.declared_size)
            if table.is_on_host and table.key_table is None
            else counts[table.name]
            for _, table in layout.living
        }

    @functools.cached_property
    def passing(self) -> dict[str, int]:
        """Bytes that a device needs during a step."""
        return self._passing(self.size)

    def _passing(self, size: Size) -> dict[str, int]:
        step = costs.passing(self.layout, self.spec, size)
        if self.lookahead:
            # They have been placed, and perhaps looked up; their gradients come later.
            step[AHEAD] = self.lookahead * (step["ids"] + step["activations"] // 2)
        if any(one.hit_rate is not None for one in self.host.values()):
            step[MISSES] = moving_bytes(self.layout, self.host, size)
        return step

    @property
    def wasted(self) -> dict[str, int]:
        """How many bytes of `held` and `passing` are padding of a TPU's tiles."""
        used = self._passing(untiled_bytes)
        wasted = {name: size - used[name] for name, size in self.passing.items()}
        return self._of_stacks(costs.wasted_bytes) | wasted

    def changed(self, changes: Mapping[str, Mapping[str, Any]]) -> Request:
        """Return the request with some fields of some tables changed."""
        feature_config = with_tables(self.declared, changes)
        return dataclasses.replace(self, declared=structure.flatten(feature_config))


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
    if not are_shapes:
        hosts, stored = _read_ids(layout, leaves)
        pairs = zip(layout.features, hosts, strict=True)
        return exact_spec([_with_some_rows(*pair, stored) for pair in pairs], layout).bucketed()
    shapes = []
    for feature, leaf in zip(layout.features, leaves, strict=True):
        path = f"feature {feature.path!r}"
        check_dtype(FeatureRules(path, feature.config, feature.table.name), leaf)  # type: ignore[arg-type]
        shape = dense_shape(path, feature.config, leaf.shape, weighted=False)
        if shape.capacity is not None:
            # A placed batch has a place per id, here for rows that are all full.
            places = shape.batch * shape.bags // layout.axes.replicas
            shape = dataclasses.replace(shape, inner=(), width=None, capacity=max(1, places))
        shapes.append(shape)
    spec = BatchSpec.bare(shapes, layout, layout.axes.replicas, "update")
    rooms = [
        dataclasses.replace(view.room, **_capacities(view)) for view in view_stacks(spec, layout)
    ]
    return dataclasses.replace(spec, stacks=tuple(rooms))


def _leaves(declared: Structure, batch: PyTree) -> tuple[list[Any], bool]:
    """Return the batch by feature, and whether it is shapes."""
    leaves = declared.match(batch, what="batch", columns=True)
    shapes = [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    if shapes and len(shapes) < len(leaves):
        refuse(
            "batch",
            expected="ids, or shapes (jax.ShapeDtypeStruct)",
            got="some of each",
            remedy="give one or the other for all features",
        )
    return leaves, bool(shapes)


def _read_ids(layout: Layout, leaves: list[Any]) -> tuple[list[HostIds], dict[str, np.ndarray]]:
    """Return the ids by feature, and the distinct ones of each table that has a map, ascending."""
    hosts, keys = [], collections.defaultdict(list)
    for feature, ids in zip(layout.features, leaves, strict=True):
        path, name = f"feature {feature.path!r}", feature.table.name
        host = host_ids(path, feature.config, name, ids, None)
        hosts.append(host)
        if host.keys is not None:
            keys[name].append(host.keys)
    return hosts, {name: np.unique(np.concatenate(some)) for name, some in keys.items()}


def _with_some_rows(
    feature: FeatureLayout, host: HostIds, stored: Mapping[str, np.ndarray]
) -> HostIds:
    """Return the ids of a feature, with rows that its keys might have.

    Raises:
      ValueError: its table is on the host, and has more distinct ids than the devices hold rows.
    """
    if host.keys is None:
        return host
    name, size = feature.table.name, feature.table.vocabulary_size
    if feature.table.is_on_host:
        keys = stored[name]
        if keys.size > size:
            refuse(
                f"table {name!r}",
                expected=f"at most {size} distinct ids in a batch",
                got=f"{keys.size}",
                remedy=f"give it HostStorage(device_rows={keys.size}) or more, or smaller batches",
            )
        # The same seed for all features of the table.
        places = np.random.default_rng(0).choice(size, keys.size, replace=False, shuffle=False)
        rows = places[np.searchsorted(keys, host.keys)]
    else:
        # The low bits of mixed keys, so that all features of a table give a key the same row.
        rows = ((host.keys * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)) % np.uint64(size)
    return give_rows_of(feature, host, rows.astype(np.int32))


def _capacities(view: StackView) -> dict[str, int]:
    """Return the expected room for a stack's exchange.

    Of n uniform ids of a table, `_distinct(n, V)` differ, and a shard owns `owned` of them. A
    device sends one sum per distinct row and block of the batch.
    """
    stack, replicas, n = view.stack, view.layout.axes.replicas, view.num_ids
    if not view.is_routed:
        return {"row_capacity": 0, "partials": 0}
    blocks = view.blocks_per_device
    rows = partials = merged = 0.0
    for table in stack.tables:
        bags = zip(view.features, view.counts, view.shapes, strict=True)
        mine = [one for one in bags if view.layout.features[one[0]].table == table]
        ids = sum(count * (shape.room_per_bag or 0) for _, count, shape in mine)
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
    if view.is_merged:
        room["merged"] = (merged, min(n * replicas, stack.num_rows))
    return {name: min(roomy(math.ceil(size)), most) for name, (size, most) in room.items()}


def _distinct_in(table: TableSlice, ids: float) -> float:
    """Return how many of some uniform ids of a table are distinct, and have room on the devices."""
    return min(_distinct(ids, table.declared_size), table.vocabulary_size)


def _distinct(draws: float, size: int) -> float:
    """Return how many of n uniform draws from V values are distinct: V (1 - (1 - 1/V)ⁿ)."""
    return -size * np.expm1(draws * np.log1p(-1 / size)) if size > 1 else min(1.0, draws)

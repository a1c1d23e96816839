"""Plan a configuration on a mesh that need not exist: memory per device, and traffic per step.

Tables with `placement="auto"` are tiny and on every device, or sharded. The rows that a batch has
and exchanges are counted if ids are given, and expected if only shapes are.

If it does not fit, the plan says which changes would help: more devices, fewer bytes per row, or
tables on the host. Each of them is planned, too. The largest tables go to the host first, and no
more of them than must. As many of their rows stay on the devices as have room there; at least those
of the batches whose rows stay together, and of one more, which is placed ahead.

Input: feature configs, an optimizer, a mesh or a topology, a batch or its shapes. Output: a `Plan`;
a `BatchSpec`; configs without "auto".
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from tpu_embed._checks import check_int, refuse
from tpu_embed._types import PyTree
from tpu_embed.config import TableConfig
from tpu_embed.core.batch import BatchSpec, StackView, view_stacks
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
from tpu_embed.core.state import check_rule, row_formats, slot_shapes
from tpu_embed.initializers import wants_shard_info
from tpu_embed.kernels.formats import packing_of
from tpu_embed.optimizers import RowWiseAdagrad, TableOptimizer
from tpu_embed.planning import costs
from tpu_embed.planning.costs import Size, readable, tiled_bytes, untiled_bytes
from tpu_embed.planning.host import (
    HitRate,
    HostPlan,
    host_plans,
    moving_bytes,
    row_bytes,
)
from tpu_embed.planning.targets import GivenTarget, Target, read_target
from tpu_embed.storage import HostStorage
from tpu_embed.vocabulary import check_lookahead

REPLICATED_BYTES = 2**16
"""A table of at most this many bytes is replicated, up to 1,024 times as many bytes in all.

Its lookups need no exchange then, and its block sums are a psum of at most half a MiB."""


def resolve(
    feature_config: PyTree, optimizer: Any = None, *, mesh: Mesh | None = None
) -> PyTree:
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
    return with_tables(
        declared, {name: {"placement": to} for name, (to, _) in chosen.items()}
    )


def placements(
    declared: Structure, optimizer: Any, *, devices: int
) -> dict[str, tuple[str, str]]:
    """Return table -> (placement, reason) for the tables that are "auto".

    Args:
      declared: the features.
      optimizer: the optimizer of tables without one of their own.
      devices: the number of devices.
    """
    chosen, left = {}, 1024 * REPLICATED_BYTES
    # The smallest tables first, until the bytes for replicated tables are used up.
    for name, table in sorted(
        declared.configs.items(), key=lambda item: _bytes(item[1])
    ):
        if table.placement == "auto":
            against = _against_replication(table, optimizer, devices, left)
            if against:
                chosen[name] = "mod", against
            else:
                left -= _bytes(table)
                chosen[name] = "replicated", f"tiny, {readable(_bytes(table))}"
    return chosen


def with_tables(
    declared: Structure, changes: Mapping[str, Mapping[str, Any]]
) -> PyTree:
    """Return the feature configs with some tables changed.

    Args:
      declared: the features.
      changes: table -> field of `TableConfig` -> value.
    """
    # By identity: features that share a table object share its changed copy.
    new = {
        id(table): dataclasses.replace(table, name=name, **changes[name])
        for name, table in declared.configs.items()
        if name in changes
    }
    return declared.unflatten(
        [
            dataclasses.replace(
                feature, table=new.get(id(feature.table), feature.table)
            )
            for feature in declared.features
        ]
    )


def _against_replication(
    table: TableConfig, optimizer: Any, devices: int, left: int
) -> str:
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
    return table.vocabulary_size * table.dim * jax.numpy.dtype(table.dtype).itemsize


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
        return placements(
            self.declared, self.optimizer, devices=self.target.axes.mesh.size
        )

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
        return (
            untiled_bytes
            if packing_of(self.target.axes.device) == "none"
            else tiled_bytes
        )

    @functools.cached_property
    def held(self) -> dict[str, int]:
        """Bytes that a device always holds, independent of the batch."""
        held = self._of_stacks(costs.stack_bytes)
        for stack in self.layout.stacks:
            for slot in slot_shapes(stack).values():
                if not slot.per_row:
                    held["slots"] += self.size(slot.shape, slot.dtype)
        return held

    def _of_stacks(
        self, bytes_of: Callable[[Stack, int, Size], tuple[int, int]]
    ) -> dict[str, int]:
        pairs = [bytes_of(g, g.num_rows, self.size) for g in self.layout.stacks]
        return dict(
            zip(("tables", "slots"), map(sum, zip(*pairs, strict=True)), strict=True)
        )

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
        counts: dict[str, int] = collections.Counter()
        if are_shapes:
            for f, feature in enumerate(layout.features):
                room = self.spec.feature_shapes[f].room_per_bag or 0
                rows = layout.axes.replicas * self.spec.activation_rows(f)
                counts[feature.table.name] += batches * rows * room
        else:
            _, keys = _read_ids(layout, leaves)
            counts.update({name: batches * some.size for name, some in keys.items()})
        found = {}
        for _, table in layout.living:
            count, size = counts[table.name], table.declared_size
            if are_shapes:
                count = math.ceil(_distinct(count, size))
            # Of keys there may be more than rows; of row numbers there are not.
            numbered = table.is_on_host and table.key_table is None
            found[table.name] = min(count, size) if numbered else count
        return found

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
        return exact_spec(
            [_with_some_rows(*pair, stored) for pair in pairs], layout
        ).bucketed()
    shapes = []
    for feature, leaf in zip(layout.features, leaves, strict=True):
        path = f"feature {feature.path!r}"
        check_dtype(FeatureRules(path, feature.config, feature.table.name), leaf)  # type: ignore[arg-type]
        shape = dense_shape(path, feature.config, leaf.shape, weighted=False)
        if shape.capacity is not None:
            # A placed batch has a place per id, here for rows that are all full.
            places = shape.batch * shape.bags // layout.axes.replicas
            shape = dataclasses.replace(
                shape, inner=(), width=None, capacity=max(1, places)
            )
        shapes.append(shape)
    spec = BatchSpec.bare(shapes, layout, layout.axes.replicas, "update")
    rooms = [
        dataclasses.replace(view.room, **_capacities(view))
        for view in view_stacks(spec, layout)
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


def _read_ids(
    layout: Layout, leaves: list[Any]
) -> tuple[list[HostIds], dict[str, np.ndarray]]:
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
        places = np.random.default_rng(0).choice(
            size, keys.size, replace=False, shuffle=False
        )
        rows = places[np.searchsorted(keys, host.keys)]
    else:
        # The low bits of mixed keys, so that all features of a table give a key the same row.
        rows = (
            (host.keys * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
        ) % np.uint64(size)
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
        ids = sum(
            count * (shape.room_per_bag or 0)
            for f, count, shape in bags
            if view.layout.features[f].table == table
        )
        owned = min(1.0, table.rows_per_shard / table.vocabulary_size)
        rows += owned * _distinct_in(table, ids)
        partials += owned * (blocks * _distinct_in(table, ids / blocks))
        merged += owned * _distinct_in(table, ids * replicas)
    # Padding must not exceed what any ids of this number need: a distinct row is asked for once, a
    # sum is of one row and one block, and an owner gets rows of its own from all replicas.
    room = {
        "row_capacity": (rows, min(n, stack.num_rows)),
        "partials": (
            partials,
            min(n, stack.num_rows * blocks) if view.accumulates else 0,
        ),
    }
    if view.is_merged:
        room["merged"] = (merged, min(n * replicas, stack.num_rows))
    return {
        name: min(roomy(math.ceil(size)), most) for name, (size, most) in room.items()
    }


def _distinct_in(table: TableSlice, ids: float) -> float:
    """Return how many of some uniform ids of a table are distinct, and have room on the devices."""
    return min(_distinct(ids, table.declared_size), table.vocabulary_size)


def _distinct(draws: float, size: int) -> float:
    """Return how many of n uniform draws from V values are distinct: V (1 - (1 - 1/V)ⁿ)."""
    return (
        -size * np.expm1(draws * np.log1p(-1 / size)) if size > 1 else min(1.0, draws)
    )


ROW_BYTES, WAITING_BYTES = 52, 20
"""What a row takes in a map and in the engine's record of it, and what a waiting key takes."""


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """The share of one table that every device holds.

    Attributes:
      name: the name of the table.
      vocabulary_size: V.
      dim: D.
      dtype: the dtype of the stored rows.
      placement: "mod", "div" or "replicated".
      why: the reason for a placement that was chosen, or "as declared".
      rows: rows per device, including padding.
      padding: padding rows on all devices together.
      table_bytes: bytes of the table per device.
      slot_bytes: bytes per device of its slots that have rows.
      wasted_bytes: how many of both are padding: on a TPU, rows are padded to fill lines of 128
        words.
      lookahead_rows: of a dynamic vocabulary, and of a table on the host: how many rows may have to
        stay on the devices together, those of `lookahead + 1` batches. Of ids, the batches are
        taken to share no row; of shapes, all ids to be uniform. None of any other table.
      host: of a table on the host, what it has there and what it moves; None of any other. Then the
        rows and bytes above are those of the rows that the devices hold.
    """

    name: str
    vocabulary_size: int
    dim: int
    dtype: str
    placement: str
    why: str
    rows: int
    padding: int
    table_bytes: int
    slot_bytes: int
    wasted_bytes: int
    lookahead_rows: int | None = None
    host: HostPlan | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What every device holds, and what it moves and sends in a step. All devices are alike.

    Attributes:
      target: the name of the mesh or topology.
      devices: the number of devices.
      memory: bytes of memory per device, or None if unknown.
      batch: B, the size of the global batch; of features that differ, the largest.
      tables: the tables in order.
      stacks: the number of arrays that they are stacked into.
      held: bytes per device that are always held: tables, slots.
      passing: bytes per device that a step needs in addition: ids, activations with their
        gradients, exchange; with `lookahead`, the ids and activations of the batches that wait for
        their update; and, where a hit rate is known, the rows that a step brings from home and
        sends there. This is an estimate.
      wasted: how many bytes of `held` and `passing` are padding of a TPU's tiles of 8 × 128 words;
        all are 0 elsewhere.
      sent: bytes that a device sends to others per step: ids, rows, gradients.
      moved: bytes that a device must read and write in its memory per step for the touched rows:
        lookup, update, exchange. What a compiled step moves can be compared with it.
      spec: the shape of the batch, for which a step is compiled.
      lookahead: that of the engine.
      hosts: the number of hosts; 1 if it is not known.
      host_bytes: bytes of the memory of each host: the sum of `on_host`.
      on_host: these bytes by what they are for. "maps": from keys to rows, of dynamic vocabularies
        and of tables on the host, when all rows have keys and as many keys wait as may; "rows at
        home": those of tables on the host with their slots, unless they are in a file; "index":
        what finds rows at home. Rows at home are shared among the hosts.
      file_bytes: bytes of the scratch files of each host with rows at home.
      missed: bytes that each host sends to its devices in a step ("in"), and gets from them
        ("out"), because rows at home are not on the devices: values and slots. It covers the tables
        whose hit rate is known; None if there are none.
      remedies: if it does not fit, changes that make it fit or come nearest (more devices, fewer
        bytes per row), with the bytes that each would need.
    """

    target: str
    devices: int
    memory: int | None
    batch: int
    tables: tuple[TablePlan, ...]
    stacks: int
    held: dict[str, int]
    passing: dict[str, int]
    wasted: dict[str, int]
    sent: dict[str, int]
    moved: dict[str, int]
    spec: BatchSpec = dataclasses.field(repr=False)
    lookahead: int = 0
    hosts: int = 1
    host_bytes: int = 0
    on_host: dict[str, int] = dataclasses.field(default_factory=dict)
    file_bytes: int = 0
    missed: dict[str, int] | None = None
    remedies: tuple[str, ...] = ()

    @property
    def bytes_per_device(self) -> int:
        """All bytes that a device must have room for."""
        return sum(self.held.values()) + sum(self.passing.values())

    @property
    def fits(self) -> bool:
        """Whether a device has room for that; True if its memory is unknown."""
        return self.memory is None or self.bytes_per_device <= self.memory

    def to_json(self) -> str:
        """Return the plan as a JSON object, without `spec`."""
        fields = dataclasses.asdict(self)
        del fields["spec"]
        return json.dumps(
            fields | {"bytes_per_device": self.bytes_per_device, "fits": self.fits}
        )

    def explain(self) -> str:
        """Return the plan as text to print, with tables and bars."""
        from tpu_embed.planning.explain import explained  # rich is slow to import

        return explained(self)

    def check(self) -> None:
        """Check that the plan fits.

        Raises:
          ValueError: it does not fit; the message says by how much, and lists the remedies.
        """
        memory, needed = self.memory, self.bytes_per_device
        if memory is not None and needed > memory:
            refuse(
                f"plan for {self.target}",
                expected=f"at most {readable(memory)} a device",
                got=f"{readable(needed)}, {readable(needed - memory)} too much",
                remedy="; ".join(self.remedies),
            )


def plan(
    feature_config: PyTree,
    optimizer: Any,
    target: GivenTarget,
    batch: PyTree,
    *,
    memory: int | None = None,
    hit_rates: HitRate | Mapping[str, HitRate] | None = None,
    touched_rows: Mapping[str, int] | None = None,
    exchange_dtype: ExchangeDtype | None = None,
    lookahead: int = 0,
) -> Plan:
    """Plan tables, slots and a training step on a mesh or a topology.

    Args:
      feature_config: as for `EmbeddingEngine`; `placement="auto"` is resolved.
      optimizer: as for `EmbeddingEngine`.
      target: a mesh, or an abstract one; a TPU topology such as `"v5p:4x4x4"`; or a number of
        devices.
      batch: the global batch in the structure of the features: ids, from which the exchange is
        counted, or `jax.ShapeDtypeStruct`s of dense ids, which are assumed to be uniform.
      memory: bytes per device; None takes that of the topology, and is unknown for a mesh.
      hit_rates: of tables on the host, the share of a batch's distinct rows that the devices hold,
        or what `count_hits` has counted: one for all such tables, or by table. Of a share, every
        miss counts as a row that comes from home and displaces another; of counts, rows that were
        never seen before do not travel. None: the misses are not counted.
      touched_rows: by table on the host, how many rows training will touch. All V of a table that
        is not named.
      exchange_dtype: as for `EmbeddingEngine`.
      lookahead: as for `EmbeddingEngine`: how many batches wait for their update while another one
        is trained on, placed and perhaps looked up; 1 for a pipelined `TPUEmbedding`.

    Returns:
      The plan, whether or not it fits; `Plan.check` raises if it does not.

    Raises:
      TypeError: the batch has other containers, or its ids are not integers.
      ValueError: an engine would refuse the configs, the batch or the target.

    Example:
      >>> import jax, numpy as np, tpu_embed
      >>> films = tpu_embed.TableConfig(1_000_000, 64, name="films")
      >>> ids = jax.ShapeDtypeStruct((4096, 20), np.int32)
      >>> feature_config, batch = {"seen": tpu_embed.FeatureConfig(films)}, {"seen": ids}
      >>> found = plan(feature_config, tpu_embed.optimizers.Adagrad(0.1), "v5e:2x2", batch)
      >>> found.held["tables"], found.held["slots"], found.fits
      (64028672, 64028672, True)
    """
    known = read_target(target)
    if memory is not None:
        known = known._replace(
            memory=check_int("memory, bytes of a device", memory, minimum=1)
        )
    request = Request(
        known,
        structure.flatten(feature_config),
        optimizer,
        batch,
        hit_rates,
        touched_rows,
        exchange_dtype,
        check_lookahead(lookahead),
    )
    found = _planned(request)
    if found.fits:
        return found
    return dataclasses.replace(found, remedies=find_remedies(request))


def _planned(request: Request) -> Plan:
    """Return the plan, without remedies."""
    layout, size, spec, host = request.layout, request.size, request.spec, request.host
    ahead = request.distinct_rows(request.lookahead + 1)
    tables = []
    for name in request.declared.table_names:
        stack, table = layout.table(name)
        copies = stack.num_shards if stack.shard_axes else 1
        held = costs.stack_bytes(stack, table.rows_per_shard, size)
        tables.append(
            TablePlan(
                name=name,
                vocabulary_size=table.declared_size,
                dim=stack.dim,
                dtype=stack.dtype,
                placement=stack.placement,
                why=request.chosen[name][1]
                if name in request.chosen
                else "as declared",
                rows=table.rows_per_shard,
                padding=table.rows_per_shard * copies - table.vocabulary_size,
                table_bytes=held[0],
                slot_bytes=held[1],
                wasted_bytes=sum(costs.wasted_bytes(stack, table.rows_per_shard, size)),
                lookahead_rows=ahead.get(name),
                host=host.get(name),
            )
        )
    plans, hosts = list(host.values()), request.target.hosts

    def shared(field, some):
        return -(-sum(getattr(one, field) for one in some) // hosts)

    on_host = {"maps": sum(_map_bytes(table) for _, table in layout.living)}
    if plans:
        on_host["rows at home"] = shared(
            "row_store_bytes", [one for one in plans if not one.path]
        )
        on_host["index"] = shared("index_bytes", plans)
    known = [one for one in plans if one.hit_rate is not None]
    missed = {"in": shared("bytes_in", known), "out": shared("bytes_out", known)}
    return Plan(
        target=request.target.name,
        devices=request.target.axes.mesh.size,
        memory=request.target.memory,
        batch=max(spec.sizes),
        tables=tuple(tables),
        stacks=len(layout.stacks),
        held=request.held,
        passing=request.passing,
        wasted=request.wasted,
        sent=costs.sent(layout, spec),
        moved=costs.moved(layout, spec),
        spec=spec,
        lookahead=request.lookahead,
        hosts=hosts,
        host_bytes=sum(on_host.values()),
        on_host=on_host,
        file_bytes=shared("row_store_bytes", [one for one in plans if one.path]),
        missed=missed if known else None,
    )


def _map_bytes(table: TableSlice) -> int:
    """Return at most how many bytes of a host's memory the maps of a table take."""
    size, rules = table.vocabulary_size, table.vocabulary
    found = ROW_BYTES * size
    if table.is_on_host:
        # No id of a table on the host waits: all rows of a batch find room, or it is refused.
        size, rules = table.key_table or (0, None)
        found += ROW_BYTES * size
    return found + (
        WAITING_BYTES * rules.options(size, lookahead=0).waiting if rules else 0
    )


Changes = dict[str, dict[str, Any]]
"""Table -> field of `TableConfig` -> new value."""

_STEPS = 2**14
"""In how many parts the share of rows that stay on the devices is found."""
_NAMED = 5
_MOST_ROWS = 3 * 2**28
"""As many as a map can have places for."""


def find_remedies(request: Request) -> tuple[str, ...]:
    """Return changes that would make a plan fit, or come nearest, in words.

    Args:
      request: what does not fit.
    """
    changes = _changes_of_tables(request)
    if on_host := _moved_to_host(request):
        changes[_words(on_host)] = on_host
    found = [
        _describe_change(what, request.changed(new))[0] for what, new in changes.items()
    ]
    return tuple(text for text in (_more_devices(request), *found) if text)


def _changes_of_tables(request: Request) -> dict[str, Changes]:
    """Return changes in words, and as they are."""
    tables = request.declared.configs.items()
    # Those of more than one number per row; the rows themselves are a part, too.
    slotted = [
        table.name
        for stack in request.layout.stacks
        if sum(bool(one.shape) for one in row_formats(stack).values()) > 1
        for table in stack.tables
    ]
    changes: dict[str, Changes] = {
        'no replicated tables (placement="mod")': {
            name: {"placement": "mod"}
            for name, one in tables
            if one.placement == "replicated"
        },
        "bfloat16 tables": {
            name: {"dtype": "bfloat16"}
            for name, one in tables
            if one.dtype != "bfloat16"
        },
        "row-wise slots (RowWiseAdagrad)": {
            n: {"optimizer": RowWiseAdagrad()} for n in slotted
        },
    }
    changes = {what: new for what, new in changes.items() if new}
    if len(changes) > 1:
        everything = collections.defaultdict(dict)
        for new in changes.values():
            for name, fields in new.items():
                everything[name] |= fields
        changes["all changes of tables"] = everything
    return changes


def _more_devices(request: Request) -> str:
    """Return the fewest devices of the same kind that would hold it, in words, or the most."""
    text = ""
    for target in request.target.larger(math.gcd(*request.spec.sizes)):
        devices = f"{target.axes.mesh.size} devices"
        name = f"{target.name} ({devices})" if target.topology else devices
        larger = dataclasses.replace(request, target=target)
        text, fits = _describe_change(f"{name}, the same global batch", larger)
        if fits:
            break
    return text


def _describe_change(what: str, request: Request) -> tuple[str, bool]:
    """Return the bytes that a remedy needs, in words, and whether it fits; "" if impossible."""
    try:
        held = sum(request.held.values())
        if held > request.memory:  # planning the batch takes longer, and is not needed
            return (
                f"{what}: {readable(held)} of tables and slots alone, still too much",
                False,
            )
        needed = held + sum(request.passing.values())
    except ValueError:  # for example more padded rows than int32 can number
        return "", False
    fits = needed <= request.memory
    return (
        f"{what}: {readable(needed)}, {'would fit' if fits else 'still too much'}",
        fits,
    )


class _Candidate(NamedTuple):
    """A table that could be at home on the host; the rows are those that the devices hold."""

    name: str
    storage: HostStorage | None
    rows: int
    least: int


def _moved_to_host(request: Request) -> Changes:
    """Return the tables that would have to be on the host; none if that would not help."""
    some = _candidates(request)
    if not some:
        return {}
    room = request.memory - sum(request.passing.values())

    def fit(changes):
        return sum(request.changed(changes).held.values()) <= room

    # The fewest tables that fit with as few rows as may be, or all; then the most rows of these.
    enough = bisect_left(
        range(1, len(some)), True, key=lambda n: fit(_changes(some[:n], 0))
    )
    chosen = some[: enough + 1]
    parts = range(1, _STEPS)
    most = bisect_left(parts, True, key=lambda n: not fit(_changes(chosen, n / _STEPS)))
    return _changes(chosen, most / _STEPS)


def _candidates(request: Request) -> list[_Candidate]:
    """Return the tables that are or could be at home on the host, the largest first.

    They may have fewer rows on the devices.
    """
    configs = request.declared.configs
    fit = []
    for stack in request.layout.stacks:
        changes_all = stack.optimizer is not None and stack.optimizer.updates_every_row
        if stack.placement != "replicated" and not changes_all:
            for table in stack.tables:
                initializer = configs[table.name].initializer
                if initializer is None or not wants_shard_info(initializer):
                    fit.append((stack, table))
    # What a batch has is counted as if they were there with all of their rows.
    counted = request.changed(
        {
            t.name: {
                "storage": HostStorage(device_rows=min(t.vocabulary_size, _MOST_ROWS))
            }
            for _, t in fit
            if not t.is_on_host
        }
    )
    batch_rows = counted.distinct_rows()
    found = []
    for _, table in sorted(
        fit, key=lambda pair: -pair[1].vocabulary_size * row_bytes(pair[0])
    ):
        rows = table.vocabulary_size
        least = max(1, (request.lookahead + 2) * batch_rows[table.name])
        if least < rows:
            found.append(_Candidate(table.name, table.storage, rows, least))
    return found


def _changes(some: Iterable[_Candidate], part: float) -> Changes:
    """Return the changes that leave a part of the rows of tables, but not too few."""
    changes = {}
    for one in some:
        rows = int(part * one.rows)
        unit = 10 ** max(0, len(str(rows)) - 2)  # 8_765_432 -> 8_700_000
        rows = min(_MOST_ROWS, max(one.least, rows // unit * unit))
        storage = one.storage or HostStorage(device_rows=rows)
        changes[one.name] = {"storage": dataclasses.replace(storage, device_rows=rows)}
    return changes


def _words(changes: Changes) -> str:
    """Return what to declare, such as `storage=HostStorage(device_rows=8_700_000) for a, b`."""
    by_rows: dict[int, list[str]] = {}
    for name, fields in changes.items():
        by_rows.setdefault(fields["storage"].device_rows, []).append(name)
    parts = [
        f"storage=HostStorage(device_rows={rows:_}) for {_listed(names)}"
        for rows, names in sorted(by_rows.items(), reverse=True)
    ]
    return _listed(parts)


def _listed(names: Sequence[str]) -> str:
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return ", ".join([*names[:_NAMED], *more])

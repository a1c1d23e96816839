"""Plan a configuration on a mesh that need not exist: memory per device, and traffic per step.

If it does not fit, the plan says which changes would help.

Input: feature configs, an optimizer, a mesh or a topology, a batch or its shapes. Output: a `Plan`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from tpu_embed._checks import check_int, message
from tpu_embed._types import PyTree
from tpu_embed.config import TableConfig
from tpu_embed.core.batch import BatchSpec
from tpu_embed.core.ids import Structure, structure
from tpu_embed.core.layout import (
    ExchangeDtype,
    Layout,
    MeshAxes,
    Stack,
    TableSlice,
    make_axes,
    make_layout,
)
from tpu_embed.core.state import check_rule, slot_shapes
from tpu_embed.kernels.formats import packing_of
from tpu_embed.optimizers import TableOptimizer
from tpu_embed.planning import costs
from tpu_embed.planning.costs import Size, readable, tiled_bytes, untiled_bytes
from tpu_embed.planning.demand import distinct_rows, spec_of
from tpu_embed.planning.host import HitRate, HostPlan, host_plans, moving_bytes
from tpu_embed.planning.targets import GivenTarget, Target, read_target
from tpu_embed.vocabulary import check_lookahead

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
      lookahead_rows: of a living vocabulary, and of a table on the host: how many rows may have to
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
      on_host: these bytes by what they are for. "maps": from keys to rows, of living vocabularies
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
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del fields["spec"]
        fields["tables"] = [dataclasses.asdict(table) for table in self.tables]
        return json.dumps(fields | {"bytes_per_device": self.bytes_per_device, "fits": self.fits})

    def explain(self) -> str:
        """Return the plan as text to print, with tables and bars."""
        from tpu_embed.planning.explain import explained  # rich is slow to import

        return explained(self)

    def check(self) -> None:
        """Check that the plan fits.

        Raises:
          ValueError: it does not fit; the message says by how much, and lists the remedies.
        """
        if not self.fits:
            assert self.memory is not None, "without a memory everything fits"
            raise ValueError(
                message(
                    f"plan for {self.target}",
                    expected=f"at most {readable(self.memory)} a device",
                    got=f"{readable(self.bytes_per_device)}, "
                    f"{readable(self.bytes_per_device - self.memory)} too much",
                    remedy="; ".join(self.remedies),
                )
            )


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
    named = zip(declared.table_names, declared.tables, strict=True)
    auto = {name: table for name, table in named if table.placement == "auto"}
    chosen, left = {}, 1024 * REPLICATED_BYTES
    # The smallest tables first, until the bytes for replicated tables are used up.
    for name, table in sorted(auto.items(), key=lambda item: _bytes(item[1])):
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
    accumulates = not isinstance(rule, TableOptimizer) or rule.use_gradient_accumulation
    if table.trainable and not accumulates:
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
    def axes(self) -> MeshAxes:
        """The mesh."""
        return self.target.axes

    @property
    def memory(self) -> int:
        """Bytes per device, where they are known; else there is room for everything."""
        return 2**63 if self.target.memory is None else self.target.memory

    @functools.cached_property
    def placed(self) -> tuple[Structure, dict[str, str]]:
        """The features without "auto", and table -> reason for each chosen placement."""
        chosen = placements(self.declared, self.optimizer, devices=self.axes.mesh.size)
        placed = {name: {"placement": to} for name, (to, _) in chosen.items()}
        why = {name: reason for name, (_, reason) in chosen.items()}
        return structure.flatten(with_tables(self.declared, placed)), why

    @functools.cached_property
    def layout(self) -> Layout:
        """Where each row lives."""
        declared, _ = self.placed
        layout = make_layout(
            declared,
            self.optimizer,
            self.axes,
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
        return untiled_bytes if packing_of(self.axes.device) == "none" else tiled_bytes

    @functools.cached_property
    def held(self) -> dict[str, int]:
        """Bytes that a device always holds, independent of the batch."""
        stacks = self.layout.stacks
        return {
            "tables": sum(costs.array_bytes(g.row_format, g.num_rows, self.size) for g in stacks),
            "slots": sum(_slots(g, self.size) for g in stacks),
        }

    @functools.cached_property
    def spec(self) -> BatchSpec:
        """The shape of the batch, for which a step is compiled."""
        declared, _ = self.placed
        return spec_of(declared, self.layout, self.batch)

    @functools.cached_property
    def host(self) -> dict[str, HostPlan]:
        """What tables on the host have there, and what they move, by table."""
        declared, _ = self.placed
        tables = [table for _, table in self.layout.on_host]
        rows = distinct_rows(declared, self.layout, self.batch, tables)
        return host_plans(self.layout, rows, self.hit_rates, self.touched_rows)

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
            return step | {MISSES: moving_bytes(self.layout, self.host, size)}
        return step

    @property
    def wasted(self) -> dict[str, int]:
        """How many bytes of `held` and `passing` are padding of a TPU's tiles."""
        held = {"tables": 0, "slots": 0}
        for stack in self.layout.stacks:
            table, slots = costs.stack_bytes(stack, stack.num_rows, self.size)
            used_by_table, used_by_slots = costs.used_bytes(stack, stack.num_rows)
            held["tables"] += table - used_by_table
            held["slots"] += slots - used_by_slots
        used = self._passing(untiled_bytes)
        return held | {name: size - used[name] for name, size in self.passing.items()}

    def changed(self, changes: Mapping[str, Mapping[str, Any]]) -> Request:
        """Return the request with some fields of some tables changed."""
        feature_config = with_tables(self.declared, changes)
        return dataclasses.replace(self, declared=structure.flatten(feature_config))


def _slots(stack: Stack, size: Size) -> int:
    """Return the bytes of all slots of a stack, with and without rows."""
    whole = [slot for slot in slot_shapes(stack).values() if not slot.per_row]
    return costs.slot_bytes(stack, stack.num_rows, size) + sum(
        size(slot.shape, np.dtype(slot.dtype)) for slot in whole
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
    if memory is not None:
        memory = check_int("memory, bytes of a device", memory, minimum=1)
    lookahead = check_lookahead(lookahead)
    known = read_target(target)
    known = known if memory is None else known._replace(memory=memory)
    declared = structure.flatten(feature_config)
    options = hit_rates, touched_rows, exchange_dtype, lookahead
    request = Request(known, declared, optimizer, batch, *options)
    found = _planned(request)
    if found.fits:
        return found
    from tpu_embed.planning.remedies import find_remedies  # which plans each of them

    return dataclasses.replace(found, remedies=find_remedies(request, math.gcd(*found.spec.sizes)))


def _planned(request: Request) -> Plan:
    """Return the plan, without remedies."""
    declared, why = request.placed
    layout, size, spec, host = request.layout, request.size, request.spec, request.host
    living, batches = [table for _, table in layout.living], request.lookahead + 1
    ahead = distinct_rows(declared, layout, request.batch, living, batches=batches)
    tables = []
    for name in declared.table_names:
        stack, table = layout.table(name)
        copies = stack.num_shards if stack.shard_axes else 1
        held = costs.stack_bytes(stack, table.rows_per_shard, size)
        one = TablePlan(
            name=name,
            vocabulary_size=table.declared_size,
            dim=stack.dim,
            dtype=stack.dtype,
            placement=stack.placement,
            why=why.get(name, "as declared"),
            rows=table.rows_per_shard,
            padding=table.rows_per_shard * copies - table.vocabulary_size,
            table_bytes=held[0],
            slot_bytes=held[1],
            wasted_bytes=sum(held) - sum(costs.used_bytes(stack, table.rows_per_shard)),
            lookahead_rows=ahead.get(name),
            host=host.get(name),
        )
        tables.append(one)
    return Plan(
        target=request.target.name,
        devices=request.axes.mesh.size,
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
        hosts=request.target.hosts,
        **_of_hosts(layout, list(host.values()), request.target.hosts),
    )


def _of_hosts(layout: Layout, plans: list[HostPlan], hosts: int) -> dict[str, Any]:
    """Return the fields of a plan that say what each host holds, and moves in a step."""

    def shared(field: str, some: Iterable[HostPlan]) -> int:
        return -(-sum(getattr(one, field) for one in some) // hosts)

    parts = {"maps": sum(_map_bytes(table) for _, table in layout.living)}
    if plans:
        parts["rows at home"] = shared("row_store_bytes", (one for one in plans if not one.path))
        parts["index"] = shared("index_bytes", plans)
    known = [one for one in plans if one.hit_rate is not None]
    missed = {"in": shared("bytes_in", known), "out": shared("bytes_out", known)}
    return {
        "host_bytes": sum(parts.values()),
        "on_host": parts,
        "file_bytes": shared("row_store_bytes", (one for one in plans if one.path)),
        "missed": missed if known else None,
    }


def _map_bytes(table: TableSlice) -> int:
    """Return at most how many bytes of a host's memory the maps of a table take."""
    size, rules = table.vocabulary_size, table.vocabulary
    found = ROW_BYTES * size
    if table.is_on_host:
        # No id of a table on the host waits: all rows of a batch find room, or it is refused.
        size, rules = table.key_table or (0, None)
        found += ROW_BYTES * size
    return found + (WAITING_BYTES * rules.options(size, lookahead=0).waiting if rules else 0)

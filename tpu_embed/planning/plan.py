"""Plan a configuration on a mesh that need not exist: memory per device, and traffic per step.

If it does not fit, the plan says which changes would help.

Input: feature configs, an optimizer, a mesh or a topology, a batch or its shapes. Output: a `Plan`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from tpu_embed._checks import check_int, refuse
from tpu_embed._types import PyTree
from tpu_embed.core.batch import BatchSpec
from tpu_embed.core.ids import structure
from tpu_embed.core.layout import (
    ExchangeDtype,
    TableSlice,
)
from tpu_embed.planning import costs
from tpu_embed.planning.costs import readable
from tpu_embed.planning.host import HitRate, HostPlan
from tpu_embed.planning.remedies import find_remedies
from tpu_embed.planning.request import Request
from tpu_embed.planning.targets import GivenTarget, read_target
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
        memory = check_int("memory, bytes of a device", memory, minimum=1)
        known = known._replace(memory=memory)
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
    return dataclasses.replace(found, remedies=find_remedies(request, math.gcd(*found.spec.sizes)))


def _planned(request: Request) -> Plan:
    """Return the plan, without remedies."""
    layout, size, spec, host = request.layout, request.size, request.spec, request.host
    ahead = request.distinct_rows(layout.living, batches=request.lookahead + 1)
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
                why=request.chosen[name][1] if name in request.chosen else "as declared",
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

    def shared(field: str, some: Iterable[HostPlan]) -> int:
        return -(-sum(getattr(one, field) for one in some) // hosts)

    on_host = {"maps": sum(_map_bytes(table) for _, table in layout.living)}
    in_files = [one for one in plans if one.path]
    if plans:
        in_memory = [one for one in plans if not one.path]
        on_host["rows at home"] = shared("row_store_bytes", in_memory)
        on_host["index"] = shared("index_bytes", plans)
    known = [one for one in plans if one.hit_rate is not None]
    missed = {"in": shared("bytes_in", known), "out": shared("bytes_out", known)}
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
        hosts=hosts,
        host_bytes=sum(on_host.values()),
        on_host=on_host,
        file_bytes=shared("row_store_bytes", in_files),
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
    return found + (WAITING_BYTES * rules.options(size, lookahead=0).waiting if rules else 0)

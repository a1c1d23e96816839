"""Plan a configuration on a mesh that need not exist: memory per device, and traffic per step.

If it does not fit, the plan says which changes would help: more devices, fewer bytes per row, or
tables on the host. Each of them is planned, too. The largest tables go to the host first, and no
more of them than must. As many of their rows stay on the devices as have room there; at least those
of the batches whose rows stay together, and of one more, which is placed ahead.

Input: feature configs, an optimizer, a mesh or a topology, a batch or its shapes. Output: a `Plan`.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tpu_embed._checks import check_int, refuse
from tpu_embed._types import PyTree
from tpu_embed.core.batch import BatchSpec
from tpu_embed.core.ids import structure
from tpu_embed.core.layout import (
    ExchangeDtype,
    TableSlice,
)
from tpu_embed.core.state import row_formats
from tpu_embed.initializers import wants_shard_info
from tpu_embed.optimizers import RowWiseAdagrad
from tpu_embed.planning import costs
from tpu_embed.planning.costs import readable
from tpu_embed.planning.host import HitRate, HostPlan, row_bytes
from tpu_embed.planning.request import Request
from tpu_embed.planning.targets import GivenTarget, read_target
from tpu_embed.storage import HostStorage
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

    def shared(field, some):
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
    found = [_describe_change(what, request.changed(new))[0] for what, new in changes.items()]
    return tuple(text for text in (_more_devices(request), *found) if text)


def _changes_of_tables(request: Request) -> dict[str, Changes]:
    """Return changes in words, and as they are."""
    tables = dict(zip(request.declared.table_names, request.declared.tables, strict=True))
    replicated = [name for name, table in tables.items() if table.placement == "replicated"]
    wider = [name for name, table in tables.items() if table.dtype != "bfloat16"]
    # Those of more than one number per row; the rows themselves are a part, too.
    wide = [
        stack
        for stack in request.layout.stacks
        if sum(bool(one.shape) for one in row_formats(stack).values()) > 1
    ]
    slotted = [table.name for stack in wide for table in stack.tables]
    changes: dict[str, Changes] = {
        'no replicated tables (placement="mod")': {n: {"placement": "mod"} for n in replicated},
        "bfloat16 tables": {name: {"dtype": "bfloat16"} for name in wider},
        "row-wise slots (RowWiseAdagrad)": {n: {"optimizer": RowWiseAdagrad()} for n in slotted},
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
            return f"{what}: {readable(held)} of tables and slots alone, still too much", False
        needed = held + sum(request.passing.values())
    except ValueError:  # for example more padded rows than int32 can number
        return "", False
    fits = needed <= request.memory
    return f"{what}: {readable(needed)}, {'would fit' if fits else 'still too much'}", fits


class _Candidate(NamedTuple):
    """A table that could be at home on the host; the rows are those that the devices hold."""

    name: str
    storage: HostStorage | None
    rows: int
    least: int
    row_bytes: int


def _moved_to_host(request: Request) -> Changes:
    """Return the tables that would have to be on the host; none if that would not help."""
    some = _candidates(request)
    if not some:
        return {}
    room = request.memory - sum(request.passing.values())

    def fit(changes):
        return sum(request.changed(changes).held.values()) <= room

    # The fewest tables that fit with as few rows as may be, or all; then the most rows of these.
    enough = bisect_left(range(1, len(some)), True, key=lambda n: fit(_changes(some[:n], 0)))
    chosen = some[: enough + 1]
    parts = range(1, _STEPS)
    most = bisect_left(parts, True, key=lambda n: not fit(_changes(chosen, n / _STEPS)))
    return _changes(chosen, most / _STEPS)


def _candidates(request: Request) -> list[_Candidate]:
    """Return the tables that are or could be at home on the host, the largest first.

    They may have fewer rows on the devices.
    """
    configs = dict(zip(request.declared.table_names, request.declared.tables, strict=True))
    fit = []
    for stack in request.layout.stacks:
        changes_all = stack.optimizer is not None and stack.optimizer.updates_every_row
        if stack.placement != "replicated" and not changes_all:
            for table in stack.tables:
                initializer = configs[table.name].initializer
                if initializer is None or not wants_shard_info(initializer):
                    fit.append((stack, table))
    # What a batch has is counted as if they were there with all of their rows.
    here = [t for _, t in fit if not t.is_on_host]
    counted = request.changed(
        {
            t.name: {"storage": HostStorage(device_rows=min(t.vocabulary_size, _MOST_ROWS))}
            for t in here
        }
    )
    batch_rows = counted.distinct_rows()
    found = []
    for stack, table in fit:
        rows = table.vocabulary_size
        least = min(rows, max(1, (request.lookahead + 2) * batch_rows[table.name]))
        found.append(_Candidate(table.name, table.storage, rows, least, row_bytes(stack)))
    fewer = (one for one in found if one.least < one.rows)
    return sorted(fewer, key=lambda one: -one.rows * one.row_bytes)


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

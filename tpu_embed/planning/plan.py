"""Plan a configuration on a mesh that need not exist: memory per device, and traffic per step.

If it does not fit, the plan says which changes would help.

Input: feature configs, an optimizer, a mesh or a topology, a batch or its shapes. Output: a `Plan`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, Mesh

from tpu_embed._checks import check_int, is_int, message
from tpu_embed._types import PyTree
from tpu_embed.core.batch import BatchSpec
from tpu_embed.core.ids import Structure, structure
from tpu_embed.core.layout import Layout, MeshAxes, Stack, make_layout
from tpu_embed.core.state import slot_shapes
from tpu_embed.kernels.formats import packing_of
from tpu_embed.optimizers import RowWiseAdagrad
from tpu_embed.planning import costs
from tpu_embed.planning.chips import Topology
from tpu_embed.planning.demand import spec_of
from tpu_embed.planning.placement import placements, with_placements, with_tables
from tpu_embed.planning.sizes import readable, tiled_bytes, untiled_bytes

__all__ = ["Plan", "TablePlan", "plan"]

Target = Mesh | AbstractMesh | Topology | str | int
"""A mesh, a topology or its name, or a number of devices."""


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
        gradients, exchange. This is an estimate.
      sent: bytes that a device sends to others per step: ids, rows, gradients.
      moved: bytes that a device must read and write in its memory per step for the touched rows:
        lookup, update, exchange. What a compiled step moves can be compared with it.
      spec: the shape of the batch, for which a step is compiled.
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
    sent: dict[str, int]
    moved: dict[str, int]
    spec: BatchSpec = dataclasses.field(repr=False)
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


def plan(
    feature_config: PyTree,
    optimizer: Any,
    target: Target,
    batch: PyTree,
    *,
    memory: int | None = None,
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

    Returns:
      The plan, whether or not it fits; `Plan.check` raises if it does not.

    Raises:
      TypeError: the batch has other containers, or its ids are not integers.
      ValueError: an engine would refuse the configs, the batch or the target.

    Example:
      >>> import jax, tpu_embed
      >>> films = tpu_embed.TableConfig(1_000_000, 64, name="films")
      >>> ids = jax.ShapeDtypeStruct((4096, 20), np.int32)
      >>> feature_config, batch = {"seen": tpu_embed.FeatureConfig(films)}, {"seen": ids}
      >>> found = plan(feature_config, tpu_embed.optimizers.Adagrad(0.1), "v5e:2x2", batch)
      >>> found.held["tables"], found.held["slots"], found.fits
      (64028672, 64028672, True)
    """
    if memory is not None:
        memory = check_int("memory, bytes of a device", memory, minimum=1)
    name, axes, known, most = read_target(target)
    declared = structure.flatten(feature_config)
    known = known if memory is None else memory
    request = _Request(name, axes, known, most, declared, optimizer, batch)
    found = request.plan()
    if found.fits:
        return found
    return dataclasses.replace(found, remedies=_remedies(request, math.gcd(*found.spec.sizes)))


def read_target(target: Target) -> tuple[str, MeshAxes, int | None, int | None]:
    """Return name, axes, bytes per device, and the largest number of devices of a target.

    The last two are None if unknown.

    Raises:
      ValueError: the target is not a mesh, a topology or a number of devices.
    """
    if isinstance(target, (Mesh, AbstractMesh)) and target.axis_names:
        kind = getattr(target.abstract_mesh.abstract_device, "device_kind", "device")
        axes = MeshAxes(target, target.axis_names)  # type: ignore[arg-type]
        return f"{target.size} × {kind}", axes, None, None
    if isinstance(target, (str, Topology)):
        topology = target if isinstance(target, Topology) else Topology(target)
        chip = topology.chip
        axes = _abstract_axes(topology.devices, chip.device_kind)
        return topology.name, axes, topology.memory_per_device, chip.pod * chip.devices
    if not is_int(target) or target < 1:  # type: ignore[operator]
        expected = "a mesh, a topology or a number of devices"
        remedy = "for example v5p:4x4x4, or 8"
        raise ValueError(message("target", expected=expected, got=repr(target), remedy=remedy))
    devices = int(target)  # type: ignore[arg-type]
    return f"{devices} device{'s' * (devices > 1)}", _abstract_axes(devices), None, None


def _abstract_axes(devices: int, device_kind: str | None = None, name: str = "devices") -> MeshAxes:
    """Return one axis over abstract devices."""
    device = device_kind and AbstractDevice(device_kind, num_cores=None, platform="tpu")
    mesh = AbstractMesh((devices,), (name,), abstract_device=device or None)
    return MeshAxes(mesh, mesh.axis_names)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, eq=False)
class _Request:
    """The arguments of `plan`, and what is computed from them on demand.

    Each remedy is another request, so that its plan is computed in the same way.
    """

    target: str
    axes: MeshAxes
    memory: int | None
    most: int | None
    declared: Structure
    optimizer: Any
    batch: PyTree

    @functools.cached_property
    def placed(self) -> tuple[Structure, dict[str, str]]:
        """The features without "auto", and table -> reason for each chosen placement."""
        chosen = placements(self.declared, self.optimizer, devices=self.axes.mesh.size)
        where = {table: placement for table, (placement, _) in chosen.items()}
        why = {table: reason for table, (_, reason) in chosen.items()}
        return structure.flatten(with_placements(self.declared, where)), why

    @functools.cached_property
    def layout(self) -> Layout:
        """Where each row lives."""
        declared, _ = self.placed
        return make_layout(declared, self.optimizer, self.axes, sum_blocks=8, stack_tables=True)

    @property
    def size(self) -> costs.Size:
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
    def passing(self) -> dict[str, int]:
        """Bytes that a device needs during a step."""
        return costs.passing(self.layout, self.spec, self.size)

    def plan(self) -> Plan:
        """Return the plan, without remedies."""
        declared, why = self.placed
        layout, size, spec = self.layout, self.size, self.spec
        return Plan(
            target=self.target,
            devices=self.axes.mesh.size,
            memory=self.memory,
            batch=max(spec.sizes),
            tables=tuple(_table(layout, name, why, size) for name in declared.table_names),
            stacks=len(layout.stacks),
            held=self.held,
            passing=self.passing,
            sent=costs.sent(layout, spec),
            moved=costs.moved(layout, spec),
            spec=spec,
        )

    def changed(self, changes: Mapping[str, Mapping[str, Any]]) -> _Request:
        """Return the request with some fields of some tables changed."""
        feature_config = with_tables(self.declared, changes)
        return dataclasses.replace(self, declared=structure.flatten(feature_config))


def _slots(stack: Stack, size: costs.Size) -> int:
    """Return the bytes of all slots of a stack, with and without rows."""
    whole = [slot for slot in slot_shapes(stack).values() if not slot.per_row]
    return costs.slot_bytes(stack, stack.num_rows, size) + sum(
        size(slot.shape, np.dtype(slot.dtype)) for slot in whole
    )


def _remedies(request: _Request, batch: int) -> tuple[str, ...]:
    """Return changes that would make it fit, or come nearest, in words; each is planned."""
    tables = dict(zip(request.declared.table_names, request.declared.tables, strict=True))
    replicated = [name for name, table in tables.items() if table.placement == "replicated"]
    wider = [name for name, table in tables.items() if table.dtype != "bfloat16"]
    slotted = [t.name for g in request.layout.stacks if _has_wide_slots(g) for t in g.tables]
    changes: dict[str, dict[str, dict[str, Any]]] = {
        'no replicated tables (placement="mod")': {n: {"placement": "mod"} for n in replicated},
        "bfloat16 tables": {name: {"dtype": "bfloat16"} for name in wider},
        "row-wise slots (RowWiseAdagrad)": {n: {"optimizer": RowWiseAdagrad()} for n in slotted},
    }
    changes = {what: new for what, new in changes.items() if new}
    if len(changes) > 1:
        parts = list(changes.values())
        changes["all changes of tables"] = {
            name: {field: value for part in parts for field, value in part.get(name, {}).items()}
            for name in tables
        }
    found = [_describe_change(what, request.changed(new))[0] for what, new in changes.items()]
    return tuple(text for text in (_more_devices(request, batch), *found) if text)


def _has_wide_slots(stack: Stack) -> bool:
    """Return whether the optimizer of a stack keeps more than one number per row."""
    return any(slot.per_row and slot.shape for slot in slot_shapes(stack).values())


def _more_devices(request: _Request, batch: int) -> str:
    """Return how many devices would hold it, in words.

    The number is doubled until it fits, as long as it divides all batch sizes. A mesh of several
    axes could grow along any of them, so the answer is "" then.
    """
    names, devices = request.axes.mesh.axis_names, request.axes.mesh.size
    kind = getattr(request.axes.device, "device_kind", None)
    most = batch if request.most is None else min(batch, request.most)
    text, fits = "", len(names) != 1
    while not fits and 2 * devices <= most and batch % (2 * devices) == 0:
        devices *= 2
        larger = dataclasses.replace(request, axes=_abstract_axes(devices, kind, names[0]))
        text, fits = _describe_change(f"{devices} devices, the same global batch", larger)
    return text


def _describe_change(what: str, request: _Request) -> tuple[str, bool]:
    """Return the bytes that a remedy needs, in words, and whether it fits; "" if impossible."""
    assert request.memory is not None, "without a memory everything fits"
    try:
        held = sum(request.held.values())
        if held > request.memory:  # planning the batch takes longer, and is not needed
            return f"{what}: {readable(held)} of tables and slots alone, still too much", False
        needed = held + sum(request.passing.values())
    except ValueError:  # for example more padded rows than int32 can number
        return "", False
    fits = needed <= request.memory
    return f"{what}: {readable(needed)}, {'would fit' if fits else 'still too much'}", fits


def _table(layout: Layout, name: str, why: Mapping[str, str], size: costs.Size) -> TablePlan:
    stack, table = layout.table(name)
    copies = stack.num_shards if stack.shard_axes else 1
    return TablePlan(
        name=name,
        vocabulary_size=table.vocabulary_size,
        dim=stack.dim,
        dtype=stack.dtype,
        placement=stack.placement,
        why=why.get(name, "as declared"),
        rows=table.rows_per_shard,
        padding=table.rows_per_shard * copies - table.vocabulary_size,
        table_bytes=costs.array_bytes(stack.row_format, table.rows_per_shard, size),
        slot_bytes=costs.slot_bytes(stack, table.rows_per_shard, size),
    )

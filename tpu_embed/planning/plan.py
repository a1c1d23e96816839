"""What a configuration takes on a mesh that need not exist: memory of a device, bytes of a step.

Enters: feature configs, an optimizer, a mesh or a topology, a batch or its shapes. Leaves: a
`Plan`. Called by users before they rent machines, by `placement.py`, and by the command line.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jax.sharding import AbstractDevice, AbstractMesh, Mesh

from tpu_embed._checks import is_int, message
from tpu_embed._types import PyTree
from tpu_embed.core import structure
from tpu_embed.core.batch_spec import BatchSpec
from tpu_embed.core.collectives import MeshAxes, make_axes
from tpu_embed.core.layout import Layout
from tpu_embed.core.resolve import make_layout
from tpu_embed.planning import costs
from tpu_embed.planning.chips import Topology
from tpu_embed.planning.demand import spec_of
from tpu_embed.planning.placement import placements, with_placements
from tpu_embed.planning.sizes import readable, tiled_bytes, untiled_bytes

__all__ = ["Plan", "TablePlan", "plan"]

Target = Mesh | Topology | str | int
"""A mesh, a topology or its name, or a number of devices."""


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """One table on every device.

    Attributes:
      name: the table's.
      vocabulary_size: V.
      dim: D.
      dtype: of the stored rows.
      placement: "mod", "div" or "replicated".
      why: the reason of a placement that was chosen, or "as declared".
      rows: rows a device holds, padding included.
      padding: of all devices' rows, those that are no row of the table.
      table_bytes: of a device.
      slot_bytes: of a device.
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
    """What every device holds, and sends in a step. All devices are alike.

    Attributes:
      target: what it is for.
      devices: how many.
      memory: bytes a device has, or None: not known.
      batch: B, of all devices.
      tables: in table order.
      stacks: arrays they are stacked into.
      held: bytes a device holds all the time, by what: tables, slots.
      passing: bytes a device needs during a step beside them, by what: ids, activations and their
        gradients, exchange and sums. An estimate; those of one stage are not all there in another.
      sent: bytes a device sends to others in a step, by what: ids, rows, gradients.
      moved: bytes a device's memory must read and write in a step for the rows that are touched, by
        what: lookup, update, exchange. What a compiled step moves is compared with it.
      spec: the shape of the step's program.
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

    @property
    def bytes_per_device(self) -> int:
        """All that a device must have room for."""
        return sum(self.held.values()) + sum(self.passing.values())

    @property
    def fits(self) -> bool:
        """Whether that is no more than it has; True where nobody knows."""
        return self.memory is None or self.bytes_per_device <= self.memory

    def to_json(self) -> str:
        """Return the plan as a JSON object, the program's shape left out."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del fields["spec"]
        fields["tables"] = [dataclasses.asdict(table) for table in self.tables]
        return json.dumps(fields | {"bytes_per_device": self.bytes_per_device, "fits": self.fits})

    def explain(self) -> str:
        """Return the plan as tables and bars of text, to be printed."""
        from tpu_embed.planning.explain import explained  # rich is slow to import

        return explained(self)

    def check(self) -> None:
        """Check that it fits.

        Raises:
          ValueError: it does not; the message has by how much, and what would.
        """
        if not self.fits:
            assert self.memory is not None, "without a memory everything fits"
            raise ValueError(
                message(
                    f"plan for {self.target}",
                    expected=f"at most {readable(self.memory)} a device",
                    got=f"{readable(self.bytes_per_device)}, "
                    f"{readable(self.bytes_per_device - self.memory)} too much",
                    remedy="; ".join(self.remedies()),
                )
            )

    def remedies(self) -> list[str]:
        """Return what would make it fit, or come nearest: more devices, less bytes a row."""
        assert self.memory is not None, "without a memory everything fits"
        passing = sum(self.passing.values())
        table, slots = self.held["tables"], self.held["slots"]
        found = []
        if self.memory > passing:
            devices = -(-self.devices * (table + slots) // (self.memory - passing))
            found.append(f"{devices} devices or more, at this batch a device, would hold it")
        narrow = {
            "bfloat16 tables": table // 2 + slots,
            "row-wise slots (RowWiseAdagrad)": table + slots // 64,
            "both": table // 2 + slots // 64,
        }
        for what, held in narrow.items():
            size = held + passing
            word = "would fit" if size <= self.memory else "still too much"
            found.append(f"{what}: {readable(size)}, {word}")
        return found


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
      target: a mesh; a TPU topology such as `"v5p:4x4x4"`; or a number of devices.
      batch: the global batch, in the structure of the features: ids, from which the exchange is
        counted, or `jax.ShapeDtypeStruct`s of dense ids, which are taken to be uniform.
      memory: bytes of a device; None: a topology's, else not known.

    Returns:
      the plan, whether it fits or not: `check` it.

    Raises:
      ValueError: configs, batch or target that no engine would take.

    Example:
      >>> import jax, tpu_embed
      >>> films = tpu_embed.TableConfig(1_000_000, 64, name="films")
      >>> ids = jax.ShapeDtypeStruct((4096, 20), np.int32)
      >>> feature_config, batch = {"seen": tpu_embed.FeatureConfig(films)}, {"seen": ids}
      >>> found = plan(feature_config, tpu_embed.optimizers.Adagrad(0.1), "v5e:2x2", batch)
      >>> found.held["tables"], found.held["slots"], found.fits
      (64028672, 64028672, True)
    """
    name, axes, known = read_target(target)
    declared = structure.flatten(feature_config)
    chosen = placements(declared, optimizer, devices=axes.mesh.size)
    where = {table: placement for table, (placement, _) in chosen.items()}
    why = {table: reason for table, (_, reason) in chosen.items()}
    declared = structure.flatten(with_placements(declared, where))
    tpu = isinstance(target, (str, Topology))
    layout = make_layout(declared, optimizer, axes, sum_blocks=8, stack_tables=True)
    spec = spec_of(declared, layout, batch)
    size = tiled_bytes if tpu else untiled_bytes
    held = {
        "tables": sum(costs.array_bytes(g.form, g.rows, size) for g in layout.groups),
        "slots": sum(costs.slot_bytes(g, g.rows, size) for g in layout.groups),
    }
    return Plan(
        target=name,
        devices=axes.mesh.size,
        memory=known if memory is None else memory,
        batch=spec.batch,
        tables=tuple(_table(layout, name, why, size) for name in declared.table_names),
        stacks=len(layout.groups),
        held=held,
        passing=costs.passing(layout, spec, size),
        sent=costs.sent(layout, spec),
        moved=costs.moved(layout, spec),
        spec=spec,
    )


def read_target(target: Target) -> tuple[str, MeshAxes, int | None]:
    """Return a target's name, its axes, and the bytes of a device where they are known.

    Raises:
      ValueError: what is no mesh, topology, or number of devices.
    """
    if isinstance(target, Mesh):
        device = target.devices.flat[0]
        return f"{target.size} × {device.device_kind}", make_axes(target, None), None
    if isinstance(target, (str, Topology)):
        topology = target if isinstance(target, Topology) else Topology(target)
        axes = _abstract_axes(topology.devices, topology.chip.device_kind)
        return topology.name, axes, topology.memory_per_device
    if not is_int(target) or target < 1:
        expected = "a mesh, a topology or a number of devices"
        remedy = "for example v5p:4x4x4, or 8"
        raise ValueError(message("target", expected=expected, got=repr(target), remedy=remedy))
    return f"{target} devices", _abstract_axes(int(target)), None


def _abstract_axes(devices: int, device_kind: str | None = None) -> MeshAxes:
    """Return one axis over devices that nobody has."""
    device = device_kind and AbstractDevice(device_kind, num_cores=None, platform="tpu")
    mesh = AbstractMesh((devices,), ("devices",), abstract_device=device or None)
    return MeshAxes(mesh, mesh.axis_names)  # type: ignore[arg-type]


def _table(layout: Layout, name: str, why: Mapping[str, str], size: costs.Size) -> TablePlan:
    group, table = layout.table(name)
    copies = group.num_shards if group.shard_axes else 1
    return TablePlan(
        name=name,
        vocabulary_size=table.vocabulary_size,
        dim=group.dim,
        dtype=group.dtype,
        placement=group.placement,
        why=why.get(name, "as declared"),
        rows=table.rows_per_shard,
        padding=table.rows_per_shard * copies - table.vocabulary_size,
        table_bytes=costs.array_bytes(group.form, table.rows_per_shard, size),
        slot_bytes=costs.slot_bytes(group, table.rows_per_shard, size),
    )

"""What a configuration takes on a mesh that need not exist: memory of a device, bytes of a step.

Enters: feature configs, an optimizer, a mesh or a topology, a batch or its shapes. Leaves: a
`Plan`. Called by users before they rent machines, by `placement.py`, and by the command line.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from tpu_embed._checks import is_int, message
from tpu_embed._types import PyTree
from tpu_embed.core import structure
from tpu_embed.core.batch import parts
from tpu_embed.core.batch_spec import BatchSpec
from tpu_embed.core.collectives import MeshAxes, make_axes
from tpu_embed.core.layout import Group, Layout
from tpu_embed.core.resolve import make_layout
from tpu_embed.core.tables import slot_shapes
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
        "tables": sum(size((g.rows, g.dim), _stored(g)) for g in layout.groups),
        "slots": sum(_slot_bytes(g, g.rows, size) for g in layout.groups),
    }
    return Plan(
        target=name,
        devices=axes.mesh.size,
        memory=known if memory is None else memory,
        batch=spec.batch,
        tables=tuple(_table(layout, name, why, size) for name in declared.table_names),
        stacks=len(layout.groups),
        held=held,
        passing=_passing(layout, spec, size),
        sent=_sent(layout, spec),
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
        return topology.name, _abstract_axes(topology.devices), topology.memory_per_device
    if not is_int(target) or target < 1:
        expected = "a mesh, a topology or a number of devices"
        remedy = "for example v5p:4x4x4, or 8"
        raise ValueError(message("target", expected=expected, got=repr(target), remedy=remedy))
    return f"{target} devices", _abstract_axes(int(target)), None


def _abstract_axes(devices: int) -> MeshAxes:
    """Return one axis over devices that nobody has."""
    mesh = AbstractMesh((devices,), ("devices",))
    return MeshAxes(mesh, mesh.axis_names)  # type: ignore[arg-type]


Size = Callable[[tuple[int, ...], np.dtype], int]


def _table(layout: Layout, name: str, why: Mapping[str, str], size: Size) -> TablePlan:
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
        table_bytes=size((table.rows_per_shard, group.dim), _stored(group)),
        slot_bytes=_slot_bytes(group, table.rows_per_shard, size),
    )


def _stored(group: Group) -> np.dtype:
    return jnp.dtype(group.dtype)


def _slot_bytes(group: Group, rows: int, size: Size) -> int:
    """Return the bytes of the slots of so many rows."""
    shapes = slot_shapes(group).values()
    return sum(size((rows, *slot.shape), slot.dtype) for slot in shapes if slot.per_row)


def _passing(layout: Layout, spec: BatchSpec, size: Size) -> dict[str, int]:
    """Estimate what a step needs beside the tables; the fullest stage of the fullest stack."""
    activations = 0
    for form, feature in zip(spec.forms, layout.features, strict=True):
        group = layout.groups[feature.group]
        activations += size((spec.local_batch * form.bags, group.dim), group.compute_dtype)
    stacks = range(len(layout.groups))
    return {
        "ids": size((parts(spec, layout)[-1].end,), np.dtype(np.int32)),
        "activations": 2 * activations,
        "exchange": max([_stages(layout, spec, g, size) for g in stacks], default=0),
    }


def _stages(layout: Layout, spec: BatchSpec, g: int, size: Size) -> int:
    """Return the bytes of the fullest stage of one stack: fetching rows, sending, applying sums."""
    group, capacity = layout.groups[g], spec.groups[g]
    sources = layout.axes.size(layout.axes.other_batch_axes(group.shard_axes))

    def rows(n: int, dtype: Any = group.compute_dtype) -> int:
        return size((n, group.dim), np.dtype(dtype))

    asked, partials = group.num_shards * capacity.rows, group.num_shards * capacity.partials
    received = sources * partials if partials else spec.ids(g)
    touched = min(received, group.rows)
    fetching = 2 * rows(asked, _stored(group))
    sending = rows(partials) + rows(received)
    applying = rows(received) + 2 * rows(touched) + _slot_bytes(group, touched, size)
    return max(fetching, sending, applying)


def _sent(layout: Layout, spec: BatchSpec) -> dict[str, int]:
    """Return the bytes that a device sends in a step: an exchange keeps one part in S at home."""
    sent = {"ids": 0, "rows": 0, "gradients": 0}
    for group, capacity in zip(layout.groups, spec.groups, strict=True):
        others, index = group.num_shards - 1, group.index_dtype.itemsize
        width = group.dim * group.compute_dtype.itemsize
        sent["ids"] += others * capacity.rows * index
        sent["rows"] += others * capacity.rows * group.dim * _stored(group).itemsize
        sent["gradients"] += others * capacity.partials * (width + index)
        if not others and layout.axes.replicas > 1:
            blocks = max(layout.sum_blocks, layout.axes.replicas)
            sent["gradients"] += (
                min(blocks * group.rows, layout.axes.replicas * capacity.partials) * width
            )
    return sent

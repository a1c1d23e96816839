"""What a plan is made for: a mesh, a TPU topology, or a number of devices; none need exist.

Input: what a user gives. Output: a `Target`, whose mesh is abstract.
"""

from __future__ import annotations

from typing import NamedTuple

from jax.sharding import AbstractDevice, AbstractMesh, Mesh

from tpu_embed._checks import is_int, message
from tpu_embed.core.layout import MeshAxes
from tpu_embed.planning.chips import Topology

_MOST_DEVICES = 2**20

GivenTarget = Mesh | AbstractMesh | Topology | str | int
"""A mesh, a topology or its name, or a number of devices."""


class Target(NamedTuple):
    """The devices of a plan.

    Attributes:
      name: what messages and plans call it.
      axes: their mesh.
      memory: bytes per device; None if unknown.
      topology: None for a mesh, and for a number of devices.
    """

    name: str
    axes: MeshAxes
    memory: int | None
    topology: Topology | None

    @property
    def hosts(self) -> int:
        """The number of hosts; 1 if it is not known."""
        if self.topology is not None:
            return self.topology.hosts
        if not isinstance(self.axes.mesh, Mesh):
            return 1
        return len(self.axes.processes)

    def larger(self, batch: int) -> list[Target]:
        """Return targets with more devices, of which each number divides the batch.

        For a topology, these are the larger slices of its chip. Otherwise the number of devices is
        doubled again and again; a mesh of several axes could grow along any, so there are none.

        Args:
          batch: B, the size of the global batch.
        """
        if self.topology is not None:
            return [read_target(one) for one in self.topology.larger() if batch % one.devices == 0]
        names, devices = self.axes.mesh.axis_names, self.axes.mesh.size
        kind, found = getattr(self.axes.device, "device_kind", None), []
        while len(names) == 1 and batch % (2 * devices) == 0 and 2 * devices <= batch:
            devices *= 2
            axes = _abstract_axes(devices, kind, names[0])
            found.append(Target(f"{devices} devices", axes, self.memory, None))
        return found


def read_target(target: GivenTarget) -> Target:
    """Return what a user gave as a `Target`.

    Raises:
      ValueError: it is not a mesh, a topology or a number of devices.
    """
    if isinstance(target, (Mesh, AbstractMesh)) and target.axis_names:
        kind = getattr(target.abstract_mesh.abstract_device, "device_kind", "device")
        axes = MeshAxes(target, target.axis_names)  # type: ignore[arg-type]
        return Target(f"{target.size} × {kind}", axes, None, None)
    if isinstance(target, (str, Topology)):
        topology = target if isinstance(target, Topology) else Topology(target)
        axes = _abstract_axes(topology.devices, topology.chip.device_kind)
        return Target(topology.name, axes, topology.memory_per_device, topology)
    if not is_int(target) or target < 1:  # type: ignore[operator]
        expected = "a mesh, a topology or a number of devices"
        remedy = "for example v5p:4x4x4, or 8"
        raise ValueError(message("target", expected=expected, got=repr(target), remedy=remedy))
    devices = int(target)  # type: ignore[arg-type]
    if devices > _MOST_DEVICES:
        got, remedy = f"{devices}", "for example v5p:4x4x4, or 8"
        raise ValueError(
            message("target", expected=f"at most {_MOST_DEVICES} devices", got=got, remedy=remedy)
        )
    return Target(f"{devices} device{'s' * (devices > 1)}", _abstract_axes(devices), None, None)


def _abstract_axes(devices: int, device_kind: str | None = None, name: str = "devices") -> MeshAxes:
    """Return one axis over abstract devices."""
    device = device_kind and AbstractDevice(device_kind, num_cores=None, platform="tpu")
    mesh = AbstractMesh((devices,), (name,), abstract_device=device or None)
    return MeshAxes(mesh, mesh.axis_names)  # type: ignore[arg-type]

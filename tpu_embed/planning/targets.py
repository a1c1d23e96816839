"""What a plan is made for: TPU chips and their topologies, a mesh, or a number of devices.

None need exist: the memory and the speed of each device are constants here.

Input: a name such as `v5p:4x4x4` or `v5p-128`, or what else a user gives. Output: a `Topology`, or
a `Target`, whose mesh is abstract.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from tpu_embed._checks import did_you_mean, is_int, refuse
from tpu_embed.core.layout import MeshAxes

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One generation of TPU.

    Attributes:
      memory: GiB of HBM per JAX device that programs can use.
      pod: chips in a whole pod, the largest slice.
      devices: JAX devices per chip.
      axes: how many sizes the name of a topology has; 3 for `v5p:4x4x4`.
      device_kind: the name that JAX gives to its devices.
      bandwidth: GB (10⁹ bytes) per second between a JAX device and its HBM.
      clock: GHz of a TensorCore; None where libtpu's profile of a step is not whole.
      counted: what an accelerator type counts per chip: its two TensorCores in `v5p-8`, which has 4
        chips, or the chip itself in `v6e-8`.
      least: chips of the smallest slice.
    """

    memory: float
    pod: int
    devices: int
    axes: int
    device_kind: str
    bandwidth: float
    clock: float | None = None
    counted: int = 2
    least: int = 4


CHIPS = {
    "v2": Chip(7.48, 256, devices=2, axes=2, device_kind="TPU v2", bandwidth=700 / 2),
    "v3": Chip(15.48, 1024, devices=2, axes=2, device_kind="TPU v3", bandwidth=900 / 2),
    "v4": Chip(30.75, 4096, devices=1, axes=3, device_kind="TPU v4", bandwidth=1228),
    "v5e": Chip(
        15.75,
        256,
        devices=1,
        axes=2,
        device_kind="TPU v5 lite",
        bandwidth=819,
        counted=1,
        least=1,
    ),
    "v5p": Chip(
        95.74, 8960, devices=1, axes=3, device_kind="TPU v5", bandwidth=2765, clock=1.75
    ),
    "v6e": Chip(
        31.25,
        256,
        devices=1,
        axes=2,
        device_kind="TPU v6 lite",
        bandwidth=1638,
        clock=1.75,
        counted=1,
        least=1,
    ),
    "tpu7x": Chip(
        94.75, 9216, devices=2, axes=3, device_kind="TPU7x", bandwidth=7380 / 2
    ),
}
"""Chips by name.

The memory is what libtpu 0.0.42 reports as available when a program needs more. The pod sizes are
from the Cloud TPU documentation, "System architecture". The two cores of a v4 or v5p chip are one
device ("megacore").

The bandwidths are those that the Cloud TPU documentation gives for a chip on the page of its
generation (v2's is from Norrie et al., "The Design Process for Google's Training Chips", 2021),
divided by its devices. Google publishes no clocks: 1.75 GHz is assumed.
"""

_SLICES = {
    2: "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16 16x32 32x32",
    3: "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16 16x16x24",
}
"""The sizes that slices usually have, by their number, in the pages of the chips' generations."""

_CHIPS_PER_HOST = 4

_TYPES = {name: name for name in CHIPS} | {"v5litepod": "v5e"}
"""How accelerator types begin -> the chip."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice of TPU chips.

    Attributes:
      name: `chip:sizes`. An accelerator type of Google Cloud, such as `v5p-128` or `v5litepod-16`,
        becomes the topology that it usually has.

    Raises:
      ValueError: the name is not of this form, there is no such accelerator type, or it has more
        chips than a pod.

    Example:
      >>> topology = Topology("v5p:4x4x4")
      >>> topology.devices, topology.memory_per_device // 2**30
      (64, 95)
      >>> Topology("v5p-128")
      Topology(name='v5p:4x4x4')
    """

    name: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _without_type(str(self.name)))
        kind, _, sizes = self.name.partition(":")
        known = CHIPS.get(kind)
        if known is None or not re.fullmatch(
            r"[1-9][0-9]{0,8}(x[1-9][0-9]{0,8})*", sizes
        ):
            expected = f"a chip among {', '.join(CHIPS)}, a colon, and its sizes from 1"
            similar = (
                "" if known else did_you_mean(re.split("[:-]", self.name)[0], _TYPES)
            )
            remedy = similar or "for example v5p:4x4x4, v6e:16x16 or v5p-128"
        elif len(self.shape) != known.axes:
            expected = f"{known.axes} sizes for {kind}"
            remedy = f"for example {kind}:{'x'.join('2' * known.axes)}"
        elif math.prod(self.shape) > known.pod:
            expected = f"at most {known.pod:,} chips, a pod of {kind}"
            remedy = "for several slices give the number of their devices"
        else:
            return
        refuse("topology", expected=expected, got=repr(self.name), remedy=remedy)

    @property
    def chip(self) -> Chip:
        """The generation of its chips."""
        return CHIPS[self.name.partition(":")[0]]

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of chips along each axis."""
        return tuple(int(size) for size in self.name.partition(":")[2].split("x"))

    @property
    def devices(self) -> int:
        """The number of JAX devices in the slice."""
        return math.prod(self.shape) * self.chip.devices

    @property
    def hosts(self) -> int:
        """The number of hosts: 4 chips have one, as libtpu 0.0.42 describes every topology."""
        return max(1, math.prod(self.shape) // _CHIPS_PER_HOST)

    @property
    def memory_per_device(self) -> int:
        """Bytes of HBM per JAX device."""
        return int(self.chip.memory * GIB)

    def larger(self) -> Iterator[Topology]:
        """Yield the usual topologies of the same chip that have more chips, the smallest first."""
        kind = self.name.partition(":")[0]
        for chips, sizes in _slices(self.chip).items():
            if chips > math.prod(self.shape):
                yield Topology(f"{kind}:{sizes}")


def _slices(chip: Chip) -> dict[int, str]:
    """Return number of chips -> sizes of the usual slices of a chip, the smallest first."""
    found = {
        math.prod(map(int, one.split("x"))): one for one in _SLICES[chip.axes].split()
    }
    return {
        chips: one for chips, one in found.items() if chip.least <= chips <= chip.pod
    }


def _without_type(name: str) -> str:
    """Return the topology of an accelerator type; any other name is returned as it is.

    Raises:
      ValueError: no slice of the chip has the number of the type.
    """
    given = re.fullmatch(r"(?P<kind>[a-z0-9]+)-(?P<count>[0-9]{1,9})", name)
    if given is None or given["kind"] not in _TYPES:
        return name
    kind = _TYPES[given["kind"]]
    chip = CHIPS[kind]
    types = {chips * chip.counted: sizes for chips, sizes in _slices(chip).items()}
    if int(given["count"]) not in types:
        counts = "TensorCores, two per chip" if chip.counted == 2 else "chips"
        refuse(
            f"accelerator type {name}",
            expected=f"a number of {counts}, among {', '.join(map(str, types))}",
            got=given["count"],
            remedy="for another shape give the topology, for example "
            f"{kind}:{next(iter(types.values()))}",
        )
    return f"{kind}:{types[int(given['count'])]}"


_MOST_DEVICES = 2**20

GivenTarget = Mesh | AbstractMesh | Topology | str | int
"""A mesh, a topology or its name, or a number of devices."""


class Target(NamedTuple):
    """The devices of a plan.

    Attributes:
      name: what messages and plans call it.
      axes: their mesh.
      memory: bytes per device; None if unknown.
      hosts: the number of hosts; 1 if it is not known.
      topology: None for a mesh, and for a number of devices.
    """

    name: str
    axes: MeshAxes
    memory: int | None = None
    hosts: int = 1
    topology: Topology | None = None

    def larger(self, batch: int) -> list[Target]:
        """Return targets with more devices of as much memory, whose number divides the batch.

        For a topology, these are the larger slices of its chip. Otherwise the number of devices is
        doubled again and again; a mesh of several axes could grow along any, so there are none.

        Args:
          batch: B, the size of the global batch.
        """
        if self.topology is not None:
            some = [
                read_target(one)
                for one in self.topology.larger()
                if batch % one.devices == 0
            ]
            return [one._replace(memory=self.memory) for one in some]
        names, devices = self.axes.mesh.axis_names, self.axes.mesh.size
        kind, found = getattr(self.axes.device, "device_kind", None), []
        while len(names) == 1 and batch % (2 * devices) == 0:
            devices *= 2
            axes = _abstract_axes(devices, kind, names[0])
            found.append(Target(f"{devices} devices", axes, self.memory))
        return found


def read_target(target: GivenTarget) -> Target:
    """Return what a user gave as a `Target`.

    Raises:
      ValueError: it is not a mesh, a topology or a number of devices.
    """
    if isinstance(target, (Mesh, AbstractMesh)) and target.axis_names:
        kind = getattr(target.abstract_mesh.abstract_device, "device_kind", "device")
        axes = MeshAxes(target, target.axis_names)  # type: ignore[arg-type]
        hosts = len(axes.processes) if isinstance(target, Mesh) else 1
        return Target(f"{target.size} × {kind}", axes, hosts=hosts)
    if isinstance(target, (str, Topology)):
        topology = target if isinstance(target, Topology) else Topology(target)
        axes = _abstract_axes(topology.devices, topology.chip.device_kind)
        return Target(
            topology.name, axes, topology.memory_per_device, topology.hosts, topology
        )
    if not is_int(target) or not 1 <= target <= _MOST_DEVICES:  # type: ignore[operator]
        refuse(
            "target",
            expected=f"a mesh, a topology or a number of devices from 1 to {_MOST_DEVICES}",
            got=repr(target),
            remedy="for example v5p:4x4x4, or 8",
        )
    devices = int(target)  # type: ignore[arg-type]
    return Target(f"{devices} device{'s' * (devices > 1)}", _abstract_axes(devices))


def _abstract_axes(
    devices: int, device_kind: str | None = None, name: str = "devices"
) -> MeshAxes:
    """Return one axis over abstract devices."""
    device = device_kind and AbstractDevice(device_kind, num_cores=None, platform="tpu")
    mesh = AbstractMesh(
        (devices,), (name,), (AxisType.Auto,), abstract_device=device or None
    )
    return MeshAxes(mesh, mesh.axis_names)  # type: ignore[arg-type]

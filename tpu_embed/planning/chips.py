"""TPU chips and topologies: how many devices a slice has, and how much memory each device has.

The figures are constants, so neither a TPU nor libtpu is needed.

Input: a name such as `v5p:4x4x4`. Output: a `Topology`.
"""

from __future__ import annotations

import dataclasses
import math
import re

from tpu_embed._checks import message

__all__ = ["CHIPS", "Chip", "Topology"]

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
    """

    memory: float
    pod: int
    devices: int
    axes: int
    device_kind: str


CHIPS = {
    "v2": Chip(7.48, 256, devices=2, axes=2, device_kind="TPU v2"),
    "v3": Chip(15.48, 1024, devices=2, axes=2, device_kind="TPU v3"),
    "v4": Chip(30.75, 4096, devices=1, axes=3, device_kind="TPU v4"),
    "v5e": Chip(15.75, 256, devices=1, axes=2, device_kind="TPU v5 lite"),
    "v5p": Chip(95.74, 8960, devices=1, axes=3, device_kind="TPU v5"),
    "v6e": Chip(31.25, 256, devices=1, axes=2, device_kind="TPU v6 lite"),
    "tpu7x": Chip(94.75, 9216, devices=2, axes=3, device_kind="TPU7x"),
}
"""Chips by name.

The memory is what libtpu 0.0.42 reports as available when a program needs more. The pod sizes are
from the Cloud TPU documentation, "System architecture". The two cores of a v4 or v5p chip are one
device ("megacore").
"""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice of TPU chips.

    Attributes:
      name: `chip:sizes`.

    Raises:
      ValueError: the name is not of this form, or it has more chips than a pod.

    Example:
      >>> topology = Topology("v5p:4x4x4")
      >>> topology.devices, topology.memory_per_device // 2**30
      (64, 95)
    """

    name: str

    def __post_init__(self) -> None:
        kind, _, sizes = str(self.name).partition(":")
        known = CHIPS.get(kind)
        if known is None or not re.fullmatch(r"[1-9][0-9]{0,8}(x[1-9][0-9]{0,8})*", sizes):
            got, remedy = repr(self.name), "for example v5p:4x4x4 or v6e:16x16"
            expected = f"a chip among {', '.join(CHIPS)}, a colon, and its sizes from 1"
            raise ValueError(message("topology", expected=expected, got=got, remedy=remedy))
        if len(self.shape) != known.axes:
            expected = f"{known.axes} sizes for {kind}"
            remedy = f"for example {kind}:" + "x".join("2" for _ in range(known.axes))
            raise ValueError(message("topology", expected=expected, got=self.name, remedy=remedy))
        if math.prod(self.shape) > known.pod:
            expected = f"at most {known.pod:,} chips, a pod of {kind}"
            remedy = "for several slices give the number of their devices"
            raise ValueError(message("topology", expected=expected, got=self.name, remedy=remedy))

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
    def memory_per_device(self) -> int:
        """Bytes of HBM per JAX device."""
        return int(self.chip.memory * GIB)

"""TPU chips and topologies: how many devices a slice has, and the memory and speed of each device.

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
      bandwidth: GB (10⁹ bytes) per second between a JAX device and its HBM.
      clock: GHz of a TensorCore; None where libtpu's profile of a step is not whole.
    """

    memory: float
    pod: int
    devices: int
    axes: int
    device_kind: str
    bandwidth: float
    clock: float | None = None


CHIPS = {
    "v2": Chip(7.48, 256, devices=2, axes=2, device_kind="TPU v2", bandwidth=700 / 2),
    "v3": Chip(15.48, 1024, devices=2, axes=2, device_kind="TPU v3", bandwidth=900 / 2),
    "v4": Chip(30.75, 4096, devices=1, axes=3, device_kind="TPU v4", bandwidth=1228),
    "v5e": Chip(15.75, 256, devices=1, axes=2, device_kind="TPU v5 lite", bandwidth=819),
    "v5p": Chip(95.74, 8960, devices=1, axes=3, device_kind="TPU v5", bandwidth=2765, clock=1.75),
    "v6e": Chip(
        31.25, 256, devices=1, axes=2, device_kind="TPU v6 lite", bandwidth=1638, clock=1.75
    ),
    "tpu7x": Chip(94.75, 9216, devices=2, axes=3, device_kind="TPU7x", bandwidth=7380 / 2),
}
"""Chips by name.

The memory is what libtpu 0.0.42 reports as available when a program needs more. The pod sizes are
from the Cloud TPU documentation, "System architecture". The two cores of a v4 or v5p chip are one
device ("megacore").

The bandwidths are those that the Cloud TPU documentation gives for a chip on the page of its
generation (v2's is from Norrie et al., "The Design Process for Google's Training Chips", 2021),
divided by its devices. Google publishes no clocks: 1.75 GHz is assumed.
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

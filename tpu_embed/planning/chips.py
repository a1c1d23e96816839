"""TPU chips and topologies: how many devices, and how much memory each has.

Enters: a name such as `v5p:4x4x4`. Leaves: a `Topology`. Called by `plan.py` and the command line;
needs neither a TPU nor libtpu.
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
      memory: bytes of HBM of a chip.
      devices: JAX devices a chip, as ahead-of-time compilation counts them.
      axes: sizes that a topology's name has.
      sparse_cores: of a chip.
      device_kind: its devices' name in JAX.
    """

    memory: int
    devices: int
    axes: int
    sparse_cores: int
    device_kind: str


CHIPS = {
    "v2": Chip(16 * GIB, devices=2, axes=2, sparse_cores=0, device_kind="TPU v2"),
    "v3": Chip(32 * GIB, devices=2, axes=2, sparse_cores=0, device_kind="TPU v3"),
    "v4": Chip(32 * GIB, devices=2, axes=3, sparse_cores=4, device_kind="TPU v4"),
    "v5e": Chip(16 * GIB, devices=1, axes=2, sparse_cores=0, device_kind="TPU v5 lite"),
    "v5p": Chip(95 * GIB, devices=1, axes=3, sparse_cores=4, device_kind="TPU v5"),
    "v6e": Chip(32 * GIB, devices=1, axes=2, sparse_cores=2, device_kind="TPU v6 lite"),
    "tpu7x": Chip(192 * GIB, devices=2, axes=3, sparse_cores=4, device_kind="TPU7x"),
}
"""By name. Memory and SparseCores: Cloud TPU documentation, "System architecture"; devices: what
libtpu 0.0.42 describes for a topology."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice of TPU chips.

    Attributes:
      name: `chip:sizes`.

    Raises:
      ValueError: another name.

    Example:
      >>> topology = Topology("v5p:4x4x4")
      >>> topology.devices, topology.memory_per_device // 2**30
      (64, 95)
    """

    name: str

    def __post_init__(self) -> None:
        kind, _, sizes = str(self.name).partition(":")
        known = CHIPS.get(kind)
        if known is None or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes):
            got, remedy = repr(self.name), "for example v5p:4x4x4 or v6e:16x16"
            expected = f"a chip among {', '.join(CHIPS)}, a colon, and its sizes"
            raise ValueError(message("topology", expected=expected, got=got, remedy=remedy))
        if len(self.shape) != known.axes:
            expected = f"{known.axes} sizes for {kind}"
            remedy = f"for example {kind}:" + "x".join("2" for _ in range(known.axes))
            raise ValueError(message("topology", expected=expected, got=self.name, remedy=remedy))

    @property
    def chip(self) -> Chip:
        """What its chips are."""
        return CHIPS[self.name.partition(":")[0]]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes in chips."""
        return tuple(int(size) for size in self.name.partition(":")[2].split("x"))

    @property
    def devices(self) -> int:
        """JAX devices in all."""
        return math.prod(self.shape) * self.chip.devices

    @property
    def memory_per_device(self) -> int:
        """Bytes of HBM of one JAX device."""
        return self.chip.memory // self.chip.devices

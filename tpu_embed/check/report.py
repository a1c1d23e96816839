"""Run the parts of the check one after the other, and report each as it ends.

Input: the devices, and which parts to run. Output: a `PartReport` for each.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tpu_embed.check import engines, kernels, limits, speed
from tpu_embed.check.findings import Fault, Findings

PARTS: dict[str, Callable[[Sequence[Any], Findings], str]] = {
    "kernels": kernels.check_kernels,
    "inputs": engines.check_inputs,
    "placements": engines.check_placements,
    "mesh": engines.check_mesh,
    "traced": engines.check_traced_ids,
    "rules": engines.check_rules,
    "bits": engines.check_bits,
    "limits": limits.check_limits,
    "speed": speed.check_speed,
}
"""The parts by name, in the order in which they run: the kernels first, because their faults are
likely to cause the others."""

_SHOWN = 8
"""Faults of a part that are shown as text."""


@dataclasses.dataclass(frozen=True)
class PartReport:
    """What one part found.

    Attributes:
      name: the name of the part.
      seconds: how long it ran.
      what: what was compared or measured, as text; "" if the part did not come to its end.
      faults: what is wrong.
      figures: what was measured, by name.
    """

    name: str
    seconds: float
    what: str
    faults: list[Fault]
    figures: dict[str, float]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def explain(self, *, verbose: bool = False) -> str:
        """Return the part as text: a line for the part, and three lines for each fault.

        Args:
          verbose: whether the traceback of an exception is shown.
        """
        state = "ok" if self.ok else "FAILED"
        lines = [f"{self.name:12}{state:8}{self.seconds:6.1f} s  {self.what}".rstrip()]
        for fault in self.faults[:_SHOWN]:
            lines += [f"  {fault.where}", f"    expected {fault.expected}", f"    got {fault.got}"]
            lines += [fault.trace] if verbose and fault.trace else []
        if len(self.faults) > _SHOWN:
            lines.append(f"  and {len(self.faults) - _SHOWN} more")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the part as an object that JSON can hold."""
        faults = [fault._asdict() for fault in self.faults]
        return dataclasses.asdict(self) | {"ok": self.ok, "faults": faults}


def run_parts(names: Sequence[str], devices: Sequence[Any]) -> Iterator[PartReport]:
    """Run parts of the check, and yield the report of each as soon as it has ended.

    An exception in a part is a fault of that part.

    Args:
      names: keys of `PARTS`.
      devices: the devices, all of this process.
    """
    for name in names:
        findings, what, start = Findings(), "", time.perf_counter()
        with findings.during(f"part {name!r}"):
            what = PARTS[name](devices, findings)
        seconds = time.perf_counter() - start
        yield PartReport(name, seconds, what, findings.faults, findings.figures)

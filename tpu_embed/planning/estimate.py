"""Estimate how long a compiled step takes on a TPU that is not there.

A step takes at least as long as its slowest part alone: the memory, which moves the step's bytes at
the bandwidth of the chip, or the TensorCore, which runs the cycles that libtpu's profile has. The
estimate is the longest of these bounds. It is not a measurement: waits for other devices and
for the latency of the memory are in none of the bounds.

Input: a `Compiled`, and its `Profile` if there is one. Output: an `Estimate`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tpu_embed.planning.targets import Topology
from tpu_embed.planning.compiled import Compiled
from tpu_embed.planning.profile import Profile
from tpu_embed.planning.costs import readable


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Lower bounds of the time of a step on each device. Nothing has run.

    The SparseCores have no bound: their programs do not say how often a loop runs, nor how long it
    waits for rows. The bytes that they move are in that of the memory.

    Attributes:
      moved: bytes that the compiled step moves in memory.
      bandwidth: bytes per second between the device and its memory.
      cycles: of the TensorCore, by libtpu's profile; None if they are not known.
      clock: cycles per second; None if it is not known.
      missing: operations whose cycles the profile does not have.

    Example:
      >>> found = Estimate(moved=2_765_000, bandwidth=2.765e12, cycles=3_500, clock=1.75e9)
      >>> found.bounds, found.seconds
      ({'memory': 1e-06, 'TensorCore': 2e-06}, 2e-06)
    """

    moved: int
    bandwidth: float
    cycles: int | None = None
    clock: float | None = None
    missing: int = 0

    @property
    def bounds(self) -> dict[str, float]:
        """Seconds that the memory and the TensorCore take, as far as they are known."""
        bounds = {"memory": self.moved / self.bandwidth}
        if self.cycles is not None and self.clock is not None:
            bounds["TensorCore"] = self.cycles / self.clock
        return bounds

    @property
    def seconds(self) -> float:
        """The estimate, which is the longest bound."""
        return max(self.bounds.values())

    def figures(self) -> dict[str, Any]:
        """Return the attributes, the bounds and the estimate, for JSON."""
        return dataclasses.asdict(self) | {"bounds": self.bounds, "seconds": self.seconds}

    def explain(self) -> str:
        """Return the bounds as text to print."""
        bounds = self.bounds
        longest = max(bounds, key=lambda name: bounds[name])
        memory = f"{readable(self.moved)} moved at {self.bandwidth / 1e9:,g} GB/s"
        core = "not known: the profile was left out, or on this chip libtpu writes no whole one"
        if self.cycles is not None and self.clock is not None:
            lost = f"; {self.missing} operation(s) not counted" if self.missing else ""
            by = f"{self.cycles:,} cycles by libtpu's profile at {self.clock / 1e9:g} GHz{lost}"
            core = f"{_milliseconds(bounds['TensorCore'])}   {by}"
        return "\n".join(
            [
                f"estimated time of a step: at least {self.seconds * 1e3:.3f} ms, the bound by the "
                f"{longest}; nothing was measured",
                f"  memory      {_milliseconds(bounds['memory'])}   {memory}",
                f"  TensorCore  {core}",
                "  SparseCores not known: their programs do not say how often a loop runs",
            ]
        )


def estimate(compiled: Compiled, profile: Profile | None = None) -> Estimate:
    """Return the bounds of a compiled step.

    Args:
      compiled: the step, from `compile_for`.
      profile: its profile, from `profile_step`; None leaves the cycles of the TensorCore out.

    Returns:
      The bounds; without that of the TensorCore also where the clock of the chip is None.
    """
    chip = Topology(compiled.plan.target).chip
    moved, bandwidth = sum(compiled.moved.values()), chip.bandwidth * 1e9
    if profile is None or chip.clock is None:
        return Estimate(moved, bandwidth)
    return Estimate(moved, bandwidth, profile.cycles, chip.clock * 1e9, profile.missing)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms".rjust(12)

"""The parts of the check, and the loop that runs them one after the other.

Input: the devices, and which parts to run. Output: a `PartReport` for each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tpu_embed.check import kernels, speed, trainings
from tpu_embed.check.report import PartReport

PARTS: dict[str, Callable[[list[Any], PartReport], str]] = {
    "kernels": kernels.check_kernels,
    "inputs": trainings.check_inputs,
    "placements": trainings.check_placements,
    "mesh": trainings.check_mesh,
    "traced": trainings.check_traced_ids,
    "rules": trainings.check_rules,
    "bits": trainings.check_bits,
    "speed": speed.check_speed,
}
"""The parts by name, in the order in which they run: the kernels first, because their faults are
likely to cause the others."""


def run_parts(names: Sequence[str], devices: list[Any]) -> Iterator[PartReport]:
    """Run parts of the check, and yield the report of each as soon as it has ended.

    An exception in a part is a fault of that part.

    Args:
      names: keys of `PARTS`.
      devices: the devices, all of this process.
    """
    for name in names:
        report, start = PartReport(name), time.perf_counter()
        with report.during(f"part {name!r}"):
            report.what = PARTS[name](devices, report)
        report.seconds = time.perf_counter() - start
        yield report

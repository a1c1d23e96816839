"""Shared by the benchmarks: a line about the machine, and timing of cases in turns."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

DLRM_ROWS = [
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63),
    *(40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938, 155, 4, 976, 14),
    *(40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
]
"""Rows of the 26 tables of MLPerf's DLRM-DCNv2 (MLPerf training, recommendation_v2)."""

DLRM_HOTS = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]
"""Ids per sample in each of them; 214 in all."""


def emulate(devices: int) -> None:
    """Ask for emulated CPU devices; call this before JAX is imported."""
    assert "jax" not in sys.modules, "emulate before importing jax"
    flag = f"--xla_force_host_platform_device_count={devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"


def machine() -> str:
    """Return one line about processor, cores and versions."""
    import jax
    import numpy as np

    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    cpu = names[0] if names else platform.processor()
    versions = f"Python {platform.python_version()}, JAX {jax.__version__}, NumPy {np.__version__}"
    return f"{cpu}, {os.cpu_count()} cores; {versions}; {jax.device_count()} device(s)"


def interleaved(cases: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each case: one call per round, after a warm-up round."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for one_round in range(rounds + 1):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            if one_round:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(spent) for name, spent in times.items()}

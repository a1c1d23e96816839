"""The part of the check that times the devices: a training step beside a copy.

The workload is MLPerf's DLRM-DCNv2 without its network: 26 tables, 214 ids per sample, D = 128,
Adagrad. The tables have fewer rows, as many as a part of the memory holds. The copy, `x + 1` of a
large array, shows what the memory of the device can do at best.

Input: the devices. Output: figures, and lines that show them.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_embed import optimizers
from tpu_embed.check.findings import Findings
from tpu_embed.config import FeatureConfig, TableConfig
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.state import TableState
from tpu_embed.planning import CHIPS, costs

_ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956),
    *(405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152),
    *(12_973, 108, 36),
)
_HOTS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
_DIM = 128
_BATCH = 4096
"""Samples per chip, as in the public figure of jax-tpu-embedding."""
_CPU_BATCH = 512
"""Samples in all on CPUs, which are slower and may be emulated."""
_PUBLIC = 62_000
"""Samples per second and chip that jax-tpu-embedding reached with this batch and smaller tables on
16 chips of TPU v7x (torchrec #4597)."""

_PART_OF_MEMORY = 4
_CPU_BYTES = 2**28
_ROUNDS, _SECONDS = 20, 2.0


class Figures(NamedTuple):
    """What was measured.

    Attributes:
      devices: the number of devices.
      chips: the number of chips, which may have two devices each.
      samples: the samples of a batch.
      table_rows: the rows of the largest table.
      copy_gb_per_second: what a copy reads and writes on each device, in 10⁹ bytes.
      lookup_seconds: the time of a lookup.
      lookup_gb_per_second: the bytes that a lookup must move on each device.
      step_seconds: the time of a training step: lookup and update.
      step_gb_per_second: the bytes that a step must move on each device.
      place_seconds: the time to place a batch on the host, which overlaps with steps in training.
      samples_per_second_and_chip: what the step alone allows.
    """

    devices: int
    chips: float
    samples: int
    table_rows: int
    copy_gb_per_second: float
    lookup_seconds: float
    lookup_gb_per_second: float
    step_seconds: float
    step_gb_per_second: float
    place_seconds: float
    samples_per_second_and_chip: float

    def lines(self, kind: str) -> list[str]:
        """Return the figures as text.

        Args:
          kind: the `device_kind`; a TPU is compared with a public figure.
        """
        copy = self.copy_gb_per_second
        per_device = self.samples / self.devices

        def row(name: str, seconds: float, speed: float) -> str:
            rate = f"{per_device / seconds:12,.0f} samples/s and {speed:,.1f} GB/s a device"
            return f"{name:8}{seconds * 1e3:9.2f} ms{rate}, {speed / copy:.2f} of the copy"

        found = [
            f"26 tables of at most {self.table_rows:,} rows x {_DIM}, Adagrad; "
            f"{self.samples:,} samples of 214 uniform ids",
            f"{'copy':8}{copy:,.1f} GB/s a device, read and written",
            row("lookup", self.lookup_seconds, self.lookup_gb_per_second),
            row("step", self.step_seconds, self.step_gb_per_second),
            f"{'place':8}{self.place_seconds * 1e3:9.2f} ms on the host",
        ]
        if kind.startswith("TPU"):
            found.append(
                f"{self.samples_per_second_and_chip:,.0f} samples/s a chip; jax-tpu-embedding's "
                f"public figure is {_PUBLIC:,} on 16 chips of v7x, with smaller tables"
            )
        return found


def check_speed(devices: Sequence[Any], findings: Findings) -> str:
    """Measure, and return the figures as lines."""
    figures = measure(devices)
    findings.figures = figures._asdict()
    return "\n  ".join(figures.lines(devices[0].device_kind))


def measure(devices: Sequence[Any]) -> Figures:
    """Time a copy, a lookup, a training step and the placing of a batch."""
    mesh = Mesh(np.asarray(devices), ("devices",))
    budget = _budget(devices)
    copied = _time_copy(mesh, budget)
    chips = len(devices) / _devices_per_chip(devices[0])
    samples = _samples(devices, chips)
    engine, most = _engine(mesh, budget)
    rng = np.random.default_rng(0)
    ids = [
        rng.integers(0, min(rows, most), (samples, hot)).astype(np.int32)
        for rows, hot in zip(_ROWS, _HOTS, strict=True)
    ]
    placing = _median(lambda: engine.place(ids).packed)
    batch = engine.place(ids)
    look, step = _time_programs(engine, batch)
    moved = costs.moved(engine.layout, batch.spec)
    return Figures(
        devices=len(devices),
        chips=chips,
        samples=samples,
        table_rows=min(max(_ROWS), most),
        copy_gb_per_second=copied,
        lookup_seconds=look,
        lookup_gb_per_second=moved["lookup"] / look / 1e9,
        step_seconds=step,
        step_gb_per_second=sum(moved.values()) / step / 1e9,
        place_seconds=placing,
        samples_per_second_and_chip=samples / step / chips,
    )


def _budget(devices: Sequence[Any]) -> int:
    """Return the bytes of tables and slots, on all devices."""
    stats = devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] // _PART_OF_MEMORY * len(devices)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(_CPU_BYTES, memory // (8 * _PART_OF_MEMORY))


def _devices_per_chip(device: Any) -> int:
    counts = {chip.device_kind: chip.devices for chip in CHIPS.values()}
    return counts.get(device.device_kind, 1)


def _samples(devices: Sequence[Any], chips: float) -> int:
    """Return the samples of a batch, which the devices divide."""
    count = len(devices)
    if devices[0].platform == "cpu":
        return max(1, _CPU_BATCH // count) * count
    return round(_BATCH * chips) // count * count


def _engine(mesh: Mesh, budget: int) -> tuple[EmbeddingEngine, int]:
    """Return an engine whose tables and slots have at most so many bytes, and the rows allowed."""
    most = max(_ROWS)
    while sum(min(rows, most) for rows in _ROWS) * _DIM * 4 * 2 > budget:
        most //= 2
    features = [
        FeatureConfig(TableConfig(min(rows, most), _DIM, combiner="sum", name=f"t{i}"))
        for i, rows in enumerate(_ROWS)
    ]
    return EmbeddingEngine(features, optimizers.Adagrad(0.01), mesh=mesh), most


def _time_programs(engine: EmbeddingEngine, batch: Any) -> tuple[float, float]:
    """Return the seconds of a lookup, and of a lookup with an update."""
    look = jax.jit(engine.lookup)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TableState, batch: Any) -> TableState:
        activations = engine.lookup(state, batch)
        # What a loss of half the sum of squares would give.
        return engine.update(state, batch, activations)

    held = [engine.init(jax.random.key(0))]
    looking = _median(lambda: look(held[0], batch))

    def run() -> Any:
        held[0] = step(held[0], batch)
        return held[0].step

    return looking, _median(run)


def _time_copy(mesh: Mesh, budget: int) -> float:
    """Return the 10⁹ bytes per second that each device reads and writes while it copies."""
    size = max(1, budget // mesh.size // 8) * mesh.size
    sharding = NamedSharding(mesh, PartitionSpec("devices"))
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    held = [jax.jit(lambda: jnp.zeros((size,), jnp.float32), out_shardings=sharding)()]

    def run() -> Any:
        held[0] = add(held[0])
        return held[0]

    return 2 * 4 * size / mesh.size / _median(run) / 1e9


def _median(call: Callable[[], Any]) -> float:
    """Return the median time of a call that returns arrays, in seconds, after two that warm up."""
    for _ in range(2):
        jax.block_until_ready(call())
    times: list[float] = []
    while len(times) < 3 or (len(times) < _ROUNDS and sum(times) < _SECONDS):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)

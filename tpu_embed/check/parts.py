"""The parts of the check, the loop that runs them one after the other, and the part that times.

The speed is that of a training step beside a copy. The workload is MLPerf's DLRM-DCNv2 without its
network: 26 tables, 214 ids per sample, D = 128, Adagrad. The tables have fewer rows, as many as a
part of the memory holds. The copy, `x + 1` of a large array, shows what the memory of the device
can do at best.

Input: the devices, and which parts to run. Output: a `PartReport` for each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_embed import optimizers
from tpu_embed.check import kernels, trainings
from tpu_embed.check.report import PartReport
from tpu_embed.config import FeatureConfig, TableConfig
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.planning import CHIPS, costs

_TABLES = """
    40000000x3 39060x2 17295x1 7424x2 20265x6 3x1 7122x1 1543x1 63x1 40000000x7 3067956x3
    405282x8 10x1 2209x6 11938x9 155x5 4x1 976x1 14x1 40000000x12 40000000x100 40000000x27
    590152x10 12973x3 108x1 36x1
"""
"""Rows of each table, and its ids per sample."""
_DIM = 128
_BATCH, _CPU_BATCH = 4096, 512
"""Samples per chip, as in the public figure of jax-tpu-embedding; and in all on CPUs, which are
slower and may be emulated."""
_PUBLIC = 62_000
"""Samples per second and chip that jax-tpu-embedding reached with this batch and smaller tables on
16 chips of TPU v7x (torchrec #4597)."""

_PART_OF_MEMORY, _CPU_BYTES = 4, 2**28
_ROUNDS, _SECONDS = 20, 2.0


def check_speed(devices: list[Any], report: PartReport) -> str:
    """Time a copy, a lookup, a training step and the placing of a batch; return lines.

    The figures are the devices and chips (which may have two devices each), the samples of a batch,
    the rows of the largest table, the seconds of each call, and the 10⁹ bytes per second and device
    that it must move at the least. Placing overlaps with steps in training.
    """
    mesh, count = Mesh(np.asarray(devices), ("devices",)), len(devices)
    of_chips = {chip.device_kind: chip.devices for chip in CHIPS.values()}
    chips = count / of_chips.get(devices[0].device_kind, 1)
    samples = round(_BATCH * chips) // count * count
    if devices[0].platform == "cpu":
        samples = max(1, _CPU_BATCH // count) * count
    # The bytes of tables and slots on all devices; a CPU's are few, so that it is tried quickly.
    memory = (devices[0].memory_stats() or {}).get("bytes_limit")
    budget = memory // _PART_OF_MEMORY * count if memory else _CPU_BYTES
    numbers = budget // count // 8
    sharding = NamedSharding(mesh, PartitionSpec("devices"))
    zeros = jnp.zeros(count * numbers, jnp.float32, device=sharding)
    copy = 8 * numbers / _median(jax.jit(lambda x: x + 1, donate_argnums=0), zeros) / 1e9
    sizes, hots = np.array([one.split("x") for one in _TABLES.split()], int).T
    while sizes.sum() * _DIM * 4 * 2 > budget:  # half the largest ones, again and again
        sizes = np.minimum(sizes, sizes.max() // 2)
    largest, rng = int(sizes.max()), np.random.default_rng(0)
    ids = [
        rng.integers(0, rows, (samples, hot), np.int32)
        for rows, hot in zip(sizes, hots, strict=True)
    ]
    features = [FeatureConfig(TableConfig(int(rows), _DIM, combiner="sum")) for rows in sizes]
    engine = EmbeddingEngine(features, optimizers.Adagrad(0.01), mesh=mesh)
    batch, state, look = engine.place(ids), engine.init(jax.random.key(0)), jax.jit(engine.lookup)
    # The gradients that a loss of half the sum of squares would give.
    train = jax.jit(
        lambda state, batch: engine.update(state, batch, engine.lookup(state, batch)),
        donate_argnums=0,
    )
    place = _median(lambda _: engine.place(ids).packed)
    lookup = _median(lambda _: look(state, batch))
    step = _median(lambda state: train(state, batch), state)
    per_chip, moved = samples / step / chips, costs.moved(engine.layout, batch.spec)
    figures = report.figures = {
        "devices": count,
        "chips": chips,
        "samples": samples,
        "table_rows": largest,
        "copy_gb_per_second": copy,
        "lookup_seconds": lookup,
        "lookup_gb_per_second": moved["lookup"] / lookup / 1e9,
        "step_seconds": step,
        "step_gb_per_second": sum(moved.values()) / step / 1e9,
        "place_seconds": place,
        "samples_per_second_and_chip": per_chip,
    }
    lines = [
        f"26 tables of at most {largest:,} rows x {_DIM}, Adagrad; "
        f"{samples:,} samples of 214 uniform ids",
        f"{'copy':8}{copy:,.1f} GB/s a device, read and written",
    ]
    for name in ("lookup", "step"):
        seconds, speed = figures[f"{name}_seconds"], figures[f"{name}_gb_per_second"]
        rate = f"{samples / count / seconds:12,.0f} samples/s and {speed:,.1f} GB/s a device"
        lines.append(f"{name:8}{seconds * 1e3:9.2f} ms{rate}, {speed / copy:.2f} of the copy")
    lines.append(f"{'place':8}{place * 1e3:9.2f} ms on the host")
    if devices[0].device_kind.startswith("TPU"):
        lines.append(
            f"{per_chip:,.0f} samples/s a chip; jax-tpu-embedding's public figure "
            f"is {_PUBLIC:,} on 16 chips of v7x, with smaller tables"
        )
    return "\n  ".join(lines)


def _median(call, held=None):
    """Return the median time of `held = call(held)` in seconds, after two that warm up."""
    times = []
    while len(times) < 5 or (len(times) < _ROUNDS and sum(times[2:]) < _SECONDS):
        start = time.perf_counter()
        held = jax.block_until_ready(call(held))
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


PARTS: dict[str, Callable[[list[Any], PartReport], str]] = {
    "kernels": kernels.check_kernels,
    "inputs": trainings.check_inputs,
    "placements": trainings.check_placements,
    "mesh": trainings.check_mesh,
    "traced": trainings.check_traced_ids,
    "rules": trainings.check_rules,
    "bits": trainings.check_bits,
    "speed": check_speed,
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

"""Compile a step of MLPerf's DLRMv4 for TPUs, network included, and say what bounds it.

Nothing runs: libtpu compiles for chips that are not there. Beside the compiler's memory and the
bytes that it moves stand the times that they take at the chip's peak, and the time of the
reference: 12,300 samples a second on 8 MI350X, 0.65 ms of a device for a sample (163,840 samples
take 13.3 s in mlcommons/training, recommendation/rcp_logs/gbs_8192/seed1023733178.log).

What the network needs is counted in `dlrm_v4_costs.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import NamedTuple

import dlrm_v4
import jax
import numpy as np
from dlrm_v4_costs import memory, operations

from tpu_embed import Jagged
from tpu_embed.planning import Topology
from tpu_embed.planning.compiled import Compiled, compile_for
from tpu_embed.planning.costs import readable

REFERENCE = 8 * 13.3 / 163_840  # seconds of a device for a sample


class Peak(NamedTuple):
    """Peaks of a JAX device, from the pages of the Cloud TPU documentation on its generation.

    That of its memory is in `planning.CHIPS`.
    """

    flops: float  # bfloat16, a second
    links: float  # bytes a second that it can send to other chips


PEAKS = {
    "v5p": Peak(459e12, 300e9),
    "v6e": Peak(918e12, 224e9),
    "tpu7x": Peak(2_307e12 / 2, 600e9 / 2),
}
"""By the name of the generation. The links are half of the bandwidth of both directions; a chip of
tpu7x is two devices, which share its figures."""


def lower(config, engine, state, batch) -> jax.stages.Lowered:
    """Lower the training step for shapes alone."""
    (graph, network), dense = dlrm_v4.new_network(config), dlrm_v4.network_optimizer(config)
    everywhere = jax.NamedSharding(engine.layout.axes.mesh, jax.P())
    params, opt_state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere),
        (network, jax.eval_shape(dense.init, network)),
    )
    of_replicas = engine.layout.axes.sharding(engine.layout.axes.batch_axes)
    names = [feature.path for feature in engine.layout.features]
    shapes, sizes, replicas = batch.spec.feature_shapes, batch.spec.local_sizes, batch.spec.replicas

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct((replicas, *shape), dtype, sharding=of_replicas)

    def jagged(name, dtype):
        f = names.index(name)
        return Jagged(array(dtype, shapes[f].capacity), array(np.int32, sizes[f] + 1))

    known = {
        "actions": jagged(f"{config.histories[0]}_history", np.int32),
        "times": jagged(f"{config.histories[0]}_history", np.int32),
        "labels": jagged(config.histories[0], np.float32),
        "asked": array(np.int32, sizes[names.index(config.contexts[0])]),
    }
    step = dlrm_v4.make_step(config, engine, dense, graph)
    return step.lower((state, params, opt_state), batch, known)


def report(config, compiled: Compiled, topology: Topology) -> list[str]:
    """Return the figures of the step as lines."""
    peak = PEAKS[topology.name.partition(":")[0]]
    devices, plan = compiled.plan.devices, compiled.plan
    samples = config.batch_size / devices
    tables = sum(n for name, n in plan.passing.items() if name != "ids")
    room = max(shape.capacity or 0 for shape in plan.spec.feature_shapes)
    network = sum(memory(config, room, round(samples)).values())
    flops = {name: n * samples for name, n in operations(config).items()}
    times = {f"network: {name}": n / peak.flops for name, n in flops.items()}
    times["tables: memory"] = sum(plan.moved.values()) / (1e9 * topology.chip.bandwidth)
    times["tables: exchange"] = sum(plan.sent.values()) / peak.links
    lines = [
        f"{devices} devices; compiled in {compiled.seconds:.0f} s",
        f"arguments on each    {readable(compiled.arguments):>9}",
        f"temporaries on each  {readable(compiled.temporaries):>9}, planned "
        f"{readable(tables + network)}: {readable(tables)} for tables, {readable(network)} for the "
        "network",
        f"{sum(operations(config).values()) / 1e9:.0f} GFLOP a sample, {samples:.0f} samples a "
        "device",
    ]
    for name, seconds in sorted(times.items(), key=lambda one: -one[1]):
        lines.append(f"  {name:28} {1e3 * seconds:8.1f} ms at the peak")
    total = 1e6 * sum(times.values()) / samples
    lines.append(f"  one after the other {total:.0f} µs of a device for a sample, at the peak")
    return [*lines, f"  the reference takes {1e6 * REFERENCE:.0f} µs on its chip, measured"]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--topology", default="tpu7x:4x4x4")
    options.add_argument("--batch-size", type=int, default=8_192)
    args = options.parse_args()
    topology = Topology(args.topology)
    if topology.name.partition(":")[0] not in PEAKS:
        options.error(f"--topology: expected one of {', '.join(PEAKS)}, got {topology.name}")
    config = dataclasses.replace(dlrm_v4.WORKLOAD["CONFIG"], batch_size=args.batch_size)
    features, optimizer, batch = dlrm_v4.WORKLOAD["workload"](config)
    lowering = functools.partial(lower, config)
    compiled = compile_for(topology, features, optimizer, batch, lower=lowering)
    print("\n".join(report(config, compiled, topology)))


if __name__ == "__main__":
    main()

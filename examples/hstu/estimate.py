"""Compile a step of MLPerf's DLRMv4 for TPUs, network included, and say what bounds it.

Nothing runs: libtpu compiles for chips that are not there. Beside the compiler's memory and the
bytes that it moves stand the times that they take at the chip's peak, and the time of the
reference: 12,300 samples a second on 8 MI350X, 0.65 ms of a device for a sample (163,840 samples
take 13.3 s in mlcommons/training, recommendation/rcp_logs/gbs_8192/seed1023733178.log).

The operations of the network are counted as the reference counts them (its README, "Computation
cost analysis"): 2 per multiplication and addition, 3 times for forward and backward of a product
with weights, 3.5 times for attention, half of the pairs of events as attention is causal.
"""

from __future__ import annotations

import argparse
import functools
from typing import NamedTuple

import jax
import numpy as np
import dlrm_v4

from tpu_embed import Jagged
from tpu_embed.planning.compiled import Compiled, compile_for
from tpu_embed.planning.sizes import readable

REFERENCE = 8 * 13.3 / 163_840  # seconds of a device for a sample


class Chip(NamedTuple):
    """Peaks of a JAX device, from the pages of the Cloud TPU documentation on its generation."""

    flops: float  # bfloat16, a second
    memory: float  # bytes a second
    links: float  # bytes a second that it can send to other chips


CHIPS = {
    "v5p": Chip(459e12, 2_765e9, 300e9),
    "v6e": Chip(918e12, 1_638e9, 224e9),
    "tpu7x": Chip(2_307e12 / 2, 7_380e9 / 2, 600e9 / 2),
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


def operations(config) -> dict[str, float]:
    """Return the operations for a sample, forward and backward, by part of the network."""
    events = config.events + len(config.contexts) + 1
    per_head = 2 * config.key_dim + 2 * config.value_dim
    gates = config.heads * config.value_dim
    pairs = events**2 / 2 * config.heads * (config.key_dim + config.value_dim)
    inner = events * config.width * config.heads * per_head
    outer = events * (2 * gates + config.width) * config.width
    tables = len(config.histories) * config.dim
    of_event = tables * config.hidden_size + config.hidden_size * config.width
    return {
        "attention": config.layers * 3.5 * 2 * pairs,
        "projections": config.layers * 3 * 2 * (inner + outer),
        "vectors of events": 3 * 2 * (config.events + 1) * of_event,
    }


def memory(config, events: int, requests: int) -> dict[str, float]:
    """Return bytes that the network needs on a device beside its tables' activations.

    A layer is computed again in the backward pass, so of each only its input is kept.

    Args:
      config: the numbers of the workload.
      events: the room for events of histories on a device.
      requests: how many it has.
    """
    places = events + requests * (len(config.contexts) + 1)
    projected = config.heads * (2 * config.key_dim + 2 * config.value_dim)
    gates = config.heads * config.value_dim
    half, whole = np.dtype(jax.numpy.dtype(config.dtype)).itemsize, 4
    # Products of matrices are in the smaller dtype, sums of attention in float32.
    once = places * (2 * projected * half + (2 * gates + config.width) * half)
    sums = places * config.heads * (2 * config.key_dim + 2 * config.value_dim) * whole
    return {
        "vectors of events, side by side": 2 * events * len(config.histories) * config.dim * whole,
        "inputs of layers": (config.layers + 2) * places * config.width * whole,
        "a layer, forward and backward": 2 * once + sums,
    }


def report(config, compiled: Compiled, chip: Chip) -> list[str]:
    """Return the figures of the step as lines."""
    devices = compiled.plan.devices
    samples = config.batch_size / devices
    flops = {name: n * samples for name, n in operations(config).items()}
    times = {f"network: {name}": n / chip.flops for name, n in flops.items()}
    times["tables: memory"] = sum(compiled.plan.moved.values()) / chip.memory
    times["tables: exchange"] = sum(compiled.plan.sent.values()) / chip.links
    lines = [
        f"{readable(compiled.arguments)} of arguments and {readable(compiled.temporaries)} of "
        f"temporaries on each of {devices} devices, compiled in {compiled.seconds:.0f} s",
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
    config = dlrm_v4.WORKLOAD["CONFIG"]
    features, optimizer, batch = dlrm_v4.WORKLOAD["workload"](config)
    lowering = functools.partial(lower, config)
    compiled = compile_for(args.topology, features, optimizer, batch, lower=lowering)
    print("\n".join(report(config, compiled, CHIPS[args.topology.partition(":")[0]])))


if __name__ == "__main__":
    main()

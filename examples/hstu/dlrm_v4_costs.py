"""What the network of DLRMv4 computes, and the memory it needs, by formula.

Operations are counted as the reference counts them (mlcommons/training, recommendation, README,
"Computation cost analysis"): 2 per multiplication and addition, 3 times for forward and backward of
a product with weights, 3.5 times for attention, half of the pairs of events as attention is causal.
"""

from __future__ import annotations

import jax.numpy as jnp


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
    half, whole = jnp.dtype(config.dtype).itemsize, 4
    # Products of matrices are in the smaller dtype, sums of attention in float32.
    once = places * (2 * projected * half + (2 * gates + config.width) * half)
    sums = places * config.heads * (2 * config.key_dim + 2 * config.value_dim) * whole
    return {
        "vectors of events, side by side": 2 * events * len(config.histories) * config.dim * whole,
        "inputs of layers": (config.layers + 2) * places * config.width * whole,
        "a layer, forward and backward": 2 * once + sums,
    }

"""One replica at a time, and the places of its events.

The loops of `jagged_attention` are as long as a device's own histories want. `jax.vmap` would join
them to one loop that waits for the longest; `jax.shard_map` lets every device run its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec


def on_each_replica(engine, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of what all replicas share and of arrays `[S, …]`, for use in a jit.

    Args:
      engine: whose devices hold the replicas.
      function: of the shared tree, and of the part `[…]` of one replica of each other argument.

    Returns:
      a function of the same arguments with all parts, `[S, …]`, which returns results `[S, …]`.
    """
    axes = engine.layout.axes
    split = PartitionSpec(axes.batch_axes)

    def of_device(shared, parts):
        results = function(shared, *jax.tree.map(lambda x: x[0], parts))
        return jax.tree.map(lambda x: x[None], results)

    mapped = jax.shard_map(
        of_device,
        mesh=axes.mesh,
        in_specs=(PartitionSpec(), split),
        out_specs=split,
        check_vma=False,  # the gradient of what is shared is then the sum over the replicas
    )
    return lambda shared, *parts: mapped(shared, parts)


def in_places(rows: Sequence[np.ndarray], batch, feature: int) -> np.ndarray:
    """Return a number per event where a jagged feature has the event, int32 `[S, C]`.

    Args:
      rows: of each of the B examples, one number per event. Missing examples are empty.
      batch: the placed batch.
      feature: which of its features, counted in the order of their names.
    """
    shape = batch.spec.feature_shapes[feature]
    found = np.zeros((batch.spec.replicas, shape.capacity), np.int32)
    examples = shape.batch // len(found)
    for s, place in enumerate(found):
        own = [*rows[s * examples : (s + 1) * examples], np.zeros(0, np.int32)]
        joined = np.concatenate(own)
        place[: len(joined)] = joined
    return found

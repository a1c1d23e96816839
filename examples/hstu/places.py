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

from tpu_embed.data import place_values


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


def in_places(engine, batch, feature: str, rows: Sequence[np.ndarray]) -> jax.Array:
    """Send one number per event to the place of the event's row, int32 `[S, C]`.

    Args:
      engine: which has placed the batch.
      batch: the placed batch.
      feature: a jagged feature.
      rows: the numbers of each example; examples that `pad_batch` has added may be missing.
    """
    paths = [one.path for one in engine.layout.features]
    examples = batch.spec.sizes[paths.index(feature)]
    padded = [*rows, *[np.zeros(0, np.int32)] * (examples - len(rows))]
    splits = np.cumsum([0, *map(len, padded)])
    values = np.concatenate(padded).astype(np.int32)
    return place_values(engine, batch, feature, values, splits).values

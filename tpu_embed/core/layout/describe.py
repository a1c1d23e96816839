"""Describe the resolved configuration as a plain object that users can print, log and compare.

Input: a layout. Output: a dict of dicts, lists, numbers, strings, booleans and None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from tpu_embed.core.layout.layout import Layout
from tpu_embed.core.layout.learning_rates import rate_callables
from tpu_embed.core.layout.stacks import Stack, TableSlice


def describe(layout: Layout) -> dict[str, Any]:
    """Return tables, their stacks and optimizers, and the devices, as plain objects.

    A learning rate is a number, or `{"tag": i}` with the index of a callable in
    `"learning_rates"`. The callables that are read on the host come first, in the order of
    `EmbeddingEngine.learning_rates`.

    Args:
      layout: the engine's layout.
    """
    mesh, callables = layout.axes.mesh, rate_callables(layout)
    return {
        "tables": {
            table.name: _table(layout, stack, table, callables)
            for stack in layout.stacks
            for table in stack.tables
        },
        "learning_rates": [_name(rate) for rate in callables],
        "features": {feature.path: feature.table.name for feature in layout.features},
        "devices": mesh.size,
        "hosts": len({device.process_index for device in mesh.devices.flat}),
        "platform": mesh.devices.flat[0].platform,
        "mesh": {name: int(size) for name, size in mesh.shape.items()},
        "batch_axes": list(layout.axes.batch_axes),
        "sum_blocks": layout.sum_blocks,
        "jax": jax.__version__,
    }


def _table(
    layout: Layout, stack: Stack, table: TableSlice, callables: Sequence[Any]
) -> dict[str, Any]:
    """Return what is known of one table, as plain objects."""
    features = [feature for feature in layout.features if feature.table == table]
    optimizer = stack.optimizer
    rate = None if optimizer is None else optimizer.learning_rate
    return {
        "vocabulary_size": table.vocabulary_size,
        # Every shard has the same number of rows: V = 5 on 2 shards is stored as 6 rows.
        "padded_vocabulary_size": table.rows_per_shard * stack.num_shards,
        "dim": stack.dim,
        "dtype": stack.dtype,
        "placement": stack.placement,
        "shard_axes": list(stack.shard_axes),
        "shards": stack.num_shards,
        "stack": stack.name,
        "offset": table.offset,
        # A sequence counts as L features: it has one activation per position.
        "num_features": sum(max(1, feature.config.max_sequence_length) for feature in features),
        "optimizer": None if optimizer is None else optimizer.describe(),
        "learning_rate": {"tag": callables.index(rate)} if callable(rate) else rate,
    }


def _name(rate: Any) -> str:
    return getattr(rate, "__qualname__", type(rate).__name__)

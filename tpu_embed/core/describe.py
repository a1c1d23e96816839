"""The resolved configuration as a plain object: what users print, log and compare.

Enters: a layout. Leaves: dicts, lists, numbers and strings only. Called by
`EmbeddingEngine.describe`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from tpu_embed.core.layout import Group, Layout, TableSlice
from tpu_embed.core.resolve import rate_callables


def describe(layout: Layout) -> dict[str, Any]:
    """Return tables, their stacks and optimizers, and the devices, as plain objects.

    A learning rate is a number, or `{"tag": i}`, the index of a callable in `"learning_rates"`;
    those read on the host stand first, in the order of `EmbeddingEngine.learning_rates`.

    Args:
      layout: the engine's.
    """
    mesh, callables = layout.axes.mesh, rate_callables(layout)
    return {
        "tables": {
            table.name: _table(layout, group, table, callables)
            for group in layout.groups
            for table in group.tables
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
    layout: Layout, group: Group, table: TableSlice, callables: Sequence[Any]
) -> dict[str, Any]:
    features = [feature for feature in layout.features if feature.table == table]
    optimizer = group.optimizer
    rate = None if optimizer is None else optimizer.learning_rate
    return {
        "vocabulary_size": table.vocabulary_size,
        "padded_vocabulary_size": table.rows_per_shard * group.num_shards,
        "dim": group.dim,
        "dtype": group.dtype,
        "placement": group.placement,
        "shard_axes": list(group.shard_axes),
        "shards": group.num_shards,
        "stack": group.name,
        "offset": table.offset,
        "num_features": sum(max(1, feature.config.max_sequence_length) for feature in features),
        "optimizer": None if optimizer is None else optimizer.describe(),
        "learning_rate": {"tag": callables.index(rate)} if callable(rate) else rate,
    }


def _name(rate: Any) -> str:
    return getattr(rate, "__qualname__", type(rate).__name__)

"""The resolved configuration as a plain object: what users print, log and compare.

Enters: a layout. Leaves: dicts, lists, numbers and strings only. Called by
  `EmbeddingEngine.describe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from tpu_embed.core.layout import Group, Layout, TableSlice


def describe(layout: Layout, rate_tags: Mapping[int, int]) -> dict[str, Any]:
    """Return tables, their stacks and optimizers, and the devices, as plain objects.

    Args:
      layout: the engine's.
      rate_tags: for stacks whose learning rate is a callable read on the host, its index.
    """
    mesh = layout.axes.mesh
    return {
        "tables": {
            table.name: _table(layout, g, group, table, rate_tags)
            for g, group in enumerate(layout.groups)
            for table in group.tables
        },
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
    layout: Layout, g: int, group: Group, table: TableSlice, rate_tags: Mapping[int, int]
) -> dict[str, Any]:
    features = [feature for feature in layout.features if feature.table == table]
    optimizer = group.optimizer
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
        "learning_rate": _rate(group, rate_tags.get(g)),
    }


def _rate(group: Group, tag: int | None) -> Any:
    """Return a constant as a number, a callable read on the host as its tag, a schedule by name."""
    if tag is not None:
        return {"tag": tag}
    rate = None if group.optimizer is None else group.optimizer.learning_rate
    return getattr(rate, "__qualname__", type(rate).__name__) if callable(rate) else rate

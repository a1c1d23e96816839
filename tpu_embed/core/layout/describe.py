"""Describe the resolved configuration: as a plain object, and as lines that an object's repr shows.

Input: a layout. Output: a dict of dicts, lists, numbers, strings, booleans and None; or strings.
"""

from __future__ import annotations

import dataclasses
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
        "tables": {name: _table(layout, *pair, callables) for name, pair in layout.tables.items()},
        "learning_rates": [_name(rate) for rate in callables],
        "features": {feature.path: feature.table.name for feature in layout.features},
        "devices": mesh.size,
        "hosts": len(layout.axes.processes),
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
        "vocabulary_size": table.declared_size,
        # Every shard has the same number of rows: V = 5 on 2 shards is stored as 6 rows.
        "padded_vocabulary_size": table.rows_per_shard * stack.num_shards,
        "dim": stack.dim,
        "dtype": stack.dtype,
        "exchange_dtype": stack.exchange_dtype,
        "rounding": stack.rounding,
        "placement": stack.placement,
        "shard_axes": list(stack.shard_axes),
        "shards": stack.num_shards,
        "stack": stack.name,
        "offset": table.offset,
        # A sequence counts as L features: it has one activation per position.
        "num_features": sum(max(1, feature.config.max_sequence_length) for feature in features),
        "optimizer": None if optimizer is None else optimizer.describe(),
        "learning_rate": {"tag": callables.index(rate)} if callable(rate) else rate,
        "vocabulary": None if table.key_rules is None else dataclasses.asdict(table.key_rules),
        "storage": None if table.storage is None else dataclasses.asdict(table.storage),
    }


def _name(rate: Any) -> str:
    return getattr(rate, "__qualname__", type(rate).__name__)


def describe_devices(layout: Layout) -> str:
    """Return in words which devices there are: `8 cpu devices (x: 4, y: 2)`."""
    mesh = layout.axes.mesh
    platform = getattr(mesh.abstract_mesh.abstract_device, "platform", None) or "unknown"
    axes = ", ".join(f"{name}: {size}" for name, size in mesh.shape.items())
    return f"{mesh.size} {platform} device{'' if mesh.size == 1 else 's'} ({axes})"


def describe_tables(layout: Layout) -> list[str]:
    """Return a line per table, such as `films: [1000, 16] float32, mod over 8 shards, Adam(0.1)`.

    A dynamic vocabulary adds how its keys are evicted: `…, keys (lru)`; a table on the host, where
    its rows are, how many of them the devices hold, and which leave first: `…, at home in memory,
    4096 rows on the devices (lru)`.

    Args:
      layout: the engine's layout.
    """
    return [_line(*pair) for pair in layout.tables.values()]


def _line(stack: Stack, table: TableSlice) -> str:
    shards = f" over {stack.num_shards} shards" if stack.num_shards > 1 else ""
    optimizer, rule = stack.optimizer, "not trained"
    if optimizer is not None:
        rate = optimizer.learning_rate
        described = optimizer.describe()
        rule = described.get("transform", described["class"])
        if rate is not None:
            rule += f"({_name(rate) if callable(rate) else rate})"
    size = f"[{table.declared_size}, {stack.dim}] {stack.dtype}"
    if stack.rounding == "stochastic":
        size += " (stochastic rounding)"
    keys = "" if table.key_rules is None else f", keys ({table.key_rules.evict})"
    if (storage := table.storage) is not None:
        home = "memory" if storage.path is None else "a file"
        keys += f", at home in {home}, {storage.device_rows} rows on the devices ({storage.evict})"
    return f"{table.name}: {size}, {stack.placement}{shards}, {rule}{keys}"

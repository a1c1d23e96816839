"""Choose where tables with `placement="auto"` live: tiny ones on every device, the rest sharded.

Input: feature configs, an optimizer, the mesh. Output: the same configs without "auto", with the
reason for each choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from tpu_embed._types import PyTree
from tpu_embed.config import TableConfig
from tpu_embed.core.ids import Structure, structure
from tpu_embed.core.layout import make_axes
from tpu_embed.optimizers import TableOptimizer
from tpu_embed.planning.costs import readable

REPLICATED_BYTES = 2**16
"""A table of at most this many bytes is replicated, up to 1,024 times as many bytes in all.

Its lookups need no exchange then, and its block sums are a psum of at most half a MiB."""

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float64": 8}


def resolve(feature_config: PyTree, optimizer: Any = None, *, mesh: Mesh | None = None) -> PyTree:
    """Return feature configs whose tables have no `placement="auto"`.

    A table of at most `REPLICATED_BYTES` becomes "replicated", any other "mod". A tiny table is
    "mod", too, on one device, if it is at home on the host or has `shard_axes`, if its optimizer
    does not accumulate gradients, or once `1024 * REPLICATED_BYTES` are replicated. `plan` gives
    the reason for each.

    Args:
      feature_config: as for `EmbeddingEngine`.
      optimizer: as for `EmbeddingEngine`.
      mesh: the devices; None: the mesh of `jax.set_mesh`, or else one axis over all devices.

    Returns:
      The same nesting. Features that shared a table share the new one; tables that were not "auto"
      are the same objects.

    Raises:
      ValueError: whatever `EmbeddingEngine` refuses about feature configs.

    Example:
      >>> import tpu_embed
      >>> days = tpu_embed.TableConfig(7, 4, placement="auto", name="days")
      >>> resolved = resolve({"day": tpu_embed.FeatureConfig(days)})
      >>> resolved["day"].table.placement in ("mod", "replicated")
      True
    """
    declared = structure.flatten(feature_config)
    chosen = placements(declared, optimizer, devices=make_axes(mesh, None).mesh.size)
    if not chosen:
        return feature_config
    return with_placements(declared, {name: where for name, (where, _) in chosen.items()})


def placements(declared: Structure, optimizer: Any, *, devices: int) -> dict[str, tuple[str, str]]:
    """Return table -> (placement, reason) for the tables that are "auto".

    Args:
      declared: the features.
      optimizer: the optimizer of tables without one of their own.
      devices: the number of devices.
    """
    named = zip(declared.table_names, declared.tables, strict=True)
    auto = {name: table for name, table in named if table.placement == "auto"}
    chosen, left = {}, 1024 * REPLICATED_BYTES
    # The smallest tables first, until the bytes for replicated tables are used up.
    for name, table in sorted(auto.items(), key=lambda item: _bytes(item[1])):
        against = _against_replication(table, optimizer, devices, left)
        if against:
            chosen[name] = "mod", against
        else:
            left -= _bytes(table)
            chosen[name] = "replicated", f"tiny, {readable(_bytes(table))}"
    return chosen


def with_placements(declared: Structure, chosen: dict[str, str]) -> PyTree:
    """Return the feature configs with new placements for some tables.

    Args:
      declared: the features.
      chosen: table -> placement.
    """
    return with_tables(declared, {name: {"placement": where} for name, where in chosen.items()})


def with_tables(declared: Structure, changes: Mapping[str, Mapping[str, Any]]) -> PyTree:
    """Return the feature configs with some tables changed.

    Args:
      declared: the features.
      changes: table -> field of `TableConfig` -> value.
    """
    # By identity: features that share a table object share its changed copy.
    new = {
        id(table): dataclasses.replace(table, name=name, **changes[name])
        for name, table in zip(declared.table_names, declared.tables, strict=True)
        if name in changes
    }
    return declared.unflatten(
        [
            dataclasses.replace(feature, table=new.get(id(feature.table), feature.table))
            for feature in declared.features
        ]
    )


def _against_replication(table: TableConfig, optimizer: Any, devices: int, left: int) -> str:
    """Return the reason why a table must not be replicated, or "" if there is none."""
    if table.storage is not None:
        return "at home on the host"
    if devices == 1:
        return "one device"
    if table.shard_axes is not None:
        return "shard_axes given"
    if _bytes(table) > REPLICATED_BYTES:
        return f"{readable(_bytes(table))}, over {readable(REPLICATED_BYTES)}"
    rule = optimizer if table.optimizer is None else table.optimizer
    accumulates = not isinstance(rule, TableOptimizer) or rule.use_gradient_accumulation
    if table.trainable and not accumulates:
        return "its optimizer does not accumulate gradients"
    return "" if _bytes(table) <= left else "enough tables are replicated"


def _bytes(table: TableConfig) -> int:
    return table.vocabulary_size * table.dim * _ITEMSIZE[table.dtype]

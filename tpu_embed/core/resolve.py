"""What the declarations leave open is settled once: optimizers, initializers, layout, rates.

Enters: the flattened feature configuration and the engine's defaults. Leaves: a `Layout`, and the
learning rates that must be read on the host. Called by the engine at construction; the configs are
never written to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from tpu_embed import initializers
from tpu_embed._checks import message
from tpu_embed._snapshot import snapshot
from tpu_embed._types import Array, ArrayLike
from tpu_embed.core.collectives import MeshAxes
from tpu_embed.core.layout import FeatureLayout, Layout, ResolvedTable, make_groups
from tpu_embed.core.structure import Structure
from tpu_embed.kernels.forms import packing_of
from tpu_embed.optimizers import (
    LearningRateKind,
    TableOptimizer,
    as_table_optimizer,
    learning_rate_kind,
)


def make_layout(
    declared: Structure, optimizer: Any, axes: MeshAxes, *, sum_blocks: int, stack_tables: bool
) -> Layout:
    """Return the layout of the declared tables over the mesh.

    Args:
      declared: the feature configuration.
      optimizer: for tables without one of their own, or None.
      axes: the mesh and its roles.
      sum_blocks: G.
      stack_tables: whether tables that can share an array do.

    Raises:
      ValueError: an unresolved placement, or an optimizer that is none or does not fit its table.
    """
    for name, config in zip(declared.table_names, declared.tables, strict=True):
        if config.placement == "auto":
            remedy = "resolve it first: tpu_embed.planning.resolve(feature_config, ...)"
            what = f"table {name!r}: placement"
            raise ValueError(
                message(what, expected="mod, div or replicated", got="'auto'", remedy=remedy)
            )
    optimizers = _table_optimizers(declared, optimizer)
    tables = []
    for name, config, rule in zip(declared.table_names, declared.tables, optimizers, strict=True):
        initializer = initializers.resolve(config.initializer, config.dim)
        shard_axes = axes.shard_axes_of(name, config)
        shards = axes.size(shard_axes)
        tables.append(ResolvedTable(name, config, rule, initializer, shard_axes, shards))
    packing = packing_of(axes.device)
    groups = make_groups(tables, stack_tables=stack_tables, packing=packing)
    home = {table.name: (g, table) for g, group in enumerate(groups) for table in group.tables}
    features = []
    for label, feature in zip(declared.labels, declared.features, strict=True):
        g, table = home[declared.table_names[declared.table_index(feature)]]
        features.append(FeatureLayout(label, feature, table, g))
    return Layout(axes, groups, tuple(features), sum_blocks)


def _table_optimizers(declared: Structure, default: Any) -> list[TableOptimizer | None]:
    """Return the optimizer of every table, None where it is never updated.

    One object given for several tables is resolved once: they may share a stack.
    """
    known: dict[int, TableOptimizer | None] = {}

    def resolved(what: str, given: Any) -> TableOptimizer | None:
        if id(given) not in known:
            try:
                known[id(given)] = as_table_optimizer(given)
            except ValueError as error:
                raise ValueError(f"{what}: {error}") from error
        return known[id(given)]

    fallback = resolved("EmbeddingEngine", default)
    optimizers = []
    for name, config in zip(declared.table_names, declared.tables, strict=True):
        own = fallback
        if config.optimizer is not None:
            own = resolved(f"table {name!r}", config.optimizer)
        own = own if config.trainable else None
        if (
            own is not None
            and not own.use_gradient_accumulation
            and config.placement == "replicated"
        ):
            raise ValueError(
                message(
                    f"table {name!r}: use_gradient_accumulation",
                    expected="True for a replicated table",
                    got="False",
                    remedy='place it "mod" or "div", or accumulate',
                )
            )
        optimizers.append(own)
    return optimizers


def rate_callables(layout: Layout) -> list[Any]:
    """Return the learning rates that are callables, equal ones once, the schedules last."""
    rates = [group.optimizer.learning_rate for group in layout.groups if group.optimizer]
    found: list[Any] = []
    for kind in (LearningRateKind.HOST, LearningRateKind.SCHEDULE):
        for rate in rates:
            if learning_rate_kind(rate) is kind and rate not in found:
                found.append(rate)
    return found


class HostRates:
    """Learning rates that are callables without arguments: read on the host, once an update.

    Equal callables share one tag, an index into what `read` returns.

    Args:
      layout: the engine's.
    """

    def __init__(self, layout: Layout) -> None:
        self._callables = [
            rate
            for rate in rate_callables(layout)
            if learning_rate_kind(rate) is LearningRateKind.HOST
        ]
        self._tags: dict[int, int] = {}
        for g, group in enumerate(layout.groups):
            rate = None if group.optimizer is None else group.optimizer.learning_rate
            if rate in self._callables:
                self._tags[g] = self._callables.index(rate)

    def read(self) -> tuple[Array, ...]:
        """Call each callable once; return scalars `[]` by tag.

        Raises:
          ValueError: one does not return a number.
        """
        return tuple(_scalar(rate(), rate) for rate in self._callables)

    def by_group(self, values: Sequence[ArrayLike] | None) -> dict[int, Array]:
        """Return the value of every group that has such a rate.

        Raises:
          ValueError: another number of values than of such rates.
        """
        given = () if values is None else values
        if not isinstance(given, (tuple, list)) or len(given) != len(self._callables):
            got = f"{len(given)}" if isinstance(given, (tuple, list)) else repr(given)
            raise ValueError(
                message(
                    "learning_rates",
                    expected=f"{len(self._callables)} value(s), read outside the jitted function",
                    got="None" if values is None else got,
                    remedy="pass update(..., learning_rates=engine.learning_rates())",
                )
            )
        return {g: jnp.asarray(snapshot(given[tag]), float) for g, tag in self._tags.items()}


def _scalar(value: Any, rate: Any) -> Array:
    try:
        scalar = jnp.asarray(snapshot(value), float)
    except (TypeError, ValueError):
        scalar = None
    if scalar is None or scalar.shape != ():
        name = getattr(rate, "__qualname__", repr(rate))
        what = f"learning_rate {name}"
        raise ValueError(message(what, expected="a call that returns a number", got=repr(value)))
    return scalar

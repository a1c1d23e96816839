"""Fill in what the declarations leave open, and compute the layout from the result.

A table may be declared without an optimizer, an initializer or shard axes; it then gets the
engine's optimizer, the default initializer and all axes of the mesh.

It also gets what its rows are rounded to where devices exchange them.

Input: the flattened feature configuration and the engine's defaults. Output: a `Layout`. The
configs themselves are never changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, get_args

import numpy as np

from tpu_embed import initializers
from tpu_embed._checks import check_choice, refuse
from tpu_embed._types import Array
from tpu_embed.config import TableConfig
from tpu_embed.core.ids import Structure
from tpu_embed.core.layout.layout import Layout
from tpu_embed.core.layout.mesh import MeshAxes
from tpu_embed.core.layout.stacks import (
    ROUNDING_SLOTS,
    ExchangeDtype,
    FeatureLayout,
    ResolvedTable,
    Stack,
    make_stacks,
)
from tpu_embed.kernels.formats import packing_of
from tpu_embed.optimizers import (
    TableOptimizer,
    as_table_optimizer,
)


def make_layout(
    declared: Structure,
    optimizer: Any,
    axes: MeshAxes,
    *,
    sum_blocks: int,
    stack_tables: bool,
    exchange_dtype: ExchangeDtype | None = None,
) -> Layout:
    """Return the layout of the declared tables over the mesh.

    Args:
      declared: the feature configuration.
      optimizer: the optimizer of tables that declare none, or None.
      axes: the mesh, and which of its axes split the batch.
      sum_blocks: G, see `Layout`.
      stack_tables: whether tables that can share one physical array do so.
      exchange_dtype: what rows and partial sums of sharded tables are rounded to; see
        `with_exchange_dtype`.

    Raises:
      ValueError: a placement is still "auto"; an optimizer is neither ours nor an optax transform,
        or does not fit its table; `exchange_dtype` is unknown or does not fit a table.
    """
    for name, config in declared.configs.items():
        if config.placement == "auto":
            refuse(
                f"table {name!r}: placement",
                expected="mod, div or replicated",
                got="'auto'",
                remedy="resolve it first: tpu_embed.planning.resolve(feature_config, ...)",
            )
    optimizers = _table_optimizers(declared, optimizer)
    tables = []
    for (name, config), rule in zip(declared.configs.items(), optimizers, strict=True):
        initializer = initializer_of(config)
        shard_axes = axes.shard_axes_of(name, config)
        shards = axes.size(shard_axes)
        tables.append(ResolvedTable(name, config, rule, initializer, shard_axes, shards))
    stacks = make_stacks(tables, stack_tables=stack_tables, packing=packing_of(axes.device))
    stacks = with_exchange_dtype(stacks, exchange_dtype)
    # table name -> (index of its stack, its slice of the stack)
    home = {table.name: (g, table) for g, stack in enumerate(stacks) for table in stack.tables}
    features = []
    for label, feature in zip(declared.labels, declared.features, strict=True):
        g, table = home[declared.table_names[declared.table_index(feature)]]
        features.append(FeatureLayout(label, feature, table, g))
    return Layout(axes, stacks, tuple(features), sum_blocks)


def initializer_of(config: TableConfig) -> Callable[..., Array]:
    """Return the initializer of a table: its own, or the default one."""
    return initializers.resolve(config.initializer, config.dim)


def _table_optimizers(declared: Structure, default: Any) -> list[TableOptimizer | None]:
    """Return the optimizer of every table; None for a table that is never updated.

    An object that is given for several tables is resolved once, so that these tables have equal
    optimizers and may share a stack.
    """
    known: dict[int, TableOptimizer | None] = {}

    def resolved(what, given):
        if id(given) not in known:
            try:
                known[id(given)] = as_table_optimizer(given)
            except ValueError as error:
                raise ValueError(f"{what}: {error}") from error
        return known[id(given)]

    fallback = resolved("EmbeddingEngine", default)
    optimizers = []
    for name, config in declared.configs.items():
        own = fallback
        if config.optimizer is not None:
            own = resolved(f"table {name!r}", config.optimizer)
        own = own if config.trainable else None
        # Every device has a replicated table whole and must apply the same update to it, so its
        # gradients are first summed over all devices.
        if (
            own is not None
            and not own.use_gradient_accumulation
            and config.placement == "replicated"
        ):
            refuse(
                f"table {name!r}: use_gradient_accumulation",
                expected="True for a replicated table",
                got="False",
                remedy='place it "mod" or "div", or accumulate',
            )
        if own is not None and config.rounding == "stochastic":
            slots = own.slot_shapes(config.dim, np.float32).keys()
            if taken := sorted(slots & {*ROUNDING_SLOTS}):
                refuse(
                    f'table {name!r}: slots of an optimizer with rounding="stochastic"',
                    expected=f"other names than {', '.join(ROUNDING_SLOTS)}",
                    got=f"{taken}",
                    remedy="give these slots other names",
                )
        optimizers.append(own)
    return optimizers


def with_exchange_dtype(
    stacks: tuple[Stack, ...], exchange_dtype: ExchangeDtype | None
) -> tuple[Stack, ...]:
    """Return the stacks, those that are sharded with the dtype of their exchange.

    Args:
      stacks: the stacks. Replicated ones exchange no rows and keep whole sums: nothing is rounded.
      exchange_dtype: the option of the engine; None means "float32", which rounds nothing.

    Raises:
      ValueError: another dtype; a sharded table is float64, or its optimizer does not accumulate
        gradients, and they are to be rounded.
    """
    if exchange_dtype is not None:
        check_choice("exchange_dtype", exchange_dtype, get_args(ExchangeDtype))
    if exchange_dtype != "bfloat16":
        return stacks
    return tuple(_rounded(stack) if stack.placement != "replicated" else stack for stack in stacks)


def _rounded(stack: Stack) -> Stack:
    """Return a sharded stack whose rows and partial sums are rounded to bfloat16."""
    what, name = "exchange_dtype", stack.tables[0].name
    if stack.compute_dtype != np.float32:
        refuse(
            what,
            expected="tables of float32 or bfloat16 with exchange_dtype='bfloat16'",
            got=f"table {name!r} of {stack.dtype}",
            remedy="leave exchange_dtype out",
        )
    # Without accumulation there are no partial sums: each occurrence is applied by itself.
    if stack.optimizer is not None and not stack.optimizer.use_gradient_accumulation:
        refuse(
            what,
            expected="optimizers that accumulate gradients with exchange_dtype='bfloat16'",
            got=f"use_gradient_accumulation=False for table {name!r}",
            remedy="leave exchange_dtype out, or accumulate",
        )
    return dataclasses.replace(stack, exchange_dtype="bfloat16")

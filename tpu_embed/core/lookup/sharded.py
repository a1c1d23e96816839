"""Look up a batch on all devices: fetch each id's row from its owner shard, combine rows by bag.

The whole lookup is one `shard_map`. On each device, stack after stack, ids travel to the shards
that own their rows, rows travel back, and the rows of each bag become one activation. Of ids that
the host has not routed, nobody knows how many go to which shard. So every shard gets all of them,
and adds up the rows that it owns; these sums travel back, and are added up.

Input: the stored tables and the ids of all stacks. Output: one array of activations per feature,
with the batch dimension sharded.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tpu_embed._checks import refuse_derivatives
from tpu_embed._types import Array
from tpu_embed.core.batch import (
    Batch,
    LocalIds,
    StackView,
    TracedIds,
    gather_ids,
    view_stacks,
)
from tpu_embed.core.exchange import collectives, route
from tpu_embed.core.layout import Layout, Stack
from tpu_embed.core.lookup import segments
from tpu_embed.core.lookup.combine import combine
from tpu_embed.core.lookup.jagged import Jagged
from tpu_embed.kernels.operands import RowsToSum, SumLayout

not_differentiable = refuse_derivatives(
    "lookup",
    expected="differentiation with respect to the activations or the weights",
    got="the tables of the state",
    remedy="give the activations' gradients to EmbeddingEngine.update; for tables that are plain "
    "arrays there is sparse_value_and_grad",
)
"""The tables unchanged, but no derivative of them: it would be a dense array of a whole table."""


def lookup(
    tables: dict[str, Array], source: Batch | TracedIds, layout: Layout
) -> tuple[list[Array | Jagged], Array]:
    """Return the activations of every feature, and the number of its bad ids.

    Args:
      tables: `TableState.tables`.
      source: the ids.
      layout: the engine's layout.

    Returns:
      one array `[B, …, D]` per feature in flattening order, float32 (float64 for a float64 table),
      or a `Jagged`; the number of bad ids per feature, int32 `[F]`.
    """
    axes = layout.axes

    def device(tables: dict[str, Array], source: Batch | TracedIds) -> tuple[list[Any], Array]:
        (located, bad_ids), splits = source.locate(layout), source.row_splits(layout)
        found: dict[int, Any] = {}
        for view, ids in zip(view_stacks(source.spec, layout), located, strict=True):
            table = tables[view.stack.name]
            activations = _lookup_stack(table, ids, view)
            found |= by_feature(activations, view, splits)
        bad_ids = collectives.psum(bad_ids, axes.batch_axes)
        return [found[f] for f in range(len(layout.features))], bad_ids

    table_specs = {stack.name: axes.spec(stack.shard_axes) for stack in layout.stacks}
    batch = axes.spec(axes.batch_axes)
    return jax.shard_map(
        device,
        mesh=axes.mesh,
        in_specs=(table_specs, axes.spec(source.axes(layout))),
        out_specs=(batch, PartitionSpec()),
        check_vma=False,
    )(tables, axes.reshard(source, source.axes(layout)))


# Where a user calls it outside a jit, a bare shard_map would compile each operation in every call.
@functools.partial(jax.jit, static_argnames="layout")
def row_splits(source: Batch | TracedIds, layout: Layout) -> dict[int, Array]:
    """Return the row splits of every jagged feature, by its number.

    They depend on the ids alone, so they have no gradient.

    Args:
      source: the ids.
      layout: the engine's layout.

    Returns:
      int32 `[S, B / S + 1]`, as in the `Jagged` that `lookup` returns.
    """
    axes = layout.axes
    by_device = jax.shard_map(
        lambda source: source.row_splits(layout),
        mesh=axes.mesh,
        in_specs=(axes.spec(source.axes(layout)),),
        out_specs=axes.spec(axes.batch_axes),
        check_vma=False,
    )
    return by_device(axes.reshard(source, source.axes(layout)))


def by_feature(
    activations: Sequence[Array], view: StackView, row_splits: Mapping[int, Array]
) -> dict[int, Array | Jagged]:
    """Return the activations of one stack in their features' shapes, by the feature's number.

    Args:
      activations: `[bags, D]` per feature of the stack.
      view: the stack.
      row_splits: `[1, B/S + 1]` of every jagged feature.
    """
    found: dict[int, Any] = {}
    each = zip(view.features, view.sizes, view.shapes, activations, strict=True)
    for f, size, shape, values in each:
        # [bags, D] -> [examples, …, D], where … is the feature's own shape: () for one bag
        # per example, (length,) for a sequence. Of a jagged feature every place is a bag.
        if not shape.has_places:
            values = values.reshape(size, *shape.inner, view.stack.dim)
        found[f] = values
        if shape.capacity is not None:
            splits = row_splits[f]
            if not shape.has_places:  # ids that were traced, and so are padded
                _, values = segments.unpad(values, jnp.diff(splits[0]), shape.capacity)
            found[f] = Jagged(values[None], splits)
    return found


def _lookup_stack(table: Array, ids: LocalIds, view: StackView) -> tuple[Array, ...]:
    """Return the activations of one stack on one device; see `combine`."""
    stack = view.stack
    with jax.named_scope(f"lookup/{stack.label}"):
        if stack.num_shards > 1 and not view.is_routed:
            return _summed_by_owners(table, ids, view)
        return _combined(table, ids, view.sum_layout, stack)


def _combined(table: Array, ids: LocalIds, layout: SumLayout, stack: Stack) -> tuple[Array, ...]:
    """Fetch the rows of ids, and sum those of each bag."""
    rows = route.fetch(RowsToSum(table, ids.index, ids.bags, ids.gains), ids.asked, stack)
    with jax.named_scope("combine"):
        return combine(rows, layout, stack)


def _summed_by_owners(table: Array, ids: LocalIds, view: StackView) -> tuple[Array, ...]:
    """Return the same where every shard sums the rows that it owns, of all ids.

    The devices along the shard axes that split the batch are n sources; each has T bags.
    """
    stack, axes = view.stack, view.layout.axes
    sources = tuple(name for name in axes.batch_axes if name in stack.shard_axes)
    # If all bags have as many ids, kernels need not read where each begins.
    n, widths = axes.size(sources), set(view.widths)
    with jax.named_scope("route"):
        ids = gather_ids(ids, view, sources)
    # [n T, D]: a bag is zero here if none of its rows is.
    layout = SumLayout((n * view.starts[-1],), tuple(widths) if len(widths) == 1 else ())
    (parts,) = _combined(table, ids, layout, stack)
    with jax.named_scope("route"):
        # [n, T, D], of which every source gets its own.
        summed = collectives.psum_scatter(parts.reshape(n, -1, stack.dim), sources)
        # Along an axis that does not split the batch, all devices have the same bags.
        rest = tuple(name for name in stack.shard_axes if name not in sources)
        return tuple(jnp.split(collectives.psum(summed, rest), view.starts[1:-1]))

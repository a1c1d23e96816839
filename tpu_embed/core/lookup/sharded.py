"""Look up a batch on all devices: fetch each id's row from its owner shard, combine rows by bag.

The whole lookup is one `shard_map`. On each device, stack after stack, ids travel to the shards
that own their rows, rows travel back, and the rows of each bag become one activation. Of ids that
the host has not routed, nobody knows how many go to which shard. So every shard gets all of them,
and adds up the rows that it owns; these sums travel back, and are added up.

A bag is a list of ids that one example has for one feature. With gains a (`core/ids/gains.py`) and
rows w, its activation is Σ a w. If the activation has gradient g, the row of each id has gradient
a g.

An update that writes into a table's own memory must come after every lookup of the old rows. XLA
derives that order from data dependencies alone. If the gradients do not depend on the activations
(the loss is linear in them, or a second lookup only feeds a metric), nothing tells XLA that the
lookup comes first, and it copies the whole table to be safe. So lookups of traced tables are noted
(`record_read`), and the update adds a zero to its row ids that is computed from the activations
(`kernels/tracing.py`).

Input: the stored tables and the ids of all stacks. Output: one array of activations per feature,
with the batch dimension sharded.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tpu_embed._checks import refuse_derivatives
from tpu_embed._types import PADDING_ID, Array, Tracer
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
from tpu_embed.core.lookup.jagged import Jagged
from tpu_embed.kernels import dispatch, rounded, storage
from tpu_embed.kernels.operands import RowsToSum, SumLayout


def quantize(rows: Array, stack: Stack) -> Array:
    """Round rows `[N, D]` to the buckets of the stack's `QuantizationConfig`, if it has one."""
    config = stack.quantization
    if config is None:
        return rows
    # With 5 buckets in [-1, 1], step is 0.5 and rows become -1, -0.5, 0, 0.5 or 1.
    step = (config.upper - config.lower) / (config.num_buckets - 1)
    clipped = jnp.clip(rows, config.lower, config.upper)
    return jnp.floor((clipped - config.lower) / step + 0.5) * step + config.lower


def combine(rows: RowsToSum, layout: SumLayout, stack: Stack) -> tuple[Array, ...]:
    """Return the activations of a stack's features, `[bags, D]` each.

    Args:
      rows: the fetched rows of the ids, and the bag and the gain of each.
      layout: the bags (`StackView.sum_layout`).
      stack: the stack.
    """
    # Rows are quantized before they are weighted and summed. There is one row per id then, so
    # the source becomes the N quantized rows with the index 0 … N - 1 (absent ids get -1).
    if stack.quantization is not None:
        source, index = rows.source, rows.index
        found = storage.widened(dispatch.gather_rows(source, index))
        positions = jax.lax.iota(index.dtype, index.shape[0])
        absent = (index < 0) | (index >= source.shape[0])
        index = jnp.where(absent, jnp.asarray(PADDING_ID, positions.dtype), positions)
        rows = rows._replace(source=quantize(found, stack), index=index, packed=None)
    return dispatch.gather_sum(rows, layout)


def sum_gradients(
    rows: RowsToSum, num_sums: int, stack: Stack, *, filled: bool = True
) -> Array:
    """Return sums of the gradients of rows, `[num_sums, D]`.

    If the exchange rounds sums, these are rounded, and in the format of `Stack.sent_sums_format`.

    Args:
      rows: the gradients of bags, and which of them is added to which sum, in order.
      num_sums: the number of sums.
      stack: the stack.
      filled: whether sums of no gradients must be zeros; see `SumLayout`.
    """
    layout = SumLayout((num_sums,), filled=filled)
    if stack.exchange_dtype is not None:
        return rounded.gather_sum(rows, layout, stack.sent_sums_format)
    (sums,) = dispatch.gather_sum(rows, layout)
    return sums


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

    def device(tables, source):
        (located, bad_ids), splits = source.locate(layout), source.row_splits(layout)
        found: dict[int, Any] = {}
        for view, ids in zip(view_stacks(source.spec, layout), located, strict=True):
            stack = view.stack
            with jax.named_scope(f"lookup/{stack.label}"):
                if stack.num_shards > 1 and not view.is_routed:
                    activations = _summed_by_owners(tables[stack.name], ids, view)
                else:
                    activations = _combined(
                        tables[stack.name], ids, view.sum_layout, stack
                    )
            found |= by_feature(activations, view, splits)
        bad_ids = collectives.psum(bad_ids, axes.batch_axes)
        return [found[f] for f in range(len(layout.features))], bad_ids

    table_specs = {stack.name: axes.spec(stack.shard_axes) for stack in layout.stacks}
    names, activations = source.axes(layout), axes.spec(axes.batch_axes)
    given, returned = (table_specs, axes.spec(names)), (activations, PartitionSpec())
    run = collectives.per_device(device, axes, given, returned)
    return run(tables, axes.reshard(source, names))


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
    names = source.axes(layout)
    by_device = collectives.per_device(
        lambda source: source.row_splits(layout),
        axes,
        axes.spec(names),
        axes.spec(axes.batch_axes),
    )
    return by_device(axes.reshard(source, names))


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


def _combined(
    table: Array, ids: LocalIds, layout: SumLayout, stack: Stack
) -> tuple[Array, ...]:
    """Fetch the rows of ids, and sum those of each bag."""
    rows = route.fetch(
        RowsToSum(table, ids.index, ids.bags, ids.gains), ids.asked, stack
    )
    with jax.named_scope("combine"):
        return combine(rows, layout, stack)


def _summed_by_owners(
    table: Array, ids: LocalIds, view: StackView
) -> tuple[Array, ...]:
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
    layout = SumLayout(
        (n * view.starts[-1],), tuple(widths) if len(widths) == 1 else ()
    )
    (parts,) = _combined(table, ids, layout, stack)
    with jax.named_scope("route"):
        # [n, T, D], of which every source gets its own.
        summed = collectives.psum_scatter(parts.reshape(n, -1, stack.dim), sources)
        # Along an axis that does not split the batch, all devices have the same bags.
        rest = tuple(name for name in stack.shard_axes if name not in sources)
        return tuple(jnp.split(collectives.psum(summed, rest), view.starts[1:-1]))


_READS: dict[int, tuple[weakref.ref, list[weakref.ref]]] = {}
"""`id` of a traced table -> the table, and the activations that were looked up in it.

Both are weak references, so a trace that has ended leaves nothing here. An activation that has been
garbage-collected is not used by the program, so the update need not wait for it."""


def record_read(table: Array, result: Array) -> None:
    """Remember what was computed from a traced table; outside a trace there is nothing to order.

    Args:
      table: one of `TableState.tables`.
      result: numbers that were computed from it, at least one.
    """
    if not isinstance(table, Tracer):
        return
    number = id(table)
    # Python may give the `id` of a table that is gone to a new one, so its entry goes with it.
    if number not in _READS:
        forget = _READS.pop
        _READS[number] = weakref.ref(table, lambda _: forget(number)), []
    _READS[number][1].append(weakref.ref(result))


def activations_read(table: Any, replicas: int) -> list[Array]:
    """Return what this trace has looked up in a table, or searched, so far.

    Args:
      table: one of `TableState.tables`.
      replicas: how many parts the first axis of each of these arrays can be split into.
    """
    _, found = _READS.get(id(table), (None, []))
    read = [one for reference in found if (one := reference()) is not None]
    of_trace = [
        one for one in read if isinstance(one, Tracer) and one._trace is table._trace
    ]
    # Of a search for 3 queries on 2 replicas, one number is enough to wait for.
    return [
        one if one.shape[0] % replicas == 0 else jnp.full(replicas, one.reshape(-1)[0])
        for one in of_trace
    ]

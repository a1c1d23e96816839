"""Gather and combine: ids in, activations out.

Enters: the stored tables and the ids of all stacks. Leaves: one activation a feature, batch
dimension sharded. Called by the engine, inside or outside a user's jit.
"""

from __future__ import annotations

import jax
from jax.sharding import PartitionSpec

from tpu_embed._checks import message
from tpu_embed._types import Array
from tpu_embed.core.batch import Batch, LocalIds, TracedIds, bag_layout, worst_case
from tpu_embed.core.exchange import FetchedRows, collectives, route
from tpu_embed.core.layout import Layout
from tpu_embed.core.lookup.combine import combine


@jax.custom_jvp
def not_differentiable(tables: dict[str, Array]) -> dict[str, Array]:
    """Return the tables; asking for their gradient is an error, never a dense array.

    Raises:
      TypeError: under differentiation with respect to the tables.
    """
    return tables


@not_differentiable.defjvp
def _refuse_gradient(primals: tuple, tangents: tuple) -> tuple:
    raise TypeError(
        message(
            "lookup",
            expected="differentiation with respect to the activations or the weights",
            got="the tables of the state",
            remedy="give the activations' gradients to EmbeddingEngine.update; for tables that are "
            "plain arrays there is sparse_value_and_grad",
        )
    )


def lookup(
    tables: dict[str, Array], source: Batch | TracedIds, layout: Layout
) -> tuple[list[Array], Array]:
    """Return the activation of every feature, in flattening order, and the bad ids counted.

    Args:
      tables: `TableState.tables`.
      source: the ids.
      layout: the engine's.

    Returns:
      per feature `[B, …, D]`, float32 (float64 for a float64 table); int32 `[F]`.
    """
    axes, spec = layout.axes, source.spec

    def device(tables: dict[str, Array], source: Batch | TracedIds) -> tuple[list[Array], Array]:
        located = source.locate(layout)
        found: dict[int, Array] = {}
        for g, (stack, ids) in enumerate(zip(layout.stacks, located.ids, strict=True)):
            activations = _lookup_stack(tables[stack.name], ids, source, layout, g)
            for f, activation in zip(spec.stacks[g].features, activations, strict=True):
                shape = (spec.local_batch, *spec.feature_shapes[f].inner, stack.dim)
                found[f] = activation.reshape(shape)
        bad_ids = collectives.psum(located.bad_ids, axes.batch_axes)
        return [found[f] for f in range(len(layout.features))], bad_ids

    table_specs = {stack.name: axes.spec(stack.shard_axes) for stack in layout.stacks}
    batch = axes.spec(axes.batch_axes)
    return jax.shard_map(
        device,
        mesh=axes.mesh,
        in_specs=(table_specs, batch),
        out_specs=(batch, PartitionSpec()),
        check_vma=False,
    )(tables, axes.reshard(source, axes.batch_axes))


def _lookup_stack(
    table: Array, ids: LocalIds, source: Batch | TracedIds, layout: Layout, g: int
) -> tuple[Array, ...]:
    """Return the activations of one stack on one device, `[examples * bags, D]` a feature.

    Where a given capacity is too small, by the worst-case branch.
    """
    stack, form = layout.stacks[g], bag_layout(source.spec, layout, g)

    def combined(found: FetchedRows) -> tuple[Array, ...]:
        with jax.named_scope("combine"):
            return combine(found, ids, form, stack)

    with jax.named_scope(f"lookup/{stack.label}"):
        capacity = max(1, source.spec.stacks[g].row_capacity)
        found, overflow = route.fetch(table, ids.row_ids, stack, capacity)
        if source.checked or stack.num_shards == 1:
            return combined(found)
        enough = worst_case(source.spec, layout).stacks[g].row_capacity
        return jax.lax.cond(
            collectives.any_device(overflow, layout.axes.mesh),
            lambda: combined(route.fetch(table, ids.row_ids, stack, enough)[0]),
            lambda: combined(found),
        )

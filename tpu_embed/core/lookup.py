"""Gather and combine: ids in, activations out.

Enters: the stored tables and the ids of all stacks. Leaves: one activation a feature, batch
dimension sharded. Called by the engine, inside or outside a user's jit.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import PartitionSpec

from tpu_embed._checks import message
from tpu_embed._types import Array
from tpu_embed.core import collectives, route
from tpu_embed.core.batch import Batch
from tpu_embed.core.batch_spec import BatchSpec, worst_case
from tpu_embed.core.combine import combine, quantize
from tpu_embed.core.layout import Group, Layout
from tpu_embed.core.located import LocalIds, bag_form, bag_offsets
from tpu_embed.core.traced import TracedIds
from tpu_embed.kernels import storage


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
            remedy="give the activations' gradients to EmbeddingEngine.update",
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
        by_group = [
            _lookup_group(tables[group.name], ids, source, layout, g)
            for g, (group, ids) in enumerate(zip(layout.groups, located.ids, strict=True))
        ]
        bad_ids = collectives.psum(located.bad_ids, axes.batch_axes)
        return split_features(by_group, spec, layout), bad_ids

    table_specs = {group.name: axes.spec(group.shard_axes) for group in layout.groups}
    batch = axes.spec(axes.batch_axes)
    return jax.shard_map(
        device,
        mesh=axes.mesh,
        in_specs=(table_specs, batch),
        out_specs=(batch, PartitionSpec()),
        check_vma=False,
    )(tables, axes.reshard(source, axes.batch_axes))


def _lookup_group(
    table: Array, ids: LocalIds, source: Batch | TracedIds, layout: Layout, g: int
) -> Array:
    """Return the activations of one stack on one device, `[examples, bags, D]`."""
    group, form = layout.groups[g], bag_form(source.spec, layout, g)
    with jax.named_scope(f"lookup/{group.name}"):
        with jax.named_scope("route"):
            stored = _fetch(table, ids.rows, source, layout, g)
        with jax.named_scope("combine"):
            rows = storage.decode(stored, group.dtype).astype(group.compute_dtype)
            activations = combine(quantize(rows, group), ids, form)
            return activations.reshape(form.examples, -1, group.dim)


def _fetch(table: Array, rows: Array, source: Batch | TracedIds, layout: Layout, g: int) -> Array:
    """Return the stored row of every id, by the worst-case branch if the capacity is too small."""
    group: Group = layout.groups[g]
    capacity = max(1, source.spec.groups[g].rows)
    if source.checked or group.num_shards == 1:
        return route.fetch(table, rows, group, capacity)[0]
    enough = worst_case(source.spec, layout).groups[g].rows
    found, overflow = route.fetch(table, rows, group, capacity)
    return jax.lax.cond(
        collectives.any_device(overflow, layout.axes.mesh),
        lambda: route.fetch(table, rows, group, enough)[0],
        lambda: found,
    )


def split_features(activations: Sequence[Array], spec: BatchSpec, layout: Layout) -> list[Array]:
    """Return one activation a feature from one array `[examples, bags, D]` a stack."""
    found: dict[int, Array] = {}
    for g, group in enumerate(layout.groups):
        offsets, _ = bag_offsets(spec, g)
        for f, offset in zip(spec.groups[g].features, offsets, strict=True):
            form = spec.forms[f]
            mine = activations[g][:, offset : offset + form.bags]
            found[f] = mine.reshape(spec.local_batch, *form.inner, group.dim)
    return [found[f] for f in range(len(layout.features))]

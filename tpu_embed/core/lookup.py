"""Gather and combine: ids in, activations out.

Enters: the stored tables and the ids of all stacks. Leaves: one activation a feature, batch dimension sharded. Called
by the engine, inside or outside a user's jit.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import Array
from tpu_embed.core import collectives, route
from tpu_embed.core.batch import GroupIds, bag_offsets
from tpu_embed.core.batch_spec import BatchSpec, worst_case
from tpu_embed.core.combine import BagForm, LocalIds, combine, quantize
from tpu_embed.core.layout import Group, Layout
from tpu_embed.kernels import storage


@jax.custom_jvp
def not_differentiable(tables: dict[str, Array]) -> dict[str, Array]:
    """Return the tables; asking for their gradient through a lookup is an error, never a dense array.

    Raises:
      TypeError: under differentiation with respect to the tables.
    """
    return tables


@not_differentiable.defjvp
def _refuse_gradient(primals: tuple, tangents: tuple) -> tuple:
    raise TypeError(
        "lookup: expected differentiation with respect to activations (or weights), got the tables of the state; "
        "take the gradient of the loss with respect to the activations and give it to EmbeddingEngine.update"
    )


def bag_form(spec: BatchSpec, layout: Layout, g: int) -> BagForm:
    """Return how the ids of stack g combine on one device."""
    combiners: list[str] = []
    for f in spec.groups[g].features:
        form, config = spec.forms[f], layout.features[f].config
        combiners += [config.table.combiner if form.combines else "sum"] * form.bags
    return BagForm(spec.local_batch, tuple(combiners))


def local_ids(ids: GroupIds, spec: BatchSpec, g: int) -> LocalIds:
    """Return the ids of one device from its part `[1, N]` of the ids of a stack."""
    bags = _dense_bags(spec, g) if ids.bags is None else ids.bags[0]
    return LocalIds(ids.rows[0], bags, None if ids.weights is None else ids.weights[0])


def _dense_bags(spec: BatchSpec, g: int) -> Array:
    """Return the bag of every id of a dense stack on one device, `[N]`: it follows from the column."""
    offsets, per_example = bag_offsets(spec, g)
    if not sum(spec.columns(g)):
        return jnp.zeros(spec.ids(g), jnp.int32)
    column = np.concatenate(
        [
            offset + np.repeat(np.arange(spec.forms[f].bags), spec.forms[f].width or 0)
            for f, offset in zip(spec.groups[g].features, offsets, strict=True)
        ]
    )
    examples = jnp.arange(spec.local_batch, dtype=jnp.int32)
    return (examples[:, None] * per_example + column.astype(np.int32)).reshape(-1)


def lookup(
    tables: dict[str, Array],
    ids: Sequence[GroupIds],
    spec: BatchSpec,
    layout: Layout,
    *,
    checked: bool,
) -> list[Array]:
    """Return the activation of every feature, in flattening order.

    Args:
      tables: `TableState.tables`.
      ids: the ids of every stack.
      spec: forms and capacities.
      layout: the engine's.
      checked: the ids are known to fit the capacities; otherwise a batch that does not fit takes the worst-case
        branch.

    Returns:
      per feature `[B, …, D]`, float32 (float64 for a float64 table).
    """
    axes = layout.axes

    def device(tables: dict[str, Array], ids: tuple[GroupIds, ...]) -> dict[int, Array]:
        return {
            g: _lookup_group(tables[group.name], ids[g], spec, layout, g, checked=checked)
            for g, group in enumerate(layout.groups)
        }

    activations = jax.shard_map(
        device,
        mesh=axes.mesh,
        in_specs=(
            {g.name: axes.spec(g.shard_axes) for g in layout.groups},
            axes.spec(axes.batch_axes),
        ),
        out_specs=axes.spec(axes.batch_axes),
        check_vma=False,
    )({g.name: tables[g.name] for g in layout.groups}, tuple(ids))
    return split_features(activations, spec, layout)


def _lookup_group(
    table: Array, ids: GroupIds, spec: BatchSpec, layout: Layout, g: int, *, checked: bool
) -> Array:
    """Return the activations of one stack on one device, `[examples, bags, D]`."""
    group, form = layout.groups[g], bag_form(spec, layout, g)
    mine = local_ids(ids, spec, g)
    with jax.named_scope(f"lookup/{group.name}"):
        with jax.named_scope("route"):
            stored = _fetch(table, mine.rows, spec, layout, g, checked=checked)
        with jax.named_scope("combine"):
            rows = storage.decode(stored, group.dtype).astype(group.compute_dtype)
            return combine(quantize(rows, group), mine, form).reshape(form.examples, -1, group.dim)


def _fetch(
    table: Array, rows: Array, spec: BatchSpec, layout: Layout, g: int, *, checked: bool
) -> Array:
    group: Group = layout.groups[g]
    capacity = spec.groups[g].rows
    enough = worst_case(spec, layout).groups[g].rows
    if checked or group.num_shards == 1 or capacity >= enough:
        return route.fetch(table, rows, group, capacity)[0]
    found, overflow = route.fetch(table, rows, group, max(1, capacity))
    return jax.lax.cond(
        collectives.any_device(overflow, layout.axes.mesh),
        lambda: route.fetch(table, rows, group, enough)[0],
        lambda: found,
    )


def split_features(activations: dict[int, Array], spec: BatchSpec, layout: Layout) -> list[Array]:
    """Return one activation a feature from one array `[B, bags, D]` a stack."""
    found: dict[int, Array] = {}
    for g, group in enumerate(layout.groups):
        offsets, _ = bag_offsets(spec, g)
        for f, offset in zip(spec.groups[g].features, offsets, strict=True):
            form = spec.forms[f]
            mine = activations[g][:, offset : offset + form.bags]
            found[f] = mine.reshape(form.batch, *form.inner, group.dim)
    return [found[f] for f in range(len(layout.features))]

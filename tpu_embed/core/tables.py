"""The state of all tables: its shape and sharding, its logical views, rows set from outside.

Enters: physical arrays (stacked, sharded, padded). Leaves: logical rows, or the arrays with some
rows set. Called by `logical.py`; the arrays are made by `init.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core import collectives
from tpu_embed.core.collectives import MeshAxes
from tpu_embed.core.layout import Group, TableSlice
from tpu_embed.kernels import dispatch
from tpu_embed.kernels.forms import RowForm
from tpu_embed.optimizers import SlotShape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TableState:
    """Tables, slots, step and counters: everything training changes.

    Read it through `EmbeddingEngine.tables` and `.slots`: the arrays here are physical (stacked,
    sharded, padded).

    Attributes:
      tables: stack name -> stored rows, `[S * R, D]` or packed, sharded over the first axis.
      slots: stack name -> slot name -> `[S * R, …]` or packed, or one array for the stack.
      step: int32 `[]`, updates applied so far.
      counters: `"bad_ids"` int32 `[F]`, ids met inside a jit that no policy allows, by feature;
        `"overflows"` int32 `[]`, exchanges that took the worst-case branch; unless
        `on_bad_gradient` is "allow", `"bad_gradients"` int32 `[F]`, steps left out in which the
        feature's gradient was not finite. `update` counts; a lookup alone returns no state.
    """

    tables: dict[str, Array]
    slots: dict[str, dict[str, Array]]
    step: Array
    counters: dict[str, Array]


def state_specs(groups: tuple[Group, ...], axes: MeshAxes) -> tuple[dict, dict]:
    """Return the partition of `TableState.tables` and of `TableState.slots`."""
    tables = {group.name: axes.spec(group.shard_axes) for group in groups}
    slots = {
        group.name: {
            name: axes.spec(group.shard_axes) if shape.per_row else PartitionSpec()
            for name, shape in slot_shapes(group).items()
        }
        for group in groups
    }
    return tables, slots


def slot_shapes(group: Group) -> Mapping[str, SlotShape]:
    """Return the shape of every slot of the group, by name; empty without an optimizer."""
    if group.optimizer is None:
        return {}
    return group.optimizer.slot_shapes(group.dim, group.compute_dtype)


def slot_form(group: Group, slot: SlotShape) -> RowForm:
    """Return how the rows of a slot of the group lie in its array."""
    return RowForm(slot.shape, jnp.dtype(slot.dtype), group.packing)


def logical_rows(physical: Array, form: RowForm, group: Group, table: TableSlice) -> Array:
    """Return a copy of the stored rows of one logical table, `[V, …]`, out of its stack.

    Args:
      physical: of `S * R` rows.
      form: how they lie.
      group: the stack.
      table: the table.
    """
    rows = form.by_row(physical)
    trailing = rows.shape[1:]
    by_shard = rows.reshape(group.num_shards, group.rows, *trailing)
    mine = by_shard[:, table.offset : table.offset + table.rows_per_shard]
    if group.placement != "div":
        mine = jnp.swapaxes(mine, 0, 1)
    return form.unpack(mine.reshape(-1, *trailing)[: table.vocabulary_size])


def set_physical_rows(
    physical: Array, rows: Array, values: Array, form: RowForm, group: Group, axes: MeshAxes
) -> Array:
    """Return the physical array with `values` at physical `rows`, each shard writing its own.

    Args:
      physical: of `S * R` rows, sharded over its first axis.
      rows: `[n]` physical rows, different from each other; a number outside is not written.
      values: `[n, …]`, in the stored dtype.
      form: how the rows lie.
      group: the stack.
      axes: the mesh.
    """

    def shard(physical: Array, rows: Array, values: Array) -> Array:
        first = collectives.axis_index(group.shard_axes).astype(rows.dtype) * group.rows
        local = rows - first
        mine = (local >= 0) & (local < group.rows)
        return dispatch.write_rows(physical, jnp.where(mine, local, PADDING_ID), values, form)

    spec = axes.spec(group.shard_axes)
    return jax.shard_map(
        shard,
        mesh=axes.mesh,
        in_specs=(spec, PartitionSpec(), PartitionSpec()),
        out_specs=spec,
        check_vma=False,
    )(physical, rows, values)

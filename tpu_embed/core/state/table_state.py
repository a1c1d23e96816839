"""The state of all tables: its shape and sharding, its logical views, rows set from outside.

Enters: physical arrays (stacked, sharded, padded). Leaves: logical rows, or the arrays with some
rows set. Called by `logical.py`; the arrays are made by `init.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.exchange import collectives
from tpu_embed.core.layout import MeshAxes, Stack, TableSlice
from tpu_embed.kernels import dispatch
from tpu_embed.kernels.formats import RowFormat
from tpu_embed.optimizers import SlotShape


class StackShard(NamedTuple):
    """One device's shard of a stack: its rows in their format, and its slots by name."""

    table: Array
    slots: dict[str, Array]


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


def state_specs(stacks: tuple[Stack, ...], axes: MeshAxes) -> tuple[dict, dict]:
    """Return the partition of `TableState.tables` and of `TableState.slots`."""
    tables = {stack.name: axes.spec(stack.shard_axes) for stack in stacks}
    slots = {
        stack.name: {
            name: axes.spec(stack.shard_axes) if shape.per_row else PartitionSpec()
            for name, shape in slot_shapes(stack).items()
        }
        for stack in stacks
    }
    return tables, slots


def slot_shapes(stack: Stack) -> Mapping[str, SlotShape]:
    """Return the shape of every slot of the stack, by name; empty without an optimizer."""
    if stack.optimizer is None:
        return {}
    return stack.optimizer.slot_shapes(stack.dim, stack.compute_dtype)


def slot_format(stack: Stack, slot: SlotShape) -> RowFormat:
    """Return how the rows of a slot of the stack lie in its array."""
    return RowFormat(slot.shape, jnp.dtype(slot.dtype), stack.packing)


def logical_rows(physical: Array, form: RowFormat, stack: Stack, table: TableSlice) -> Array:
    """Return a copy of the stored rows of one logical table, `[V, …]`, out of its stack.

    Args:
      physical: of `S * R` rows.
      form: how they lie.
      stack: the stack.
      table: the table.
    """
    rows = form.by_row(physical)
    trailing = rows.shape[1:]
    by_shard = rows.reshape(stack.num_shards, stack.num_rows, *trailing)
    mine = by_shard[:, table.offset : table.offset + table.rows_per_shard]
    if stack.placement != "div":
        mine = jnp.swapaxes(mine, 0, 1)
    return form.unpack(mine.reshape(-1, *trailing)[: table.vocabulary_size])


def set_physical_rows(
    physical: Array, rows: Array, values: Array, form: RowFormat, stack: Stack, axes: MeshAxes
) -> Array:
    """Return the physical array with `values` at physical `rows`, each shard writing its own.

    Args:
      physical: of `S * R` rows, sharded over its first axis.
      rows: `[n]` physical rows, different from each other; a number outside is not written.
      values: `[n, …]`, in the stored dtype.
      form: how the rows lie.
      stack: the stack.
      axes: the mesh.
    """

    def shard(physical: Array, rows: Array, values: Array) -> Array:
        first = collectives.axis_index(stack.shard_axes).astype(rows.dtype) * stack.num_rows
        local = rows - first
        mine = (local >= 0) & (local < stack.num_rows)
        return dispatch.write_rows(physical, jnp.where(mine, local, PADDING_ID), values, form)

    spec = axes.spec(stack.shard_axes)
    return jax.shard_map(
        shard,
        mesh=axes.mesh,
        in_specs=(spec, PartitionSpec(), PartitionSpec()),
        out_specs=spec,
        check_vma=False,
    )(physical, rows, values)

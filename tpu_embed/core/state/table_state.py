"""`TableState`: everything that training changes, as one pytree of physical arrays.

Physical means that the tables of a stack share one array, whose first axis is sharded over the
devices and padded so that all shards are equal. The functions here say how those arrays are
sharded, and convert between physical rows and the logical rows of one table.

Input: stacks and physical arrays. Output: shardings, logical rows, or arrays with some rows set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey, keystr

from tpu_embed._types import PADDING_ID, Array, Tracer
from tpu_embed.core.exchange import collectives
from tpu_embed.core.layout import MeshAxes, Stack, TableSlice, rounding_slots
from tpu_embed.core.state.gradients import refuse_jax_grad
from tpu_embed.kernels import dispatch
from tpu_embed.kernels.formats import RowFormat
from tpu_embed.optimizers import SlotShape


class StackShard(NamedTuple):
    """One device's shard of a stack: the stored rows, and the slots by name."""

    table: Array
    slots: dict[str, Array]


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class TableState:
    """Tables, slots, step and counters: everything training changes.

    The arrays here are physical (stacked, sharded, padded). Use `EmbeddingEngine.tables` and
    `.slots` to read logical ones.

    Attributes:
      tables: stack name -> stored rows, `[S * R, D]` or packed, sharded over the first axis.
      slots: stack name -> slot name -> `[S * R, …]` or packed, or one array for the whole stack.
      step: int32 `[]`, the number of updates applied so far.
      counters: `"bad_ids"` int32 `[F]`, the invalid ids of each feature that were found inside a
        jit; `"overflows"` int32 `[]`, always 0: no ids need more room than they have; unless
        `on_bad_gradient` is "allow", also `"bad_gradients"` int32 `[F]`, how many steps were
        skipped because the feature's gradient was not finite; with living vocabularies
        `"refused_batches"` int32 `[]`, how many steps were skipped inside a jit because their batch
        was not admitted, or its rows were other keys' by then. Only `update` counts, because a
        lookup returns no state.
      vocabulary: with living vocabularies, `"map_version"` int32 `[2 + T]`, the step of the maps
        that the rows belong to, its history (see `ValidSteps`), and for each of the T living tables
        the last step at which a row was taken from a key, then, with tables on the host, the number
        of the last replacement of rows at home, so `[2 + T + 1]`; and the data of the random key
        that new rows are drawn with, under the name of its kind. None without them.
    """

    tables: dict[str, Array]
    slots: dict[str, dict[str, Array]]
    step: Array
    counters: dict[str, Array]
    vocabulary: dict[str, Array] | None = None

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        """Return the fields, for JAX; refuse `jax.grad` with respect to a state."""
        refuse_jax_grad()
        return tuple(getattr(self, name) for name in self._children), None

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, ...], None]:
        """Return the fields with their names, for JAX."""
        return tuple((GetAttrKey(name), getattr(self, name)) for name in self._children), None

    @property
    def _children(self) -> tuple[str, ...]:
        """The names of the fields that are children of the pytree node."""
        every = ("tables", "slots", "step", "counters", "vocabulary")
        return every if self.vocabulary is not None else every[:-1]

    @classmethod
    def tree_unflatten(cls, _: None, fields: tuple[Any, ...]) -> TableState:
        """Return the state of these fields, for JAX."""
        return cls(*fields)

    def __repr__(self) -> str:
        """Show a line per stack of tables: the shape of its array, and its slots."""
        # A tree of shardings, say, may have one for all tables where a state has a dictionary.
        tables, slots = self.tables, self.slots if isinstance(self.slots, Mapping) else {}
        lines = [f"TableState at step {describe_leaf(self.step)}"]
        for stack, table in (tables if isinstance(tables, Mapping) else {"tables": tables}).items():
            named = jax.tree_util.tree_leaves_with_path(slots.get(stack))
            more = [f"{keystr(path, simple=True)} {describe_leaf(leaf)}" for path, leaf in named]
            lines.append(", ".join([f"{stack}: {describe_leaf(table)}", *more]))
        return "\n  ".join(lines)


def describe_leaf(leaf: Any) -> str:
    """Return a leaf of a state in a few words: a number, or dtype and shape, but no rows.

    Args:
      leaf: an array; or whatever else a tree that is mapped from a state holds.
    """
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return repr(leaf)
    known = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    if known and leaf.is_deleted():
        return "(donated)"
    if known and leaf.shape == ():
        return str(leaf)
    return f"{leaf.dtype}{list(leaf.shape)}"


def state_specs(stacks: tuple[Stack, ...], axes: MeshAxes) -> tuple[dict, dict]:
    """Return the partition specs of `TableState.tables` and of `TableState.slots`."""
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
    """Return the shape of every slot of a stack, by name; nothing if it has no optimizer."""
    return {**rule_slots(stack), **rounding_slots(stack)}


def rule_slots(stack: Stack) -> Mapping[str, SlotShape]:
    """Return the shapes of the slots that the stack's optimizer has, by name."""
    if stack.optimizer is None:
        return {}
    return stack.optimizer.slot_shapes(stack.dim, stack.compute_dtype)


def slot_format(stack: Stack, slot: SlotShape) -> RowFormat:
    """Return how the rows of a slot lie in its array."""
    return RowFormat(slot.shape, jnp.dtype(slot.dtype), stack.packing)


def logical_rows(physical: Array, row_format: RowFormat, stack: Stack, table: TableSlice) -> Array:
    """Return a copy of the stored rows of one logical table, `[V, …]`.

    Args:
      physical: the stack's array of `S * R` rows.
      row_format: how the rows lie in it.
      stack: the stack.
      table: the table.
    """
    rows = row_format.by_row(physical)
    # The first two axes become one, [S * rows_per_shard, …]; the slice [:V] cuts the padding off.
    logical = stack.logical_view(rows, table).reshape(-1, *rows.shape[1:])
    return row_format.unpack(logical[: table.vocabulary_size])


def set_physical_rows(
    physical: Array,
    row_ids: Array,
    values: Array,
    row_format: RowFormat,
    stack: Stack,
    axes: MeshAxes,
) -> Array:
    """Return the physical array with `values` at physical `row_ids`, each shard writing its own.

    Args:
      physical: the stack's array of `S * R` rows, sharded over its first axis.
      row_ids: `[n]` physical rows, all different; numbers outside [0, S * R) are not written.
      values: `[n, …]`, in the stored dtype.
      row_format: how the rows lie in the array.
      stack: the stack.
      axes: the mesh.
    """

    def shard(physical: Array, row_ids: Array, values: Array) -> Array:
        # Every device sees all n rows and writes those in its range [first, first + R).
        first = collectives.axis_index(stack.shard_axes).astype(row_ids.dtype) * stack.num_rows
        local = row_ids - first
        mine = (local >= 0) & (local < stack.num_rows)
        return dispatch.write_rows(physical, jnp.where(mine, local, PADDING_ID), values, row_format)

    spec = axes.spec(stack.shard_axes)
    return jax.shard_map(
        shard,
        mesh=axes.mesh,
        in_specs=(spec, PartitionSpec(), PartitionSpec()),
        out_specs=spec,
        check_vma=False,
    )(physical, row_ids, values)

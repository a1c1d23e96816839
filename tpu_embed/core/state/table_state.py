"""`TableState`: everything that training changes, as one pytree of physical arrays.

Physical means that the tables of a stack share one array, whose first axis is sharded over the
devices and padded so that all shards are equal. The functions here say how those arrays are
sharded, read and write rows of a shard, and convert physical rows to the logical ones of a table.

`jax.grad(loss)(state)` first asks whether all leaves of the state are floats. The step is an
integer, so JAX would say that integers have no gradients. But the gradient of a table is what
nobody should ask for: it is as large as the table. So a state that is taken apart for this question
raises an error that says what to do instead.

Input: stacks and physical arrays. Output: shardings, logical rows, or arrays with some rows set.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey, keystr

from tpu_embed._checks import message
from tpu_embed._types import Array, Tracer
from tpu_embed.core.layout import MeshAxes, Stack, TableSlice, rounding_slots
from tpu_embed.kernels import dispatch, storage
from tpu_embed.kernels.formats import PACKED_ROWS, RowFormat
from tpu_embed.optimizers import SlotShape
from tpu_embed.storage import VALUES, slot_field

_TREE_FUNCTIONS = jax.tree_util.tree_leaves.__code__.co_filename
_ASKING = (inspect.unwrap(jax.value_and_grad).__code__.co_filename, "value_and_grad_f")
"""File and name of the function that `jax.grad` and `jax.value_and_grad` return."""


class StackShard(NamedTuple):
    """One device's shard of a stack: the stored rows, and the slots by name."""

    table: Array
    slots: dict[str, Array]

    def by_part(self) -> dict[str, Array]:
        """Return its arrays by what they are of a row, see `Field.part`."""
        return {VALUES: self.table} | {slot_field(n): slot for n, slot in self.slots.items()}


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


def stack_specs(stack: Stack, axes: MeshAxes) -> Any:
    """Return the partition specs of the arrays of one stack, as those of a `StackShard`."""
    tables, slots = state_specs((stack,), axes)
    return StackShard(tables[stack.name], slots[stack.name])


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


def row_formats(stack: Stack) -> dict[str, RowFormat]:
    """Return how the rows of each part lie in their array; those of no row are left out."""
    per_row = {name: slot for name, slot in slot_shapes(stack).items() if slot.per_row}
    slots = {slot_field(name): slot_format(stack, slot) for name, slot in per_row.items()}
    return {VALUES: stack.row_format, **slots}


def write_parts(
    held: StackShard, rows: Array, values: Mapping[str, Array], stack: Stack
) -> StackShard:
    """Return one device's shard with rows set.

    Args:
      held: the shard.
      rows: `[m]` local rows, ascending; `PADDING_ID` for none.
      values: `[m, …]` by part, as they are stored.
      stack: the stack.
    """
    arrays = held.by_part()
    for part, one in row_formats(stack).items():
        arrays[part] = dispatch.write_ascending_rows(arrays[part], rows, values[part], one)
    return StackShard(arrays[VALUES], {name: arrays[slot_field(name)] for name in held.slots})


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


def row_unit(row_format: RowFormat) -> int:
    """Return of what a block's first row and its number of rows are multiples."""
    # Packed rows share lines of 128 words: PACKED_ROWS rows fill a whole number of lines. Not
    # packed, a row is its own line.
    return PACKED_ROWS if row_format.packed else 1


def read_rows(physical: Array, start: Array, size: int, row_format: RowFormat) -> Array:
    """Return the local rows start … start + size - 1, `[size, …]`, float32 or float64.

    What passes over a whole table reads it in such blocks, so that no temporary array is as large
    as the table, however its rows are packed.

    Args:
      physical: the array of one shard, for example `[R, D]`.
      start: the first local row, a multiple of `row_unit`; `start + size` is at most R.
      size: the number of rows, a multiple of `row_unit`.
      row_format: how the rows lie in the array.
    """
    unit = row_unit(row_format)
    # Of rows of 32 words, four stand in a line, so 128 rows are 32 lines: the 128 rows from row 256
    # on are the 32 lines from line 64 on.
    lines = row_format.array(unit).shape[0]
    stored = jax.lax.dynamic_slice_in_dim(physical, start // unit * lines, size // unit * lines)
    values = storage.decode(row_format.unpack(row_format.by_row(stored)), row_format.dtype)
    return values.astype(jnp.float64 if values.dtype == jnp.float64 else jnp.float32)


def refuse_gradient(what: str) -> None:
    """Raise the error of a function that is asked for a gradient with respect to a state.

    Args:
      what: the function.

    Raises:
      TypeError: always.
    """
    raise TypeError(
        message(
            what,
            expected="activations or weights to differentiate by",
            got="a TableState",
            remedy="give the activations' gradients to EmbeddingEngine.update; for tables that "
            "are plain arrays there is sparse_value_and_grad",
        )
    )


def refuse_jax_grad() -> None:
    """Refuse to take a state apart if `jax.grad` asks for its leaves.

    Raises:
      TypeError: `jax.grad` or `jax.value_and_grad` is asked for such a gradient.
    """
    # The stack: this function, the flattening of the state, JAX's functions of trees, who asks.
    # If a release of JAX changes them, its own error is back, and a test tells.
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename == _TREE_FUNCTIONS:
        frame = frame.f_back
    if (frame.f_code.co_filename, frame.f_code.co_name) == _ASKING:
        refuse_gradient("jax.grad")

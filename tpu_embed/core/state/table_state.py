"""`TableState`: everything that training changes, as one pytree of physical arrays.

Physical means that the tables of a stack share one array, whose first axis is sharded over the
devices and padded so that all shards are equal. The functions here say how those arrays are
sharded, read and write rows of a shard, and convert physical rows to the logical ones of a table.
Users speak of tables and slots: a `Field` says where one of them is in the arrays.

`jax.grad(loss)(state)` first asks whether all leaves of the state are floats. The step is an
integer, so JAX would say that integers have no gradients. But the gradient of a table is what
nobody should ask for: it is as large as the table. So a state that is taken apart for this question
raises an error that says what to do instead.

Input: stacks and physical arrays. Output: shardings, logical rows, or arrays with some rows set;
what differs in an object that a user gave as a state.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey, keystr

from tpu_embed._checks import check_live, check_type, refuse
from tpu_embed._types import Array, Tracer
from tpu_embed.core.layout import (
    Layout,
    MeshAxes,
    Stack,
    TableSlice,
    differences,
    rounding_slots,
)
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
        return {VALUES: self.table} | {
            slot_field(n): slot for n, slot in self.slots.items()
        }


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
        skipped because the feature's gradient was not finite; with dynamic vocabularies
        `"refused_batches"` int32 `[]`, how many steps were skipped inside a jit because their batch
        was not admitted, or its rows were other keys' by then. Only `update` counts, because a
        lookup returns no state.
      vocabulary: with dynamic vocabularies, `"map_version"` int32 `[2 + T]`, the step of the maps
        that the rows belong to, its history (see `ValidSteps`), and for each of the T dynamic
        vocabularies the last step at which a row was taken from a key, then, with tables on the
        host, the number of the last replacement of rows at home, so `[2 + T + 1]`; and the data of
        the random key that new rows are drawn with, under the name of its kind. None without them.
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
        return tuple(
            (GetAttrKey(name), getattr(self, name)) for name in self._children
        ), None

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
        tables, slots = (
            self.tables,
            self.slots if isinstance(self.slots, Mapping) else {},
        )
        lines = [f"TableState at step {describe_leaf(self.step)}"]
        for stack, table in (
            tables if isinstance(tables, Mapping) else {"tables": tables}
        ).items():
            named = jax.tree_util.tree_leaves_with_path(slots.get(stack))
            more = [
                f"{keystr(path, simple=True)} {describe_leaf(leaf)}"
                for path, leaf in named
            ]
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


def stack_specs(stack: Stack, axes: MeshAxes) -> Any:
    """Return the partition specs of the arrays of one stack, as those of a `StackShard`."""
    split: Any = axes.spec(stack.shard_axes)
    whole: Any = PartitionSpec()
    shapes = slot_shapes(stack).items()
    return StackShard(
        split, {name: split if one.per_row else whole for name, one in shapes}
    )


def split_shards(shards: Mapping[str, StackShard]) -> tuple[dict, dict]:
    """Return the tables and the slots of stacks, by name, as in a `TableState`."""
    tables = {name: one.table for name, one in shards.items()}
    return tables, {name: one.slots for name, one in shards.items()}


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
    slots = {
        slot_field(name): slot_format(stack, slot) for name, slot in per_row.items()
    }
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
        arrays[part] = dispatch.write_ascending_rows(
            arrays[part], rows, values[part], one
        )
    return StackShard(
        arrays[VALUES], {name: arrays[slot_field(name)] for name in held.slots}
    )


def logical_rows(
    physical: Array, row_format: RowFormat, stack: Stack, table: TableSlice
) -> Array:
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
    stored = jax.lax.dynamic_slice_in_dim(
        physical, start // unit * lines, size // unit * lines
    )
    values = storage.decode(
        row_format.unpack(row_format.by_row(stored)), row_format.dtype
    )
    return values.astype(jnp.float64 if values.dtype == jnp.float64 else jnp.float32)


def refuse_gradient(what: str) -> None:
    """Raise the error of a function that is asked for a gradient with respect to a state.

    Args:
      what: the function.

    Raises:
      TypeError: always.
    """
    refuse(
        what,
        expected="activations or weights to differentiate by",
        got="a TableState",
        remedy="give the activations' gradients to EmbeddingEngine.update; for tables that "
        "are plain arrays there is sparse_value_and_grad",
        error=TypeError,
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


@dataclasses.dataclass(frozen=True)
class Field:
    """A table, or one slot of a table, and where it is in the state.

    Attributes:
      stack: the stack that contains the table.
      table: the table's slice of the stack.
      slot: the slot's name; None for the table itself.
      shape: shape and dtype of one row; of the whole slot if all rows share it.
    """

    stack: Stack
    table: TableSlice
    slot: str | None
    shape: SlotShape

    @property
    def label(self) -> str:
        """The name used in error messages, such as "table 'item', slot 'momentum'"."""
        return f"table {self.table.name!r}" + (
            f", slot {self.slot!r}" if self.slot else ""
        )

    @property
    def part(self) -> str:
        """Its name among what a row has, see `row_fields`."""
        return VALUES if self.slot is None else slot_field(self.slot)

    @property
    def row_format(self) -> RowFormat:
        """How its rows lie in the physical array; meaningless for a slot that all rows share."""
        return slot_format(self.stack, self.shape)

    def read(self, state: TableState) -> Array:
        """Return the physical array: that of the whole stack, not only of this table."""
        if self.slot is None:
            return state.tables[self.stack.name]
        return state.slots[self.stack.name][self.slot]

    def write(self, state: TableState, physical: Array) -> TableState:
        """Return the state with the physical array replaced."""
        name = self.stack.name
        if self.slot is None:
            return dataclasses.replace(state, tables={**state.tables, name: physical})
        mine = {**state.slots[name], self.slot: physical}
        return dataclasses.replace(state, slots={**state.slots, name: mine})


def field(layout: Layout, name: str, slot: str | None) -> Field:
    """Return the field of a table, or of one of its slots.

    Args:
      layout: the engine's layout.
      name: the table's name.
      slot: the slot's name, or None for the table itself.

    Raises:
      ValueError: there is no table or no slot of this name.
    """
    stack, table = layout.table(name)
    # A table's rows have D numbers; a slot's rows have the shape that the optimizer declares.
    if slot is None:
        return Field(
            stack, table, None, SlotShape((stack.dim,), jnp.dtype(stack.dtype))
        )
    shapes = slot_shapes(stack)
    if slot not in shapes:
        refuse(
            f"table {name!r}: slot", expected=f"one of {sorted(shapes)}", got=repr(slot)
        )
    return Field(stack, table, slot, shapes[slot])


def fields(layout: Layout, name: str | None = None) -> Iterator[Field]:
    """Yield every table, each followed by its slots; or one table and its slots."""
    for each, (stack, _) in layout.tables.items():
        for slot in (None, *slot_shapes(stack)) if name in (None, each) else ():
            yield field(layout, each, slot)


# -- checks ----------------------------------------------------------------------------------------
#
# An array of rows does not say which rows it holds: on 8 devices the same table is stored in
# another order than on 1, and two engines may have tables of equal shape. But the keys of a state's
# dictionaries do say it, because the name of a stack describes its layout (`stack_name`). So an
# engine compares those keys with its own before it reads a row.

_OWN_STATE = "give one that this engine's init, update or load returned"
_RESTORE = (
    "save and restore with tpu_embed.io, which brings rows into any engine's layout"
)


def check_state(state: Any, layout: Layout) -> None:
    """Check that a state has every array of the layout, each with the right shape and dtype.

    Raises:
      ValueError: the object is not a state, belongs to another engine, lacks an array, or has an
        array that was donated.
    """
    check_own(state, layout)
    for f in fields(layout):
        # A NumPy array of the right shape is refused too: it is not sharded over the devices.
        _check_array(f, state, jax.Array)


def check_own(state: Any, layout: Layout) -> None:
    """Check that a state has this layout and contains no donated array.

    It reads only dictionary keys and flags, so it is cheap enough for every call.

    Raises:
      ValueError: the object is not a state, belongs to another engine, or has a donated array; the
        call is inside a `shard_map` or under another mesh.
    """
    layout.axes.check_context()
    check_not_donated(state)
    check_layout(state.tables, layout)
    check_layout(state.slots, layout)


def check_not_donated(state: Any, *, tables_alone: bool = False) -> None:
    """Check that an object is a state and that none of its arrays, or tables, was donated.

    Raises:
      ValueError: it is not a state, or an array was donated; the message names its stack.
    """
    check_type(
        "state",
        state,
        TableState,
        expected="a TableState",
        remedy=_OWN_STATE,
        error=ValueError,
    )
    for name, table in state.tables.items():
        check_live(f"state: stack {name!r}", (table,))
    if not tables_alone:
        for name, by_slot in state.slots.items():
            check_live(f"state: slots of stack {name!r}", by_slot.values())
        check_live("state", (state.step, *state.counters.values()))


def check_layout(by_stack: Mapping[str, Any], layout: Layout) -> None:
    """Check that the keys of tables or slots are the names of the layout's stacks.

    Args:
      by_stack: `TableState.tables` or `.slots`.
      layout: the engine's layout.

    Raises:
      ValueError: the keys belong to another layout; the message says what differs.
    """
    own = [stack.name for stack in layout.stacks]
    if by_stack.keys() == set(own):
        return
    missing = [name for name in own if name not in by_stack]
    foreign = sorted(map(str, by_stack.keys() - set(own)))
    why = ""
    if missing and foreign:
        # A name is "tables@layout". Compare the missing stack with a foreign one that has the same
        # tables, if there is one, so that the message is about the layout and not about the tables.
        name = next(
            (n for n in foreign if n.split("@")[0] == missing[0].split("@")[0]),
            foreign[0],
        )
        why = f": {differences(missing[0], name)}"
    refuse(
        "state",
        expected=f"stacks {missing or own}",
        got=f"{foreign or sorted(map(str, by_stack))}{why}",
        remedy=_RESTORE,
    )


def check_arrays(state: TableState, layout: Layout, *, slots: bool) -> None:
    """Check layout, shapes and dtypes; this runs at trace time, so it adds no cost per step.

    Args:
      state: the state.
      layout: the engine's layout.
      slots: whether to check the slots too.

    Raises:
      ValueError: the state belongs to another engine.
    """
    check_layout(state.tables, layout)
    if slots:
        check_layout(state.slots, layout)
    for f in fields(layout):
        if slots or f.slot is None:
            _check_array(f, state, object)
    for stack in layout.stacks if slots else ():
        wanted = slot_shapes(stack).keys()
        if more := sorted(state.slots[stack.name].keys() - wanted):
            refuse(
                f"state: stack {stack.name!r}",
                expected=f"slots {sorted(wanted)}",
                got=f"also {more}",
                remedy=_RESTORE,
            )


def _check_array(f: Field, state: TableState, kind: type) -> None:
    """Raise `ValueError` unless a state has an array of a kind, of the expected shape and dtype."""
    wanted = f.row_format.array(f.stack.physical_rows)
    # A slot that the whole stack shares has no rows: it is stored in its own shape, never packed.
    if not f.shape.per_row:
        wanted = jax.ShapeDtypeStruct(
            f.shape.shape, storage.stored_dtype(f.shape.dtype)
        )
    expected = f"{wanted.dtype} of shape {wanted.shape}"
    try:
        array: Any = f.read(state)
    except KeyError:
        array = None
    if array is None:
        got = "none"
    elif isinstance(array, kind):
        got = f"{array.dtype} of shape {array.shape}"
    else:
        got = f"a {type(array).__name__}"
    if got != expected:
        refuse(f"state: {f.label}", expected=expected, got=got, remedy=_OWN_STATE)

"""Find a table or slot by its name: which array of the state holds it, and how its rows lie there.

The state has one array per stack, while users speak of tables and slots. A `Field` says where one
of them is.

Input: a layout, and the names of a table and a slot. Output: a `Field`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp

from tpu_embed._checks import message
from tpu_embed._types import Array
from tpu_embed.core.layout import Layout, Stack, TableSlice
from tpu_embed.core.state.table_state import TableState, slot_format, slot_shapes
from tpu_embed.kernels.formats import RowFormat
from tpu_embed.optimizers import SlotShape
from tpu_embed.storage import VALUES, slot_field


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
        return f"table {self.table.name!r}" + (f", slot {self.slot!r}" if self.slot else "")

    @property
    def part(self) -> str:
        """Its name among what a row has, see `moved_rows.row_fields`."""
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
        return Field(stack, table, None, SlotShape((stack.dim,), jnp.dtype(stack.dtype)))
    shapes = slot_shapes(stack)
    if slot not in shapes:
        what, expected = f"table {name!r}: slot", f"one of {sorted(shapes)}"
        raise ValueError(message(what, expected=expected, got=repr(slot)))
    return Field(stack, table, slot, shapes[slot])


def fields(layout: Layout, name: str | None = None) -> Iterator[Field]:
    """Yield every table, each followed by its slots; or one table and its slots."""
    for stack in layout.stacks:
        for table in stack.tables:
            for slot in (None, *slot_shapes(stack)) if name in (None, table.name) else ():
                yield field(layout, table.name, slot)

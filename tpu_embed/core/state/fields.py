"""A table or a slot by its name: where its rows are in the state, and in which form.

Enters: a layout and names. Leaves: `Field`s. Called by `logical.py`.
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


@dataclasses.dataclass(frozen=True)
class Field:
    """A table, or one slot of it, and where it is in the state.

    Attributes:
      stack: its stack.
      table: its slice of the stack.
      slot: the slot's name, None for the table itself.
      shape: of one row (of the whole field, when not per row) and its dtype.
    """

    stack: Stack
    table: TableSlice
    slot: str | None
    shape: SlotShape

    @property
    def label(self) -> str:
        """The name in messages."""
        return f"table {self.table.name!r}" + (f", slot {self.slot!r}" if self.slot else "")

    @property
    def row_format(self) -> RowFormat:
        """How its rows lie in the physical array, if it has a part a row."""
        return slot_format(self.stack, self.shape)

    def read(self, state: TableState) -> Array:
        """Return the physical array."""
        if self.slot is None:
            return state.tables[self.stack.name]
        return state.slots[self.stack.name][self.slot]

    def write(self, state: TableState, physical: Array) -> TableState:
        """Return the state with another physical array."""
        name = self.stack.name
        if self.slot is None:
            return dataclasses.replace(state, tables={**state.tables, name: physical})
        mine = {**state.slots[name], self.slot: physical}
        return dataclasses.replace(state, slots={**state.slots, name: mine})


def field(layout: Layout, name: str, slot: str | None) -> Field:
    """Return a table, or one of its slots, by name.

    Raises:
      ValueError: there is none of this name.
    """
    stack, table = layout.table(name)
    if slot is None:
        return Field(stack, table, None, SlotShape((stack.dim,), jnp.dtype(stack.dtype)))
    shapes = slot_shapes(stack)
    if slot not in shapes:
        what, expected = f"table {name!r}: slot", f"one of {sorted(shapes)}"
        raise ValueError(message(what, expected=expected, got=repr(slot)))
    return Field(stack, table, slot, shapes[slot])


def fields(layout: Layout) -> Iterator[Field]:
    """Yield every table, each followed by its slots."""
    for stack in layout.stacks:
        for table in stack.tables:
            for slot in (None, *slot_shapes(stack)):
                yield field(layout, table.name, slot)

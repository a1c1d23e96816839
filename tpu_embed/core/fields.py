"""A table or a slot by its name: where its rows are in the state, and in which form.

Enters: a layout and names. Leaves: `Field`s. Called by `logical.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp

from tpu_embed._checks import message
from tpu_embed._types import Array
from tpu_embed.core.layout import Group, Layout, TableSlice
from tpu_embed.core.tables import TableState, slot_form, slot_shapes
from tpu_embed.kernels.forms import RowForm
from tpu_embed.optimizers import SlotShape


@dataclasses.dataclass(frozen=True)
class Field:
    """A table, or one slot of it, and where it is in the state.

    Attributes:
      group: its stack.
      table: its slice of the stack.
      slot: the slot's name, None for the table itself.
      shape: of one row (of the whole field, when not per row) and its dtype.
    """

    group: Group
    table: TableSlice
    slot: str | None
    shape: SlotShape

    @property
    def label(self) -> str:
        """The name in messages."""
        return f"table {self.table.name!r}" + (f", slot {self.slot!r}" if self.slot else "")

    @property
    def form(self) -> RowForm:
        """How its rows lie in the physical array, if it has a part a row."""
        return slot_form(self.group, self.shape)

    def read(self, state: TableState) -> Array:
        """Return the physical array."""
        if self.slot is None:
            return state.tables[self.group.name]
        return state.slots[self.group.name][self.slot]

    def write(self, state: TableState, physical: Array) -> TableState:
        """Return the state with another physical array."""
        name = self.group.name
        if self.slot is None:
            return dataclasses.replace(state, tables={**state.tables, name: physical})
        mine = {**state.slots[name], self.slot: physical}
        return dataclasses.replace(state, slots={**state.slots, name: mine})


def field(layout: Layout, name: str, slot: str | None) -> Field:
    """Return a table, or one of its slots, by name.

    Raises:
      ValueError: there is none of this name.
    """
    group, table = layout.table(name)
    if slot is None:
        return Field(group, table, None, SlotShape((group.dim,), jnp.dtype(group.dtype)))
    shapes = slot_shapes(group)
    if slot not in shapes:
        what, expected = f"table {name!r}: slot", f"one of {sorted(shapes)}"
        raise ValueError(message(what, expected=expected, got=repr(slot)))
    return Field(group, table, slot, shapes[slot])


def fields(layout: Layout) -> Iterator[Field]:
    """Yield every table, each followed by its slots."""
    for group in layout.groups:
        for table in group.tables:
            for slot in (None, *slot_shapes(group)):
                yield field(layout, table.name, slot)

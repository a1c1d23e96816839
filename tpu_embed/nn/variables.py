"""What a layer holds, as nnx variables of types of their own: no `nnx.Param` among them.

Enters and leaves: a `TableState`. Called by the layers, and by `gradients.py` to write it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from flax import nnx

from tpu_embed.core.state import TableState

__all__ = ["TOKEN", "Counter", "Slot", "Table", "attributes", "state_of"]

TOKEN = "step"
"""The attribute by whose value a layer's lookups are known in a program."""

_TABLES, _SLOTS = "tables", "slots"


@final
class Table(nnx.Variable):
    """The rows of a table, as its layer's mesh shards them.

    Its name among the layer's variables is that of its stack, which says what the rows are; the
    metadata `stack` repeats it, for states that are merged by position.
    """


@final
class Slot(nnx.Variable):
    """A slot of a table's optimizer, beside its rows."""


@final
class Counter(nnx.Variable):
    """A number beside a table: updates applied (`step`), ids outside it, exchanges overrun."""


def attributes(state: TableState) -> dict[str, Any]:
    """Return a layer's attributes that hold the state of its one table."""
    tables = {stack: Table(rows, stack=stack) for stack, rows in state.tables.items()}
    slots = {
        stack: {name: Slot(array) for name, array in by_name.items()}
        for stack, by_name in state.slots.items()
    }
    counters = {name: Counter(array) for name, array in state.counters.items()}
    return {_TABLES: tables, _SLOTS: slots, TOKEN: Counter(state.step), **counters}


def state_of(holder: Mapping[str, Any]) -> TableState:
    """Return the state that a layer's attributes hold.

    Args:
      holder: the attributes by name; those that are no variables of ours are ignored.
    """
    tables = {x.get_metadata().get("stack", name): x[...] for name, x in holder[_TABLES].items()}
    by_stack = holder.get(_SLOTS, {})  # a stack without slots may have no entry
    slots = {
        stack: {name: slot[...] for name, slot in by_stack.get(stack, {}).items()}
        for stack in tables
    }
    counted = {name: x[...] for name, x in holder.items() if isinstance(x, Counter)}
    step = counted.pop(TOKEN)
    return TableState(tables, slots, step, counted)

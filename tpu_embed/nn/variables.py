"""What a layer holds, as nnx variables of types of their own: no `nnx.Param` among them.

Enters and leaves: a `TableState`. Called by the layers, and by `gradients.py` to write it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from flax import nnx

from tpu_embed.core.tables import TableState

__all__ = ["TOKEN", "Counter", "Slot", "Table", "attributes", "state_of"]

TOKEN = "step"
"""The attribute by whose value a layer's lookups are known in a program."""

_TABLE, _SLOTS = "table", "slots"


@final
class Table(nnx.Variable):
    """The rows of a table, as its layer's mesh shards them."""


@final
class Slot(nnx.Variable):
    """A slot of a table's optimizer, beside its rows."""


@final
class Counter(nnx.Variable):
    """A number beside a table: updates applied (`step`), ids outside it, exchanges overrun."""


def attributes(state: TableState) -> dict[str, Any]:
    """Return a layer's attributes that hold the state of its one table."""
    ((stack, table),) = state.tables.items()
    slots = {name: Slot(array) for name, array in state.slots.get(stack, {}).items()}
    counters = {name: Counter(array) for name, array in state.counters.items()}
    return {_TABLE: Table(table), _SLOTS: slots, TOKEN: Counter(state.step), **counters}


def state_of(stack: str, holder: Mapping[str, Any]) -> TableState:
    """Return the state that a layer's attributes hold.

    Args:
      stack: the name of the table's array in the state.
      holder: the attributes by name; those that are no variables of ours are ignored.
    """
    slots = {name: slot[...] for name, slot in holder.get(_SLOTS, {}).items()}
    counted = {name: x[...] for name, x in holder.items() if isinstance(x, Counter)}
    step = counted.pop(TOKEN)
    return TableState({stack: holder[_TABLE][...]}, {stack: slots}, step, counted)

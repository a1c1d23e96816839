"""What a layer holds, as nnx variables of types of their own: no `nnx.Param` among them.

Enters and leaves: a `TableState`. Called by the layers, and by `gradients.py` to write it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import nnx

from tpu_embed.core.tables import TableState

__all__ = ["Counter", "Slot", "Table", "held", "state_of"]


class Table(nnx.Variable):
    """The rows of a table, as its layer's mesh shards them."""


class Slot(nnx.Variable):
    """A slot of a table's optimizer, beside its rows."""


class Counter(nnx.Variable):
    """A number beside a table: updates applied (`step`), ids outside it, exchanges overrun."""


def held(state: TableState) -> dict[str, Any]:
    """Return a layer's attributes that hold the state of its one table."""
    ((stack, table),) = state.tables.items()
    slots = {name: Slot(array) for name, array in state.slots.get(stack, {}).items()}
    counters = {name: Counter(array) for name, array in state.counters.items()}
    return {"table": Table(table), "slots": slots, "step": Counter(state.step), **counters}


def state_of(stack: str, holder: Mapping[str, Any]) -> TableState:
    """Return the state that a layer's attributes hold.

    Args:
      stack: the name of the table's array in the state.
      holder: the attributes by name, `Variable`s.
    """
    slots = {name: slot[...] for name, slot in holder.get("slots", {}).items()}
    counters = {name: holder[name][...] for name in ("bad_ids", "overflows")}
    return TableState({stack: holder["table"][...]}, {stack: slots}, holder["step"][...], counters)

"""The state of a layer as nnx variables: tables, their slots, and counters.

They have types of their own, so that filters such as `nnx.Param` do not select them: nnx must not
make a dense gradient for a table.

Input: a `TableState`, or the attributes of a layer.
Output: the attributes of a layer, or a `TableState`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from flax import nnx

from tpu_embed.core.state import TableState


@final
class Table(nnx.Variable):
    """The rows of the tables of one stack, sharded over the mesh of its layer.

    Its name among the variables of the layer is that of its stack, which says what the rows are.
    The metadata `stack` repeats the name, for states that are merged by position.
    """


@final
class Slot(nnx.Variable):
    """A slot of a table's optimizer."""


@final
class Counter(nnx.Variable):
    """A counter of a layer: updates (`step`), ids outside the table, exchanges over capacity."""


@final
class MapVersion(nnx.Variable):
    """Of a layer of keys: the step of its map that the rows belong to, and the key of new rows."""


@final
class Tap(nnx.Variable):
    """During a training step: zeros that are added to the activations of each of its lookups.

    The gradient by them is that of the activations.
    """


@final
class Seen(nnx.Variable):
    """During a training step: what the layer has looked up in it so far."""


def attributes(state: TableState) -> dict[str, Any]:
    """Return the attributes of a layer that hold its state, in the containers of nnx."""
    tables = {stack: Table(rows, stack=stack) for stack, rows in state.tables.items()}
    slots = {
        stack: nnx.Dict({name: Slot(array) for name, array in by_name.items()})
        for stack, by_name in state.slots.items()
    }
    found: dict[str, Any] = {name: Counter(array) for name, array in state.counters.items()}
    found |= {"tables": nnx.Dict(tables), "slots": nnx.Dict(slots), "step": Counter(state.step)}
    if state.vocabulary is not None:
        every = {name: MapVersion(x) for name, x in state.vocabulary.items()}
        found["vocabulary"] = nnx.Dict(every)
    return found


def state_of(holder: Mapping[str, Any]) -> TableState:
    """Return the state that a layer's attributes hold.

    Args:
      holder: the attributes by name; attributes that are not part of the state are ignored.
    """
    named = _variables(holder["tables"])
    tables = {x.get_metadata().get("stack", name): x[...] for name, x in named.items()}
    by_stack = holder["slots"]  # a stack without slots may have no entry
    slots = {
        stack: {name: slot[...] for name, slot in _variables(by_stack[stack]).items()}
        if stack in by_stack
        else {}
        for stack in tables
    }
    counted = {name: x[...] for name, x in holder.items() if isinstance(x, Counter)}
    step = counted.pop("step")
    vocabulary = None
    if "vocabulary" in holder:
        vocabulary = {name: x[...] for name, x in _variables(holder["vocabulary"]).items()}
    return TableState(tables, slots, step, counted, vocabulary)


def _variables(holder: Any) -> dict[str, nnx.Variable]:
    """Return the variables of a dictionary by name.

    `nnx.tabulate` replaces the public methods of an `nnx.Dict` while it calls a model, and adds a
    number to it. So the dictionary is only iterated and indexed, and other values are left out.

    Args:
      holder: an `nnx.Dict`, a dict or a state.
    """
    return {name: holder[name] for name in holder if isinstance(holder[name], nnx.Variable)}

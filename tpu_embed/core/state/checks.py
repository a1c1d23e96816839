"""Check that a state belongs to this engine, and that its arrays have not been donated.

An array of rows does not say which rows it holds: on 8 devices the same table is stored in another
order than on 1, and two engines may have tables of equal shape. But the keys of a state's
dictionaries do say it, because the name of a stack describes its layout (`stack_name`). So an
engine compares those keys with its own before it reads a row.

Input: an object that a user gave as a state, and the engine's layout. Output: nothing, or an error
that says what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from tpu_embed._checks import check_live, message
from tpu_embed.core.layout import Layout, differences
from tpu_embed.core.state.table_state import Field, TableState, fields, slot_shapes
from tpu_embed.kernels import storage

_OWN_STATE = "give one that this engine's init, update or load returned"
_RESTORE = "save and restore with tpu_embed.io, which brings rows into any engine's layout"


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


def check_not_donated(state: Any) -> None:
    """Check that an object is a state and that none of its arrays was donated.

    Raises:
      ValueError: it is not a state, or an array was donated; the message names its stack.
    """
    check_tables_not_donated(state)
    for name, by_slot in state.slots.items():
        check_live(f"state: slots of stack {name!r}", by_slot.values())
    check_live("state", (state.step, *state.counters.values()))


def check_tables_not_donated(state: Any) -> None:
    """Check that an object is a state and that none of its tables was donated.

    Raises:
      ValueError: it is not a state, or a table was donated; the message names its stack.
    """
    if not isinstance(state, TableState):
        got = type(state).__name__
        raise ValueError(message("state", expected="a TableState", got=got, remedy=_OWN_STATE))
    for name, table in state.tables.items():
        check_live(f"state: stack {name!r}", (table,))


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
        name = next((n for n in foreign if n.split("@")[0] == missing[0].split("@")[0]), foreign[0])
        why = f": {differences(missing[0], name)}"
    expected = f"stacks {missing or own}"
    got = f"{foreign or sorted(map(str, by_stack))}{why}"
    raise ValueError(message("state", expected=expected, got=got, remedy=_RESTORE))


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
            what, expected = f"state: stack {stack.name!r}", f"slots {sorted(wanted)}"
            text = message(what, expected=expected, got=f"also {more}", remedy=_RESTORE)
            raise ValueError(text)


def _check_array(f: Field, state: TableState, kind: type) -> None:
    """Raise `ValueError` unless a state has an array of a kind, of the expected shape and dtype."""
    wanted = f.row_format.array(f.stack.physical_rows)
    # A slot that the whole stack shares has no rows: it is stored in its own shape, never packed.
    if not f.shape.per_row:
        wanted = jax.ShapeDtypeStruct(f.shape.shape, storage.stored_dtype(f.shape.dtype))
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
        what = f"state: {f.label}"
        raise ValueError(message(what, expected=expected, got=got, remedy=_OWN_STATE))

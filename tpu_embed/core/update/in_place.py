"""Check that a training step updates its tables in their own memory.

A copy of a table takes as long as a hundred steps, but the results are right, so only the time
shows it. XLA copies a table when the old rows are still needed after the update: the state was not
donated, the old rows are looked up once more, or they are returned. To find such copies, the step
is compiled, and its program is searched for copies as large as a table. The reason is found in the
step's jaxpr, which lists every use of the old rows in program order.

Input: a user's jitted step and its arguments. Output: nothing, or an error that names the tables
that would be copied, and the reason.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tpu_embed._checks import message
from tpu_embed._jaxprs import CALLS, flow, inner_jaxprs, scan_counts
from tpu_embed.core.layout import Layout, Stack
from tpu_embed.core.state import Field, fields
from tpu_embed.core.update.donation import unwarned

LOOKUP, UPDATE = "tpu_embed_lookup", "tpu_embed_update"
"""Names of the engine's programs; they identify its calls in a jaxpr."""

_REMEDIES = {
    "donated": "jit the step with donate_argnums of the state (nnx.jit: of the model)",
    LOOKUP: "look up before the update, or in the new state",
    UPDATE: "give the second update the state that the first one returned",
    "nested": "call the function that looks it up without its own jit",
    "returned": "return the new state alone",
    "used": "read it in a jit of its own, or from the new state",
}
_WHY = {
    "donated": "the state is not donated",
    LOOKUP: "it is looked up again after its update",
    UPDATE: "it is updated twice",
    "nested": "it is looked up in a nested jit, and XLA does not know that this comes first",
    "returned": "its old rows are returned",
    "used": "its old rows are used by something other than lookups",
}


def named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the function with another name, which its programs and profiles then show."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    call.__name__ = call.__qualname__ = name
    return call


class _Held(NamedTuple):
    """A table or slot among a step's arguments.

    Attributes:
      field: the table or slot.
      inputs: positions of the flattened arguments that are it; of all those with its shape and
        dtype where the arguments have no names.
    """

    field: Field
    inputs: list[int]


def check_in_place(
    step: Any, args: Sequence[Any], kwargs: Mapping[str, Any], layout: Layout
) -> None:
    """Raise `ValueError` if a step would copy tables; see `EmbeddingEngine.check_in_place`."""
    if not hasattr(step, "trace"):
        got, remedy = getattr(step, "__name__", type(step).__name__), _REMEDIES["donated"]
        raise ValueError(message("step", expected="a jitted function", got=got, remedy=remedy))
    traced = step.trace(*args, **kwargs)
    with unwarned():
        lowered = traced.lower()
    leaves = jax.tree_util.tree_flatten_with_path(lowered.args_info)[0]
    held = [h for f in fields(layout) if f.shape.per_row and (h := _held(f, leaves)).inputs]
    if not held:
        expected, got = "a state of this engine among the arguments", "none"
        raise ValueError(message("step", expected=expected, got=got))
    copied = _copied_shapes(lowered.compile().as_text())
    # Tables and slots with the shape of some copy, by the reasons for it (empty if none is found).
    suspects: dict[tuple[str, ...], list[_Held]] = {}
    for one in held:
        if _local_format(one.field) in copied:
            donated = all(leaves[i][1].donated for i in one.inputs)
            reasons = _reasons(traced.jaxpr.jaxpr, one.inputs) if donated else ("donated",)
            suspects.setdefault(reasons, []).append(one)
    if suspects:
        got, remedy = _described(suspects)
        raise ValueError(message("step", expected="updates in place", got=got, remedy=remedy))


def _described(suspects: dict[tuple[str, ...], list[_Held]]) -> tuple[str, str]:
    """Return the description of tables and slots that may be copied, and the remedy.

    The compiled program tells only shape and dtype of a copy, which several tables may share. If
    there is a reason for one of them, that one explains the copy, and the others are not named.
    """
    # Example: tables a and b are both f32[1000,64], and only a is looked up after its update. Then
    # the copy is a's, and b is left out although a copy of its shape was found.
    explained = {_local_format(one.field) for why, some in suspects.items() if why for one in some}
    found, remedies = [], []
    for why, some in suspects.items():
        named = [
            one.field.label for one in some if why or _local_format(one.field) not in explained
        ]
        if named:
            words = " and ".join(_WHY[reason] for reason in why) or "XLA keeps the old rows"
            found.append(f"a copy of {', of '.join(named)}, because {words}")
            remedies += [_REMEDIES[reason] for reason in why]
    return "; ".join(found), ", and ".join(dict.fromkeys(remedies))


def _held(field: Field, leaves: Sequence[tuple[Any, Any]]) -> _Held:
    """Return where a table or slot is among a step's flattened arguments.

    A path that ends with the keys of the state, as in `state.tables["items@…"]`, identifies it.
    flax passes lists of arrays without names; then all with its shape and dtype are taken.

    Args:
      field: the table or slot.
      leaves: path and abstract value of every flattened argument.
    """
    array = field.row_format.array(field.stack.physical_rows)
    alike = [
        i
        for i, (_, leaf) in enumerate(leaves)
        if (leaf.shape, leaf.dtype) == (array.shape, array.dtype)
    ]
    named = [i for i in alike if _is_at(leaves[i][0], field.stack, field.slot)]
    anywhere = any(_is_at(path, field.stack, None) for path, _ in leaves)
    return _Held(field, named if anywhere else alike)


def _is_at(path: Sequence[Any], stack: Stack, slot: str | None) -> bool:
    """Return whether a path ends with the keys that a table or slot has in a `TableState`."""
    # Keys of dictionaries have `key`, fields of dataclasses have `name`; positions have neither.
    keys = [getattr(part, "key", getattr(part, "name", None)) for part in path]
    wanted = ["tables", stack.name] if slot is None else ["slots", stack.name, slot]
    return keys[-len(wanted) :] == wanted


# -- the compiled program --------------------------------------------------------------------------


# Matches "%c = f32[1000,64]{1,0} copy(%p)" and "= f32[1000,64]{1,0} copy-start(%p)"; and, where the
# result is a tuple, "= (f32[1000,64]{1,0}, …) copy-start(%p)".
_COPY = re.compile(
    r"= (\w+\[[\d,]*\])\S* copy(?:-start)?\(|= \((\w+\[[\d,]*\])\S*, .* copy-start\("
)
_HLO_NAMES = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "uint16": "u16"}


def _copied_shapes(hlo: str) -> set[str]:
    """Return dtype and shape of every array that an HLO text copies, such as "f32[1000,64]"."""
    # The second is that of a copy-start, whose result is a tuple that begins with the copy.
    return {match[1] or match[2] for match in _COPY.finditer(hlo)}


def _local_format(field: Field) -> str:
    """Return dtype and shape of one device's part of a table or slot, as HLO text writes them."""
    array = field.row_format.array(field.stack.num_rows)
    dtype = np.dtype(array.dtype).name
    return f"{_HLO_NAMES.get(dtype, dtype)}[{','.join(map(str, array.shape))}]"


# -- the traced program ----------------------------------------------------------------------------


def _reasons(jaxpr: Any, inputs: Sequence[int]) -> tuple[str, ...]:
    """Return why the old rows of some inputs are needed beyond their update, as keys of `_WHY`."""
    found: list[str] = []
    for i in inputs:
        uses = list(_uses(jaxpr, jaxpr.invars[i]))
        first = uses.index(UPDATE) if UPDATE in uses else len(uses)
        # uses is in program order, such as (LOOKUP, UPDATE, LOOKUP, "returned"). What comes after
        # the first update is a reason. A lookup before it is not, but a nested lookup and other
        # uses are even there, because XLA does not know that they come first.
        found += [u for n, u in enumerate(uses) if n > first or u in ("nested", "used")]
    return tuple(dict.fromkeys(found))


def _uses(jaxpr: Any, var: Any) -> list[str]:
    """Return the uses of a variable of a jaxpr, in program order, as keys of `_WHY`."""
    uses: list[str] = []

    def rule(eqn: Any, held: list[bool]) -> tuple[()]:
        uses.extend(_uses_at(eqn, [i for i, one in enumerate(held) if one]))
        return ()

    returned = any(flow(jaxpr, {var: True}, rule, False))
    return [*uses, *["returned"] * returned]


def _uses_at(eqn: Any, places: Sequence[int]) -> list[str]:
    """Return the uses that an equation makes of operands, given by their positions."""
    name = eqn.params.get("name")
    if name in (LOOKUP, UPDATE):
        return [name]
    if eqn.primitive.name not in (*CALLS, "scan"):
        return ["used"]
    # Follow each operand to the input at the same position of the jaxpr inside.
    jaxpr = inner_jaxprs(eqn)[0].jaxpr
    if eqn.primitive.name == "scan":
        return [use for i in places for use in _uses_in_scan(eqn, jaxpr, i)]
    inside = [use for i in places for use in _uses(jaxpr, jaxpr.invars[i])]
    apart = LOOKUP in inside and UPDATE not in inside
    return ["nested"] if apart else inside


def _uses_in_scan(eqn: Any, body: Any, place: int) -> list[str]:
    """Return the uses that a scan's body makes of an operand."""
    # Operands of a scan: constants, then the initial carry, then the arrays it scans over. The
    # parameters of its body are in the same order; outvars begin with the new carry.
    fixed, carried = scan_counts(eqn)
    inside = _uses(body, body.invars[place])
    kept = fixed <= place < fixed + carried
    # A carry that the body returns as it is has not been returned from the step.
    if kept and body.outvars[place - fixed] is body.invars[place]:
        inside.remove("returned")
    return inside

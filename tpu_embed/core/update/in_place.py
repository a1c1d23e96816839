"""Does a training step update its tables in their own memory? Its compiled program says so.

A copied table costs a hundred steps, and nothing but the time tells. XLA copies a table when its
old rows are still wanted after the update: they were not donated, they are looked up once more, or
they are returned. So the step is compiled, copies as large as a table are found in its program, and
its jaxpr, which is in program order, says what else the old rows are used for.

Input: a user's jitted step and its arguments. Output: nothing, or an error that names the tables,
what would be copied, and why.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal

from tpu_embed._checks import message
from tpu_embed._jaxprs import CALLS, inner_jaxpr, scan_counts
from tpu_embed.core.layout import Layout, Stack
from tpu_embed.core.state import Field, fields

__all__ = ["LOOKUP", "UPDATE", "check_in_place", "named"]

LOOKUP, UPDATE = "tpu_embed_lookup", "tpu_embed_update"
"""Names of the engine's programs, by which they are known in a jaxpr."""

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
    "used": "its old rows are used by something else than lookups",
}


def named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the function under a name that its programs and profiles show."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    call.__name__ = call.__qualname__ = name
    return call


class _Held(NamedTuple):
    """A table or slot among a step's arguments.

    Attributes:
      field: which one.
      inputs: numbers of the flattened arguments that are it, or have its form if nobody can tell.
    """

    field: Field
    inputs: list[int]


def check_in_place(
    step: Any, args: Sequence[Any], kwargs: Mapping[str, Any], layout: Layout
) -> None:
    """See `EmbeddingEngine.check_in_place`."""
    if not hasattr(step, "trace"):
        got, remedy = getattr(step, "__name__", type(step).__name__), _REMEDIES["donated"]
        raise ValueError(message("step", expected="a jitted function", got=got, remedy=remedy))
    traced = step.trace(*args, **kwargs)
    lowered = traced.lower()
    leaves = jax.tree_util.tree_flatten_with_path(lowered.args_info)[0]
    held = [h for f in fields(layout) if f.shape.per_row and (h := _held(f, leaves)).inputs]
    if not held:
        expected, got = "a state of this engine among the arguments", "none"
        raise ValueError(message("step", expected=expected, got=got))
    copied = _copied_forms(lowered.compile().as_text())
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
    """Return what is said of tables and slots that may be copied, and the remedy.

    A copy is known by its form alone. If the reason is known for one of the tables and slots of a
    form, it explains the copy, and the others are not suspected.
    """
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
    """Return where a table or slot is among flattened arguments, each with its path.

    Its key in the state is known by the path; flax hands over lists of arrays without names, of
    which those of its form are taken.
    """
    form = field.row_format.array(field.stack.physical_rows)
    alike = [
        i
        for i, (_, leaf) in enumerate(leaves)
        if (leaf.shape, leaf.dtype) == (form.shape, form.dtype)
    ]
    named = [i for i in alike if _is_at(leaves[i][0], field.stack, field.slot)]
    anywhere = any(_is_at(path, field.stack, None) for path, _ in leaves)
    return _Held(field, named if anywhere else alike)


def _is_at(path: Sequence[Any], stack: Stack, slot: str | None) -> bool:
    keys = [getattr(part, "key", getattr(part, "name", None)) for part in path]
    wanted = ["tables", stack.name] if slot is None else ["slots", stack.name, slot]
    return keys[-len(wanted) :] == wanted


# -- the compiled program --------------------------------------------------------------------------


_COPY = re.compile(
    r"= (\w+\[[\d,]*\])\S* copy(?:-start)?\(|= \((\w+\[[\d,]*\])\S*, .* copy-start\("
)
_HLO_NAMES = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "uint16": "u16"}


def _copied_forms(hlo: str) -> set[str]:
    """Return what is copied in an HLO text, such as "f32[1000,64]"."""
    return {match[1] for match in _COPY.finditer(hlo)}


def _local_format(field: Field) -> str:
    """Return the form of one device's part of a table or slot, as an HLO text has it."""
    form = field.row_format.array(field.stack.num_rows)
    dtype = np.dtype(form.dtype).name
    return f"{_HLO_NAMES.get(dtype, dtype)}[{','.join(map(str, form.shape))}]"


# -- the traced program ----------------------------------------------------------------------------


def _reasons(jaxpr: Any, inputs: Sequence[int]) -> tuple[str, ...]:
    """Return what keeps the rows of inputs alive beyond their update, as keys of `_WHY`."""
    found: list[str] = []
    for i in inputs:
        uses = list(_uses(jaxpr, jaxpr.invars[i]))
        first = uses.index(UPDATE) if UPDATE in uses else len(uses)
        # In program order: a lookup at the top is no reason before the update, others always are.
        found += [u for n, u in enumerate(uses) if n > first or u in ("nested", "used")]
    return tuple(dict.fromkeys(found))


def _uses(jaxpr: Any, var: Any) -> Iterator[str]:
    """Yield what a variable is used for, in program order, as keys of `_WHY`."""
    for eqn in jaxpr.eqns:
        places = [i for i, operand in enumerate(eqn.invars) if operand is var]
        if not places:
            continue
        name = eqn.params.get("name")
        if name in (LOOKUP, UPDATE):
            yield name
        elif eqn.primitive.name in CALLS:
            inner, _ = inner_jaxpr(eqn)
            inside = [use for i in places for use in _uses(inner, inner.invars[i])]
            apart = LOOKUP in inside and UPDATE not in inside
            yield from ["nested"] if apart else inside
        elif eqn.primitive.name == "scan":
            yield from _uses_in_scan(eqn, places)
        else:
            yield "used"
    if any(out is var for out in jaxpr.outvars if not isinstance(out, Literal)):
        yield "returned"


def _uses_in_scan(eqn: Any, places: Sequence[int]) -> Iterator[str]:
    """Yield what a scan's body does with operands; those it carries are new in every iteration."""
    fixed, carried = scan_counts(eqn)
    body = eqn.params["jaxpr"].jaxpr
    for i in places:
        inside = list(_uses(body, body.invars[i]))
        unchanged = fixed <= i < fixed + carried and body.outvars[i - fixed] is body.invars[i]
        if unchanged:  # it is carried along as it is
            inside.remove("returned")
        yield from inside

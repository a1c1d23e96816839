"""Check that a training step updates its tables in their own memory.

A copy of a table takes as long as a hundred steps, but the results are right, so only the time
shows it. XLA copies a table when the old rows are still needed after the update: the state was not
donated, the old rows are looked up once more, or they are returned. To find such copies, the step
is compiled, and its program is searched for copies as large as a table. The reason is found in the
step's jaxpr, which lists every use of the old rows in program order.

Programs whose state was not donated are found without being asked for: an update binds a primitive
that computes nothing, and whose lowering looks at the arguments that have the shapes of the tables.

Input: a user's jitted step and its arguments. Output: nothing, or an error that names the tables
that would be copied, and the reason.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from tpu_embed._checks import message, warn_user
from tpu_embed._jaxprs import CALLS, flow, inner_jaxprs, scan_counts
from tpu_embed._types import Array
from tpu_embed.core.layout import Layout, Stack
from tpu_embed.core.state import Field, fields

# -- programs whose state is not donated -----------------------------------------------------------


LARGE = 2**26
"""Bytes of tables and slots, 64 MiB, from which on a copy in each step is worth a warning."""

_DONATED = ("tf.aliasing_output", "jax.buffer_donor")
"""Attributes of the arguments that a program may reuse."""

_ELEMENTS = {
    "float32": "f32",
    "float64": "f64",
    "bfloat16": "bf16",
    "uint16": "ui16",
    "uint32": "ui32",
    "int32": "i32",
    "uint8": "ui8",
}
"""The dtypes of tables and slots, as compilers name them."""

_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


@contextlib.contextmanager
def unwarned() -> Iterator[None]:
    """Lower programs without a warning: nobody will run them."""
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)


def note_copies(number: Array, arrays: Sequence[Array]) -> Array:
    """Return the number; the program that computes it is looked at when it is lowered.

    Args:
      number: anything that the program returns.
      arrays: the tables and slots that it updates.
    """
    forms = tuple((x.shape, str(x.dtype)) for x in arrays)
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
    return _noted.bind(number, forms=forms) if size >= LARGE else number


_noted = Primitive("tpu_embed_update_donation")
_noted.def_impl(lambda number, **_: number)
_noted.def_abstract_eval(lambda number, **_: number)
batching.primitive_batchers[_noted] = lambda values, axes, **forms: (
    _noted.bind(*values, **forms),
    axes[0],
)


def _lower(context: Any, number: Any, *, forms: tuple[tuple[tuple[int, ...], str], ...]) -> Any:
    exports = context.module_context.lowering_parameters.for_export
    if not exports and not _quiet.get():
        copied = _copied(context, forms)
        if copied >= LARGE:
            warn_user(
                f"update: this program copies {copied / 2**20:,.0f} MiB of tables and slots in "
                "each step, because the state is not donated: jax.jit(step, donate_argnums=0), "
                "where the state is the first argument; outside a jit, engine.update_in_place"
            )
    return [number]


def _copied(context: Any, forms: Sequence[tuple[tuple[int, ...], str]]) -> int:
    """Return the bytes of the arrays that are arguments of the program, and not donated.

    An array that is no argument, because the program itself makes it or takes it out of a larger
    one, counts as none. Of several arguments of one shape it is enough that one is donated.
    """
    main = next(
        (op for op in context.module_context.module.body.operations if _name(op) == "main"), None
    )
    if main is None or "arg_attrs" not in main.attributes:
        return 0
    donated: dict[str, bool] = {}
    kinds = main.attributes["function_type"].value.inputs
    for kind, attributes in zip(kinds, main.attributes["arg_attrs"], strict=True):
        may_reuse = any(name in attributes for name in _DONATED)
        donated[str(kind)] = donated.get(str(kind), False) or may_reuse
    total = 0
    for shape, dtype in forms:
        # The type of an argument, such as tensor<1000x16xf32>.
        kind = "x".join([*map(str, shape), _ELEMENTS.get(dtype, "?")])
        if donated.get(f"tensor<{kind}>", True) is False:
            total += math.prod(shape) * jnp.dtype(dtype).itemsize
    return total


def _name(operation: Any) -> str:
    return str(operation.attributes["sym_name"]).strip('"')


mlir.register_lowering(_noted, _lower)


# -- steps that copy tables ------------------------------------------------------------------------


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

"""Check that a training step updates its tables in their own memory.

A copy of a table takes as long as a hundred steps, but the results are right, so only the time
shows it. XLA copies a table when the old rows are still needed after the update: the state was not
donated, the old rows are looked up once more, or they are returned. To find such copies, the step
is compiled, and its program is searched for copies as large as a table.

Programs whose state was not donated are found without being asked for: an update binds a primitive
that computes nothing, and whose lowering looks at the arguments that have the shapes of the tables.

Input: a user's jitted step and its arguments. Output: nothing, or an error that names the tables
that may be copied, whether they are donated, and the remedy.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from tpu_embed._checks import refuse, warn_user
from tpu_embed._types import Array
from tpu_embed.core.layout import Layout, Stack
from tpu_embed.core.state import Field, fields

# -- programs whose state is not donated -----------------------------------------------------------


LARGE = 2**26
"""Bytes of tables and slots, 64 MiB, from which on a copy in each step is worth a warning."""

_DONATED = ("tf.aliasing_output", "jax.buffer_donor")
"""Attributes of the arguments that a program may reuse."""

_quiet: ContextVar[bool] = ContextVar("quiet", default=False)
"""Whether programs are lowered that nobody will run, so that they need no warning."""


def note_copies(number: Array, arrays: Sequence[Array]) -> Array:
    """Return the number; the program that computes it is looked at when it is lowered.

    Args:
      number: anything that the program returns.
      arrays: the tables and slots that it updates.
    """
    forms = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
    size = sum(x.size * x.dtype.itemsize for x in forms)
    return _noted.bind(number, forms=forms) if size >= LARGE else number


_noted = Primitive("tpu_embed_update_donation")
_noted.def_impl(lambda number, **_: number)
_noted.def_abstract_eval(lambda number, **_: number)
batching.primitive_batchers[_noted] = lambda values, axes, **forms: (
    _noted.bind(*values, **forms),
    axes[0],
)


def _lower(
    context: Any, number: Any, *, forms: tuple[jax.ShapeDtypeStruct, ...]
) -> Any:
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


def _copied(context: Any, forms: Sequence[jax.ShapeDtypeStruct]) -> int:
    """Return the bytes of the arrays that are arguments of the program, and not donated.

    An array that is no argument, because the program itself makes it or takes it out of a larger
    one, counts as none. Of several arguments of one shape it is enough that one is donated.
    """
    main = next(
        (
            op
            for op in context.module_context.module.body.operations
            if _name(op) == "main"
        ),
        None,
    )
    if main is None or "arg_attrs" not in main.attributes:
        return 0
    given = {
        (str(kind), any(name in attributes for name in _DONATED))
        for kind, attributes in zip(
            main.attributes["function_type"].value.inputs,
            main.attributes["arg_attrs"],
            strict=True,
        )
    }
    # The type of an argument, such as tensor<1000x16xf32>.
    kinds = [
        f"tensor<{'x'.join([*map(str, form.shape), str(mlir.dtype_to_ir_type(form.dtype))])}>"
        for form in forms
    ]
    return sum(
        form.size * form.dtype.itemsize
        for kind, form in zip(kinds, forms, strict=True)
        if (kind, False) in given and (kind, True) not in given
    )


def _name(operation: Any) -> str:
    return str(operation.attributes["sym_name"]).strip('"')


mlir.register_lowering(_noted, _lower)


# -- steps that copy tables ------------------------------------------------------------------------


LOOKUP, UPDATE = "tpu_embed_lookup", "tpu_embed_update"
"""Names of the engine's programs, by which a user finds its calls in a jaxpr or a profile."""

_DONATE = "jit the step with donate_argnums of the state (nnx.jit: of the model)"
_USE_ONCE = (
    "use the state before its update alone: look up before the update or in the new state, without "
    "a jit around the lookup; give a second update the state that the first one returned; return "
    "the new state alone; and read its rows in a jit of their own, or from the new state"
)


def named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the function with another name, which its programs and profiles then show."""

    @functools.wraps(function)
    def call(*args):
        return function(*args)

    call.__name__ = call.__qualname__ = name
    return call


def check_in_place(
    step: Any, args: Sequence[Any], kwargs: Mapping[str, Any], layout: Layout
) -> None:
    """Raise `ValueError` if a step would copy tables; see `EmbeddingEngine.check_in_place`."""
    if not hasattr(step, "trace"):
        refuse(
            "step",
            expected="a jitted function",
            got=getattr(step, "__name__", type(step).__name__),
            remedy=_DONATE,
        )
    token = _quiet.set(True)
    try:
        lowered = step.trace(*args, **kwargs).lower()
    finally:
        _quiet.reset(token)
    leaves = jax.tree_util.tree_flatten_with_path(lowered.args_info)[0]
    held = [
        (f, own)
        for f in fields(layout)
        if f.shape.per_row and (own := _held(f, leaves))
    ]
    if not held:
        refuse(
            "step", expected="a state of this engine among the arguments", got="none"
        )
    # The compiled program tells only shape and dtype of a copy, which several may share.
    copies = _copied_shapes(lowered.compile().as_text())
    copied = [(f.label, own) for f, own in held if _local_format(f) in copies]
    kept = [label for label, own in copied if not all(one.donated for one in own)]
    why, remedy = "the state is not donated", _DONATE
    if not kept:
        kept, remedy = [label for label, _ in copied], _USE_ONCE
        why = "its old rows are used beside its update, or after it"
    if kept:
        refuse(
            "step",
            expected="updates in place",
            got=f"a copy of {', of '.join(kept)}, because {why}",
            remedy=remedy,
        )


def _held(field: Field, leaves: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Return the flattened arguments of a step that are a table or slot.

    A path that ends with the keys of the state, as in `state.tables["items@…"]`, identifies it.
    flax passes lists of arrays without names; then all with its shape and dtype are taken.

    Args:
      field: the table or slot.
      leaves: path and abstract value of every flattened argument.
    """
    array = field.row_format.array(field.stack.physical_rows)
    form = array.shape, array.dtype
    alike = [(path, leaf) for path, leaf in leaves if (leaf.shape, leaf.dtype) == form]
    if any(_is_at(path, field.stack, None) for path, _ in leaves):
        alike = [pair for pair in alike if _is_at(pair[0], field.stack, field.slot)]
    return [leaf for _, leaf in alike]


def _is_at(path: Sequence[Any], stack: Stack, slot: str | None) -> bool:
    """Return whether a path ends with the keys that a table or slot has in a `TableState`."""
    # Keys of dictionaries have `key`, fields of dataclasses have `name`; positions have neither.
    keys = [getattr(part, "key", getattr(part, "name", None)) for part in path]
    wanted = ["tables", stack.name] if slot is None else ["slots", stack.name, slot]
    return keys[-len(wanted) :] == wanted


# -- the compiled program --------------------------------------------------------------------------


# Matches "%c = f32[1000,64]{1,0} copy(%p)" and "= f32[1000,64]{1,0} copy-start(%p)"; and, where the
# result is a tuple that begins with the copy, "= (f32[1000,64]{1,0}, …) copy-start(%p)".
_COPY = re.compile(r"= \(?(\w+\[[\d,]*\])[^=\n]* copy(?:-start)?\(")


def _copied_shapes(hlo: str) -> set[str]:
    """Return dtype and shape of every array that an HLO text copies, such as "f32[1000,64]"."""
    return set(_COPY.findall(hlo))


def _local_format(field: Field) -> str:
    """Return dtype and shape of one device's part of a table or slot, as HLO text writes them."""
    array = field.row_format.array(field.stack.num_rows)
    # Floats are f32 or bf16 there, unsigned integers u16: bfloat16 is of no kind of NumPy's own.
    kind = {"V": "bf", "i": "s"}.get(array.dtype.kind, array.dtype.kind)
    return f"{kind}{8 * array.dtype.itemsize}[{','.join(map(str, array.shape))}]"

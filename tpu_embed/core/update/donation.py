"""Warn of programs that copy tables because their state was not donated.

An update writes rows in place if the program that it is part of may reuse the arrays of the state.
Tracing does not tell whether it may, but lowering does: then each argument of the program says
whether it is donated. So the update binds a primitive that computes nothing, and whose lowering
looks at the arguments that have the shapes of the tables.

Input: the arrays of a state. Output: a warning, at most once per program.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from tpu_embed._checks import warn_user
from tpu_embed._types import Array

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

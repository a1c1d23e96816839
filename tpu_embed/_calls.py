"""Call compiled programs from outside a jit, so that no result is lost and errors are clear.

A call that updates tables in place donates them: the old tables are gone once the program starts.
If an interrupt then came before the new ones are stored, both would be lost. And a device error
must look the same whichever way JAX calls the program.

Input: a jitted function and its operands. Output: its results, or a `JaxRuntimeError` if the
device failed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax

_T = TypeVar("_T")
_PACKAGE = f"{Path(__file__).parent}{os.sep}"
_STATUSES = ("INTERNAL: ", "INVALID_ARGUMENT: ", "RESOURCE_EXHAUSTED: ", "UNKNOWN: ", "ABORTED: ")
"""The first words of error messages of XLA's runtime."""


def call(program: Callable[..., _T], *operands: Any) -> _T:
    """Return `program(*operands)`.

    Args:
      program: a jitted function.
      operands: its arguments.

    Raises:
      JaxRuntimeError: the device failed.
      Exception: what was raised while the program was traced.
    """
    results: list[_T] = []
    call_into(results, program, *operands)
    return results[0]


def call_into(results: list[_T], program: Callable[..., _T], *operands: Any) -> None:
    """Append `program(*operands)` to `results`, without a point at which it can be interrupted.

    The interpreter raises KeyboardInterrupt, and exceptions sent by other threads, only between
    two bytecodes. Here one bytecode calls the program and stores its result. From the second call
    on, JAX runs no Python either, so an interrupted program has not started or has left its
    result.

    Args:
      results: the list to which the result is appended.
      program: a jitted function.
      operands: its arguments.

    Raises:
      JaxRuntimeError, Exception: as for `call`.
    """
    # starmap calls program(*operands) once, inside `extend`: both are written in C.
    try:
        results.extend(itertools.starmap(program, [operands]))
    except ValueError as error:
        # JAX's fast path, without Python, raises device errors as ValueError("INTERNAL: …").
        if str(error).startswith(_STATUSES) and _was_called(error):
            raise jax.errors.JaxRuntimeError(str(error)) from error
        raise


def is_device_error(error: Exception) -> bool:
    """Tell whether this error was raised by the device while a program ran.

    The place where it was raised decides, not its text: a Python function of the user, such as a
    learning rate, may raise the same class with any text.
    """
    return isinstance(error, jax.errors.JaxRuntimeError) and _was_called(error)


def _was_called(error: Exception) -> bool:
    """Tell whether this error was raised by a compiled program, not while it was traced.

    Tracing runs Python code of this package, whose frames are then below this file's frame in the
    traceback.
    """
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    below = list(itertools.dropwhile(lambda file: file != __file__, files))
    return bool(below) and {file for file in below if file.startswith(_PACKAGE)} == {__file__}


def label(what: str, name: str | None) -> str:
    """Return how profiles and errors name a call.

    Args:
      what: the method.
      name: the user's name for the call, or None.
    """
    return what if name is None else f"{what} {name!r}"


@contextlib.contextmanager
def labelled(what: str, name: str | None) -> Iterator[None]:
    """Label the profile of a call, and the exceptions that it raises.

    Args:
      what: the label.
      name: the user's name for the call, or None; only a name is added to exceptions.
    """
    try:
        with jax.profiler.TraceAnnotation(what):
            yield
    except Exception as error:
        if name is not None and what not in str(error):
            error.add_note(f"raised by {what}")
        raise

"""Calls of compiled programs from outside a jit: what they raise, and that nothing of them is lost.

Input: a jitted function and its operands. Output: its results, or a `JaxRuntimeError` if the device
failed.
"""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax

_T = TypeVar("_T")
_PACKAGE = f"{Path(__file__).parent}{os.sep}"
_STATUSES = ("INTERNAL: ", "INVALID_ARGUMENT: ", "RESOURCE_EXHAUSTED: ", "UNKNOWN: ", "ABORTED: ")
"""How messages of XLA's runtime begin."""


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
    """Append `program(*operands)` to the results, with no bytecode between the two.

    The interpreter raises KeyboardInterrupt, and what other threads raise in this one, between
    bytecodes. So a program that JAX calls without Python, as it does from the second call on,
    either has not started or has left its result.

    Args:
      results: grows by one.
      program: a jitted function.
      operands: its arguments.

    Raises:
      JaxRuntimeError, Exception: as for `call`.
    """
    try:
        results.extend(itertools.starmap(program, [operands]))
    except ValueError as error:
        # JAX's call without Python makes a device error a ValueError that begins with a status.
        if str(error).startswith(_STATUSES) and _was_called(error):
            raise jax.errors.JaxRuntimeError(str(error)) from error
        raise


def is_device_error(error: Exception) -> bool:
    """Tell whether the device raised this in a call of a program.

    Where it was raised decides, not what it says: what a learning rate raises is no device error.
    """
    return isinstance(error, jax.errors.JaxRuntimeError) and _was_called(error)


def _was_called(error: Exception) -> bool:
    """Tell whether this was raised by a program that was called, and not while it was traced.

    What is traced is Python of this package, whose frames then stand below this file's.
    """
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    below = list(itertools.dropwhile(lambda file: file != __file__, files))
    return bool(below) and {file for file in below if file.startswith(_PACKAGE)} == {__file__}

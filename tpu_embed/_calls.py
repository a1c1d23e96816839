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
from typing import Any, Generic, TypeVar

import jax

_T = TypeVar("_T")
_PACKAGE = f"{Path(__file__).parent}{os.sep}"
_STATUSES = (
    "INTERNAL: ",
    "INVALID_ARGUMENT: ",
    "RESOURCE_EXHAUSTED: ",
    "UNKNOWN: ",
    "ABORTED: ",
)
"""The first words of error messages of XLA's runtime."""


class Exchange(Generic[_T]):
    """Work that gives arrays away to programs and gets others; an interrupt loses none of them.

    The interpreter raises KeyboardInterrupt, and exceptions sent by other threads, only between two
    bytecodes. Here one bytecode calls a program and stores its result. So a program that was
    interrupted has not started or has left its result, and `run` may be called again: programs that
    were called before are not called again. Two things are asked of a program. It returns arrays in
    lists, plain tuples and dicts, because JAX builds anything else by Python code. And it has run
    before: the first call of each shape runs Python code of JAX.

    Args:
      work: is given `call`, which it calls with each program and its operands, of each program
        once; it returns what `run` returns. Whatever else it does may be done again.

    Example:
      >>> double = jax.jit(lambda x: (2 * x,), donate_argnums=0)
      >>> exchange = Exchange(lambda call: call(double, jax.numpy.ones(2))[0])
      >>> exchange.begun, exchange.run().tolist(), exchange.begun
      (False, [2.0, 2.0], True)
    """

    def __init__(self, work: Callable[[Callable[..., Any]], _T]) -> None:
        self._work = work
        self._results: dict[Callable[..., Any], Any] = {}

    @property
    def begun(self) -> bool:
        """Whether a program has left its result, so that what it was given may be gone."""
        return bool(self._results)

    def run(self) -> _T:
        """Do the work, or what is left of it.

        Raises:
          JaxRuntimeError: the device failed.
          Exception: what was raised while a program was traced, or by the work.
        """
        return self._work(self._call)

    def _call(self, program: Callable[..., Any], *operands: Any) -> Any:
        """Return what a program returns, or has returned before."""
        if program not in self._results:
            try:
                # starmap calls program(*operands) once, inside `update`: all is written in C.
                found = itertools.starmap(program, [operands])
                self._results.update(zip([program], found, strict=True))
            except ValueError as error:
                # Without Python code, JAX raises device errors as ValueError("INTERNAL: …").
                if str(error).startswith(_STATUSES) and _was_called(error):
                    raise jax.errors.JaxRuntimeError(str(error)) from error
                raise
        return self._results[program]


def call(program: Callable[..., _T], *operands: Any) -> _T:
    """Return `program(*operands)`.

    Args:
      program: a jitted function.
      operands: its arguments.

    Raises:
      JaxRuntimeError, Exception: as for `Exchange.run`.
    """
    return Exchange(lambda run: run(program, *operands)).run()


def is_device_error(error: Exception) -> bool:
    """Tell whether this error was raised by the device while a program ran.

    The place where it was raised decides, not its text: a Python function of the user, such as a
    learning rate, may raise the same class with any text.
    """
    return isinstance(error, jax.errors.JaxRuntimeError) and _was_called(error)


def _was_called(error: Exception) -> bool:
    """Tell whether this error was raised by a compiled program, not while it was traced.

    Tracing runs Python code of this package, whose frames are then below this file's frames in the
    traceback.
    """
    files = [
        frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    return [file for file in files if file.startswith(_PACKAGE)][-1:] == [__file__]


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

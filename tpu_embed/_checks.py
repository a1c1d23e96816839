"""Validation helpers: small predicates, and one wording for every error.

An error says which argument or feature is wrong, what was expected, what was got, and what to do
about it, always in this order. So users learn once how to read all of them.

Input: values to check. Output: the values, or an error.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import numbers
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import checkify

from tpu_embed._types import Array, Tracer

_T = TypeVar("_T")
_NOT_THE_USERS = tuple(
    f"{Path(one).parent}{os.sep}" for one in (__file__, jax.__file__)
)
"""Folders whose files are not the user's: ours, and those of JAX, which calls us while tracing."""

_MOST_LINES = 20
"""How many messages `message_of_many` shows at most."""

_unchecked: ContextVar[bool] = ContextVar("unchecked", default=False)


def message(what: str, *, expected: str, got: Any, remedy: str = "") -> str:
    """Return `what: expected …, got …; remedy`, the wording of every error of this package.

    Args:
      what: the argument, feature or table that is wrong.
      expected: what would have been right.
      got: what was given.
      remedy: what to do about it; empty if that is obvious.

    Example:
      >>> message("batch size", expected="a multiple of 8", got=13, remedy="use pad_batch")
      'batch size: expected a multiple of 8, got 13; use pad_batch'
    """
    text = f"{what}: expected {expected}, got {got}"
    return f"{text}; {remedy}" if remedy else text


def refuse(
    what: str,
    *,
    expected: str,
    got: Any,
    remedy: str = "",
    error: type[Exception] = ValueError,
    cause: BaseException | None = None,
) -> NoReturn:
    """Raise an error with the wording of `message`.

    Args:
      what, expected, got, remedy: as for `message`.
      error: the kind of the error.
      cause: what it was caught as, if anything.
    """
    text = message(what, expected=expected, got=got, remedy=remedy)
    # No name for the error: with its traceback it would be a cycle, which keeps what callers hold.
    if cause is not None:
        raise error(text) from cause
    raise error(text)


def message_of_many(what: str, messages: Sequence[str], *, remedy: str) -> str:
    """Join several messages about one thing: one line for each, and one line for the remedy.

    Args:
      what: what the messages are about.
      messages: at least one; if there are more than `_MOST_LINES`, only the first are shown.
      remedy: what to do about all of them.

    Example:
      >>> print(message_of_many("f", ["a: expected 1, got 2", "b: expected 3, got 4"], remedy="x"))
      f: a: expected 1, got 2
        b: expected 3, got 4
        x
    """
    if len(messages) == 1:
        return f"{what}: {messages[0]}; {remedy}"
    shown, left = messages[:_MOST_LINES], len(messages) - _MOST_LINES
    more = [f"and {left} more"] if left > 0 else []
    return f"{what}: " + "\n  ".join([*shown, *more, remedy])


def did_you_mean(word: Any, known: Iterable[str]) -> str:
    """Return a remedy for a misspelt word: "did you mean …?", or "" if none is similar.

    Args:
      word: what was given; something that is no word has no remedy.
      known: what could have been meant.

    Example:
      >>> did_you_mean("--topolgy", ["--json", "--topology"])
      'did you mean --topology?'
    """
    if not isinstance(word, str):
        return ""
    similar = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {similar[0]}?" if similar else ""


def explain_arguments(**ours: str) -> Callable[[_T], _T]:
    """Return a decorator of a class or function, which then explains arguments of TensorFlow's.

    Without it, such a call raises a `TypeError` that says no more than that there is no such
    argument.

    Args:
      ours: for each argument that is not taken here, what stands in its place.

    Example:
      >>> @explain_arguments(colour="kind=")
      ... def draw(kind): ...
      >>> draw(colour="red")
      Traceback (most recent call last):
      TypeError: draw: expected kind=, got colour=, which TensorFlow has; see docs/migrating.md
    """

    def decorate(target) -> Any:
        function = target.__init__ if isinstance(target, type) else target

        @functools.wraps(function)
        def call(*args, **kwargs):
            for name in ours.keys() & kwargs:
                refuse(
                    target.__qualname__,
                    expected=ours[name],
                    got=f"{name}=, which TensorFlow has",
                    remedy="see docs/migrating.md",
                    error=TypeError,
                )
            return function(*args, **kwargs)

        if not isinstance(target, type):
            return call
        target.__init__ = call
        return target

    return decorate


def is_int(value: Any) -> bool:
    """Tell whether `value` is an integer (Python or NumPy); a bool is not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Tell whether `value` is a real number (Python or NumPy scalar); a bool is not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_type(
    what: str,
    value: Any,
    kinds: Any,
    *,
    expected: str,
    remedy: str = "",
    error: type[Exception] = TypeError,
) -> None:
    """Check that a value is of a type, or of one of several.

    Args:
      what, expected, remedy, error: as for `refuse`.
      value: the value.
      kinds: as `isinstance` takes them.

    Raises:
      error: it is of none of them.
    """
    if not isinstance(value, kinds):
        refuse(
            what,
            expected=expected,
            got=type(value).__name__,
            remedy=remedy,
            error=error,
        )


def check_int(what: str, value: Any, *, minimum: int) -> int:
    """Return `value` as an int.

    Raises:
      ValueError: `value` is not an integer of at least `minimum`.
    """
    if not is_int(value) or value < minimum:
        refuse(what, expected=f"an integer >= {minimum}", got=repr(value))
    return int(value)


def check_integers(what: str, dtype: Any, *, expected: str = "integers") -> None:
    """Check that a dtype is one of integers.

    Args:
      what, expected: as for `refuse`.
      dtype: the dtype.

    Raises:
      TypeError: it is another one.
    """
    # NumPy counts differences of times among the integers.
    if not jax.numpy.issubdtype(dtype, np.integer) or dtype.kind == "m":
        refuse(what, expected=expected, got=f"{dtype}", error=TypeError)


def check_ids(what: str, given: Any) -> Array:
    """Return ids as a JAX array: those of a JAX array as they are, others in its widest integers.

    A list without ids counts as integers. Masked places of a NumPy array become -1.

    Args:
      what: what the ids are, for messages.
      given: integers of any shape.

    Raises:
      TypeError: they are not integers.
      ValueError: JAX would cut them to 32 bits.
    """
    array = (
        given if isinstance(given, jax.Array | np.ma.MaskedArray) else np.asarray(given)
    )
    if not isinstance(array, jax.Array) and not array.size:
        array = np.zeros(array.shape, np.int32)
    check_integers(what, array.dtype)
    if isinstance(array, jax.Array):
        return array
    bits = 64 if jax.config.read("jax_enable_x64") else 32
    known = array.compressed() if isinstance(array, np.ma.MaskedArray) else array
    if known.size and not (
        known.min() >= -(2 ** (bits - 1)) and known.max() < 2 ** (bits - 1)
    ):
        largest = max(known.max(), known.min(), key=lambda one: abs(int(one)))
        refuse(
            what,
            expected=f"ids of {bits} bits"
            + (" while x64 is off" if bits == 32 else ""),
            got=f"{largest}",
            remedy="number the keys: np.unique(keys, return_inverse=True)[1]",
        )
    signed = array.astype(np.int64 if bits == 64 else np.int32)
    return jax.numpy.asarray(np.ma.filled(signed, -1))


def check_same_ids(what: str, first: Array, second: Array) -> tuple[Array, Array]:
    """Return two arrays of ids in a dtype that holds both, so that they can be compared.

    Args:
      what: what the ids are, for messages.
      first: integers.
      second: integers.

    Raises:
      TypeError: there is no such dtype, as for int32 and uint32 while x64 is off.
    """
    wide = np.promote_types(first.dtype, second.dtype)
    off = wide.itemsize > 4 and not jax.config.read("jax_enable_x64")
    if off or not np.issubdtype(wide, np.integer):
        refuse(
            what,
            expected="ids of one dtype",
            got=f"{first.dtype} and {second.dtype}",
            remedy="cast both to int32",
            error=TypeError,
        )
    return first.astype(wide), second.astype(wide)


def check_choice(what: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """Return `value`.

    Raises:
      ValueError: `value` is none of `choices`.
    """
    if value not in choices:
        refuse(
            what,
            expected=" | ".join(repr(choice) for choice in choices),
            got=repr(value),
        )
    return value


def is_url(text: str) -> bool:
    """Return whether a path is a URL, which `Path` would take for a folder named "gs:"."""
    return re.match(r"[A-Za-z][\w+.-]+:/", text) is not None


def local_path(path: str | os.PathLike[str], what: str = "path") -> Path:
    """Return a path of a file system; refuse a URL.

    Raises:
      ValueError: it is a URL.

    Example:
      >>> local_path("run/20").name
      '20'
    """
    text = os.fspath(path)
    if is_url(text):
        refuse(
            what,
            expected="one of a file system",
            got=repr(text),
            remedy="use a disk, and copy whole folders to the bucket and from it",
        )
    return Path(text)


def check_key(what: str, key: Any) -> None:
    """Check that something is a jax PRNG key, or the data of one.

    Raises:
      TypeError: it is something else.
    """
    dtype = getattr(key, "dtype", None)
    if dtype is None or not (
        jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)
        or (dtype == np.uint32 and key.ndim)
    ):
        refuse(
            what,
            expected="a jax PRNG key",
            got=f"{type(key).__name__} {key!r}",
            remedy="jax.random.key(0) makes one",
            error=TypeError,
        )


def check_live(what: str, arrays: Iterable[Any]) -> None:
    """Check that no array was donated or deleted; a compiled program may crash on such an array.

    Args:
      what: what the arrays are, for messages.
      arrays: any values; those that are not arrays on devices are ignored.

    Raises:
      ValueError: an array was donated or deleted.
    """
    for array in arrays:
        if (
            isinstance(array, jax.Array)
            and not isinstance(array, Tracer)
            and array.is_deleted()
        ):
            refuse(
                what,
                expected="arrays that exist",
                got="one that was donated to an earlier call, or deleted",
                remedy="use what that call returned; donate_argnums says what a jit donates",
            )


def warn_user(text: str) -> None:
    """Warn with the line of the user's code that led here, whatever of ours and JAX's is between.

    Args:
      text: the warning.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(
        _NOT_THE_USERS
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def refuse_pickle(what: str, *, remedy: str) -> NoReturn:
    """Raise the error of an object that cannot be pickled.

    Args:
      what: the object's class.
      remedy: how to keep what it stands for.

    Raises:
      TypeError: always, as `pickle` itself does.
    """
    refuse(
        f"pickle of {what}",
        expected="plain data",
        got="an object with devices and compiled programs",
        remedy=remedy,
        error=TypeError,
    )


def refuse_derivatives(
    what: str, *, expected: str, got: str, remedy: str
) -> Callable[[_T], _T]:
    """Return an identity of pytrees that raises `TypeError` where it is differentiated.

    Args:
      what: as for `message`.
      expected: as for `message`.
      got: as for `message`.
      remedy: as for `message`.
    """

    @jax.custom_jvp
    def identity(tree):
        return tree

    @identity.defjvp
    def refused(primals, tangents):
        refuse(what, expected=expected, got=got, remedy=remedy, error=TypeError)

    return identity


def check_in_program(right: Array, text: str, **values: Array) -> None:
    """Let `jax.experimental.checkify` report wrong values that only a running program knows.

    Args:
      right: bool `[]`, whether the values are right.
      text: the message, in which `{name}` stands for one of the values.
      values: arrays by name.
    """
    if not _unchecked.get():
        checkify.debug_check(right, text, **values)


@contextlib.contextmanager
def unchecked_programs() -> Iterator[None]:
    """Within this context, trace programs without such reports, in this thread only.

    JAX cannot serialize a program that has them. A function that was jitted and traced before keeps
    those of that trace.
    """
    token = _unchecked.set(True)
    try:
        yield
    finally:
        _unchecked.reset(token)

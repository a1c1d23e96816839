"""The conventions of `jax.grad`, for our functions that differentiate a user's function.

Input: `argnums` and `has_aux` as a user gives them, and the result of the user's function.
Output: positions of arguments, a pair of value and aux, and the stack level of the user's line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from tpu_embed._checks import is_int, message

__all__ = ["level_of_caller", "positions", "value_and_aux"]


def positions(argnums: Any, count: int, *, remedy: str) -> tuple[int, ...]:
    """Return the positions of the arguments to differentiate by, counted from the first.

    Args:
      argnums: an int or a sequence of ints; negative ones count from the end.
      count: the number of positional arguments.
      remedy: the remedy that the error names.

    Returns:
      different numbers in [0, count).

    Raises:
      ValueError: a number in `argnums` is not that of an argument, or two are the same argument.
    """
    # Three arguments and argnums (0, -1): (0, 2).
    given = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
    wanted = all(is_int(i) and -count <= i < count for i in given)
    found = tuple(int(i) % count for i in given) if wanted else ()
    if not wanted or len(set(found)) != len(found):
        expected = f"different places among {count} positional arguments"
        raise ValueError(message("argnums", expected=expected, got=repr(argnums), remedy=remedy))
    return found


def value_and_aux(result: Any, *, has_aux: bool) -> tuple[Any, Any]:
    """Return a function's result as a pair of its value and aux.

    Args:
      result: what the function returned.
      has_aux: whether the result is a pair.

    Returns:
      the value, and aux; without `has_aux` aux is None.

    Raises:
      TypeError: `has_aux` is given, and the result is not a pair.
    """
    if not has_aux:
        return result, None
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            message(
                "has_aux=True: the function",
                expected="a pair of the value and aux",
                got=type(result).__name__,
                remedy="return (value, aux), or leave has_aux out",
            )
        )
    return result


def level_of_caller(inside: str) -> int:
    """Return the `stacklevel` with which the caller's warning names a line of the user's.

    Args:
      inside: the prefix of paths of our own files. Files of JAX are not the user's either.
    """
    # Walk outwards over the frames of ours and of JAX, which calls us back while tracing.
    level, frame = 1, sys._getframe(1)
    ours = (inside, str(Path(jax.__file__).parent))
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        level, frame = level + 1, frame.f_back
    return level

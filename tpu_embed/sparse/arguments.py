"""The conventions of `jax.grad`, for our functions that differentiate a user's function.

Input: `argnums` and `has_aux` as a user gives them, and the result of the user's function.
Output: positions of arguments, and a pair of value and aux.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpu_embed._checks import is_int, message


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
        raise ValueError(
            message(
                "argnums",
                expected=f"different places among {count} positional arguments",
                got=repr(argnums),
                remedy=remedy,
            )
        )
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

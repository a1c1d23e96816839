"""How functions that differentiate a user's function read its arguments, result and place.

Enters: `argnums` and `has_aux` as the user gave them. Leaves: places, a pair, and the line that
called. Called by
`sparse_grad.py` and `nn/`.
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
    """Return the places of the arguments to differentiate by, counted from the first.

    Args:
      argnums: an int or several.
      count: of positional arguments.
      remedy: for the error.

    Returns:
      different numbers in [0, count).

    Raises:
      ValueError: argnums that name no argument, or one twice.
    """
    given = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
    wanted = all(is_int(i) and -count <= i < count for i in given)
    found = tuple(int(i) % count for i in given) if wanted else ()
    if not wanted or len(set(found)) != len(found):
        expected = f"different places among {count} positional arguments"
        raise ValueError(message("argnums", expected=expected, got=repr(argnums), remedy=remedy))
    return found


def value_and_aux(result: Any, *, has_aux: bool) -> tuple[Any, Any]:
    """Return a function's result as a pair of its value and aux, None without.

    Args:
      result: what the function returned.
      has_aux: whether that is a pair.

    Returns:
      value and aux.

    Raises:
      TypeError: `has_aux`, and it is no pair.
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
    """Return the `stacklevel` at which a warning of who calls this names the user's line.

    Args:
      inside: how the paths of the files begin that are not the user's; JAX's are not either.
    """
    level, frame = 1, sys._getframe(1)
    ours = (inside, str(Path(jax.__file__).parent))
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        level, frame = level + 1, frame.f_back
    return level

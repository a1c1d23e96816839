"""The explicit state of an optimizer of a tree.

Leaves `init`, enters and leaves `apply_gradients`, and is read by `get_slot` and its like.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from tpu_embed._checks import message
from tpu_embed._types import Array, PyTree

__all__ = ["OptState", "check_state"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class OptState:
    """State of an `Optimizer`.

    Args:
      step: int32 `[]`, updates done.
      inner: the state of the optax transform over all parameters.
      structure: of the tree of parameters, static.
    """

    step: Array
    inner: PyTree
    structure: Any = dataclasses.field(metadata={"static": True})


def check_state(what: str, state: Any) -> None:
    """Refuse what is no `OptState`.

    Args:
      what: the optimizer's name, for messages.
      state: as the user gives it.

    Raises:
      TypeError: it is something else.
    """
    if not isinstance(state, OptState):
        got, remedy = type(state).__name__, "init(params) makes one, apply_gradients the next"
        raise TypeError(message(f"{what}: state", expected="an OptState", got=got, remedy=remedy))

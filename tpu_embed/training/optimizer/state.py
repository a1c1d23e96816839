"""The explicit state of an optimizer of a tree: what one step passes on to the next.

Input: none; `TreeOptimizer.init` makes the first state.
Output: `OptState`, a pytree that a user keeps beside the parameters.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from tpu_embed._checks import message
from tpu_embed._types import Array, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class OptState:
    """State of a `TreeOptimizer`.

    Args:
      step: int32 `[]`, the number of updates done.
      inner: the state of the optax transform over all parameters.
      structure: the structure of the parameter tree, a static field.
    """

    step: Array
    inner: PyTree
    structure: Any = dataclasses.field(metadata={"static": True})


def check_state(what: str, state: Any) -> None:
    """Check that a user gives an `OptState`.

    Args:
      what: the optimizer's name, for messages.
      state: the state that the user gives.

    Raises:
      TypeError: `state` is something else.
    """
    if not isinstance(state, OptState):
        raise TypeError(
            message(
                f"{what}: state",
                expected="an OptState",
                got=type(state).__name__,
                remedy="init(params) makes one, apply_gradients the next",
            )
        )

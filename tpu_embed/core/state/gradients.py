"""Refuse a gradient with respect to a state, with a remedy, before JAX refuses it without one.

`jax.grad(loss)(state)` first asks whether all leaves of the state are floats. The step is an
integer, so JAX would say that integers have no gradients. But the gradient of a table is what
nobody should ask for: it is as large as the table. So a state that is taken apart for this question
raises an error that says what to do instead.

Input: nothing; who asks is read from the stack of calls. Output: nothing, or an error.
"""

from __future__ import annotations

import inspect
import sys

import jax

from tpu_embed._checks import message

_TREE_FUNCTIONS = jax.tree_util.tree_leaves.__code__.co_filename
_ASKING = (inspect.unwrap(jax.value_and_grad).__code__.co_filename, "value_and_grad_f")
"""File and name of the function that `jax.grad` and `jax.value_and_grad` return."""


def refuse_gradient(what: str) -> None:
    """Raise the error of a function that is asked for a gradient with respect to a state.

    Args:
      what: the function.

    Raises:
      TypeError: always.
    """
    raise TypeError(
        message(
            what,
            expected="activations or weights to differentiate by",
            got="a TableState",
            remedy="give the activations' gradients to EmbeddingEngine.update; for tables that "
            "are plain arrays there is sparse_value_and_grad",
        )
    )


def refuse_jax_grad() -> None:
    """Refuse to take a state apart if `jax.grad` asks for its leaves.

    Raises:
      TypeError: `jax.grad` or `jax.value_and_grad` is asked for such a gradient.
    """
    # The stack: this function, the flattening of the state, JAX's functions of trees, who asks.
    # If a release of JAX changes them, its own error is back, and a test tells.
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename == _TREE_FUNCTIONS:
        frame = frame.f_back
    if (frame.f_code.co_filename, frame.f_code.co_name) == _ASKING:
        refuse_gradient("jax.grad")

"""A small computation that shows whether an optax transform is row-separable.

A transform is row-separable if its update of a row depends on that row alone. A clip by the global
norm, for example, is not. Nothing in a transform says which it is, so it is tried: two updates of
four rows, once row by row and once all together, must agree.

Input: an optax transform.
Output: nothing, or an error that says why a table cannot be trained with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpu_embed._checks import message
from tpu_embed._types import Array
from tpu_embed.optimizers._optax_calls import apply_transform, init_state, transform_name

_STEPS = 2
# One scale per row of the gradients. A norm over all rows is that of the last, so that a transform
# that divides by it changes the update of the first rows by orders of magnitude.
_SCALES = (1e-2, 1.0, 1e3, 1e9)
_DIM = 3
# Allows for two compiled programs and for bfloat16 states. A transform that mixes rows differs far
# more than that.
_TOLERANCE = 1e-2
_EXPECTED = "a row-separable transform"
_BELONGS = (
    "a transform that looks beyond the row belongs around the dense part of the model, "
    "or on the gradients before update"
)

InitLeaves = Callable[[Array], list[Array]]
UpdateLeaves = Callable[[Array, list[Array], Array], tuple[Array, list[Array]]]


def check_row_separable(
    transform: optax.GradientTransformation, init_leaves: InitLeaves, update_leaves: UpdateLeaves
) -> None:
    """Refuse a transform whose update of a row depends on other rows.

    Two updates of a few rows are computed twice: with the transform mapped over the rows, and with
    the transform applied to all rows as one leaf. Both results must agree.

    Args:
      transform: the transform.
      init_leaves: makes the states of rows `[n, D]`, mapped over the rows.
      update_leaves: updates rows and states, mapped over the rows.

    Raises:
      ValueError: the results differ, the transform cannot be mapped over rows, or it is a
        `MultiSteps`.
    """
    what = f"optimizer {transform_name(transform)!r}"
    _refuse_multi_steps(transform, what)

    def probe(rows: Array, gradients: Array) -> Any:
        one_by_one = _mapped(init_leaves, update_leaves, rows, gradients)
        return one_by_one, _whole(transform, rows, gradients)

    rows, gradients = _samples()
    # The optimizer may be constructed inside a user's jit: compute here and now nevertheless.
    try:
        with jax.ensure_compile_time_eval():
            mapped, whole = jax.device_get(jax.jit(probe)(rows, gradients))
    except Exception as error:
        reason = f"one that cannot be mapped over rows ({_first_line(error)})"
        hint = f"scalars of its state are shared by all rows and may not depend on them; {_BELONGS}"
        raise ValueError(message(what, expected=_EXPECTED, got=reason, remedy=hint)) from error
    if not _updates_agree(mapped[0], whole[0]) or not _states_agree(mapped[1], whole[1]):
        reason = "one whose update of a row, or its state, changes with the other rows"
        hint = f"{_BELONGS}; tpu_embed.optimizers.LAMB takes its norms per row"
        raise ValueError(message(what, expected=_EXPECTED, got=reason, remedy=hint))


def _refuse_multi_steps(transform: Any, what: str) -> None:
    """Raise `ValueError` for a `MultiSteps`, which its state shows also inside a chain."""
    multi = isinstance(transform, optax.MultiSteps)
    if not multi:
        row = jax.ShapeDtypeStruct((_DIM,), jnp.float32)
        try:
            state = jax.eval_shape(functools.partial(init_state, transform), row)
        except Exception as error:
            reason = f"one that fails on a row ({_first_line(error)})"
            expected = "a transform with a state for one row"
            raise ValueError(message(what, expected=expected, got=reason)) from error
        states = jax.tree.leaves(state, is_leaf=_is_multi_steps_state)
        multi = any(_is_multi_steps_state(leaf) for leaf in states)
    if multi:
        remedy = "a row that no id touches in a step would not be counted; use a larger batch, " + (
            "or accumulate activation gradients before update"
        )
        expected = "a transform that updates at every step"
        raise ValueError(message(what, expected=expected, got="optax.MultiSteps", remedy=remedy))


def _is_multi_steps_state(node: Any) -> bool:
    return isinstance(node, optax.MultiStepsState)


def _samples() -> tuple[np.ndarray, np.ndarray]:
    """Return rows `[n, D]` and gradients `[steps, n, D]`, float32, with no number near 0.

    From step to step the gradient of every second row changes sign, so that its inner product with
    the past gradient is negative in these rows and positive in the others.
    """
    # cos plus 1.5 times its sign: numbers with absolute values in [1.5, 2.5] and mixed signs.
    n = len(_SCALES)
    grid = np.arange(1, (1 + _STEPS) * n * _DIM + 1, dtype=np.float64)
    values = (np.cos(7.0 * grid) + 1.5 * np.sign(np.cos(7.0 * grid))).reshape(-1, n, _DIM)
    gradients = np.abs(values[1:]) * np.sign(values[1]) * np.asarray(_SCALES)[:, None]
    gradients[1::2, ::2] *= -1.0
    return values[0].astype(np.float32), gradients.astype(np.float32)


def _mapped(
    init: InitLeaves, update: UpdateLeaves, rows: Array, gradients: Array
) -> tuple[list[Array], list[Array]]:
    """Return the updates of each step and the leaves of the last state, row by row."""
    leaves, updates = init(rows), []
    for step in range(_STEPS):
        u, leaves = update(rows, leaves, gradients[step])
        rows = rows + u
        updates.append(u)
    return updates, leaves


def _whole(
    transform: optax.GradientTransformation, rows: Array, gradients: Array
) -> tuple[list[Array], list[Array]]:
    """Return the same as `_mapped`, with all rows as one leaf of a tree."""
    state, updates = init_state(transform, rows), []
    for step in range(_STEPS):
        u, state = apply_transform(transform, gradients[step], state, rows)
        rows = rows + jnp.asarray(u).astype(rows.dtype)
        updates.append(u)
    return updates, jax.tree.leaves(state)


def _updates_agree(one_by_one: list[np.ndarray], together: list[np.ndarray]) -> bool:
    return all(_agree(a, b) for a, b in zip(one_by_one, together, strict=True))


def _states_agree(one_by_one: list[np.ndarray], together: list[np.ndarray]) -> bool:
    """Return whether the states agree, as far as their leaves can be matched.

    A leaf that exists once for all rows must be the same in every row. Leaves of other shapes can't
    be matched; for them only the updates are compared.
    """
    # Mapped leaf [n, D] with a whole leaf [n, D] or [D]; mapped [n] with [n] or [].
    comparable = [
        (a, np.broadcast_to(b, a.shape))
        for a, b in zip(one_by_one, together, strict=True)
        if b.shape in (a.shape, a.shape[1:])
    ]
    return all(_agree(a, b) for a, b in comparable)


def _agree(one_by_one: np.ndarray, together: np.ndarray) -> bool:
    """Return whether two arrays `[n, ...]` agree, relative to the largest entry of each row."""
    if one_by_one.shape != together.shape:
        return False
    n = one_by_one.shape[0] if one_by_one.ndim else 1
    a, b = (np.asarray(x).astype(np.float64).reshape(n, -1) for x in (one_by_one, together))
    largest = np.max(np.abs(a), axis=-1, keepdims=True, initial=0.0)
    # Equal infinities differ by NaN, so equality and NaN in both are tested by themselves.
    close = np.abs(a - b) <= _TOLERANCE * largest
    return bool(np.all(close | (a == b) | (np.isnan(a) & np.isnan(b))))


def _first_line(error: Exception) -> str:
    return (
        f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        if str(error)
        else repr(error)
    )

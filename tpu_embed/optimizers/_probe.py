"""Tells by a small computation whether an optax transform is row-separable."""

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
_SCALES = (1e-2, 1.0, 1e3, 1e9)  # of the rows' gradients: a norm over all shows in the small ones
_DIM = 3
_TOLERANCE = 1e-2  # two compiled forms, bfloat16 states; one that mixes rows is off by far more
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

    Two updates of a few rows are computed with the transform mapped over the rows and with the
    transform applied to all of them as one leaf; both must agree.

    Args:
      transform: the transform.
      init_leaves: makes the states of rows `[n, D]`, mapped over the rows.
      update_leaves: updates them.

    Raises:
      ValueError: they differ, the transform cannot be mapped over rows, or it is a `MultiSteps`.
    """
    what = f"optimizer {transform_name(transform)!r}"
    _refuse_multi_steps(transform, what)

    def probe(rows: Array, gradients: Array) -> Any:
        one_by_one = _mapped(init_leaves, update_leaves, rows, gradients)
        return one_by_one, _whole(transform, rows, gradients)

    rows, gradients = _samples()
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
    """Raise ValueError for MultiSteps, also inside a chain: its state tells."""
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
    """Return rows `[n, D]` and gradients `[steps, n, D]`, float32, away from 0.

    From step to step every second row's gradient turns round, so that inner products with past
    gradients differ in sign.
    """
    n = len(_SCALES)
    grid = np.arange(1, (1 + _STEPS) * n * _DIM + 1, dtype=np.float64)
    values = (np.cos(7.0 * grid) + 1.5 * np.sign(np.cos(7.0 * grid))).reshape(-1, n, _DIM)
    gradients = np.abs(values[1:]) * np.sign(values[1]) * np.asarray(_SCALES)[:, None]
    gradients[1::2, ::2] *= -1.0
    return values[0].astype(np.float32), gradients.astype(np.float32)


def _mapped(
    init: InitLeaves, update: UpdateLeaves, rows: Array, gradients: Array
) -> tuple[list[Array], list[Array]]:
    """Return each step's updates and the last state's leaves, the transform mapped over rows."""
    leaves, updates = init(rows), []
    for step in range(_STEPS):
        u, leaves = update(rows, leaves, gradients[step])
        rows = rows + u
        updates.append(u)
    return updates, leaves


def _whole(
    transform: optax.GradientTransformation, rows: Array, gradients: Array
) -> tuple[list[Array], list[Array]]:
    """Return the same with all rows as one leaf."""
    state, updates = init_state(transform, rows), []
    for step in range(_STEPS):
        u, state = apply_transform(transform, gradients[step], state, rows)
        rows = rows + jnp.asarray(u).astype(rows.dtype)
        updates.append(u)
    return updates, jax.tree.leaves(state)


def _updates_agree(one_by_one: list[np.ndarray], together: list[np.ndarray]) -> bool:
    return all(_agree(a, b) for a, b in zip(one_by_one, together, strict=True))


def _states_agree(one_by_one: list[np.ndarray], together: list[np.ndarray]) -> bool:
    """Tell whether the states agree; a leaf that the whole has once must be the same in every row.

    Leaves of other shapes can't be matched; there the updates decide.
    """
    comparable = [
        (a, np.broadcast_to(b, a.shape))
        for a, b in zip(one_by_one, together, strict=True)
        if b.shape in (a.shape, a.shape[1:])
    ]
    return all(_agree(a, b) for a, b in comparable)


def _agree(one_by_one: np.ndarray, together: np.ndarray) -> bool:
    """Tell whether two arrays `[n, ...]` are equal, relative to each row's largest entry."""
    if one_by_one.shape != together.shape:
        return False
    n = one_by_one.shape[0] if one_by_one.ndim else 1
    a, b = (np.asarray(x).astype(np.float64).reshape(n, -1) for x in (one_by_one, together))
    largest = np.max(np.abs(a), axis=-1, keepdims=True, initial=0.0)
    close = np.abs(a - b) <= _TOLERANCE * largest
    return bool(np.all(close | (a == b) | (np.isnan(a) & np.isnan(b))))


def _first_line(error: Exception) -> str:
    return (
        f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        if str(error)
        else repr(error)
    )

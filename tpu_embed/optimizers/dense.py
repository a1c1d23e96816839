"""A rule over rows as an optax transform of dense parameter trees (`RowOptimizer.as_optax`).

A dense leaf counts as a table of which every row is touched: the last axis is the row.

Input: a `TableOptimizer`; in the transform, a tree of gradients and of parameters.
Output: an optax transform, which returns a tree of updates.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpu_embed._checks import refuse
from tpu_embed._types import Array, ArrayLike, PyTree, Tracer, as_array
from tpu_embed.optimizers.base import LearningRateKind, TableOptimizer, learning_rate_kind


class RowRuleState(NamedTuple):
    """State of a rule on a dense tree.

    Args:
      count: int32 scalar, the number of updates done so far.
      slots: for each slot, by name, a tree in the structure of the parameters. In a slot with one
        number per row the leaves lack the last axis.
    """

    count: Array
    slots: dict[str, PyTree]


def dense_transform(
    optimizer: TableOptimizer, *, seed: int
) -> optax.GradientTransformationExtraArgs:
    """Return `optimizer` as an optax transform; see `RowOptimizer.as_optax`."""

    def init(params: PyTree) -> RowRuleState:
        leaves, treedef = jax.tree.flatten(params)
        # One dictionary of slots per leaf, [{m, v}, {m, v}], becomes one tree per slot.
        made = [_init_leaf(optimizer, as_array(leaf), seed, i) for i, leaf in enumerate(leaves)]
        names = optimizer.slot_shapes(1, jnp.float32)
        slots = {name: treedef.unflatten([slots[name] for slots in made]) for name in names}
        return RowRuleState(jnp.zeros((), jnp.int32), slots)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, RowRuleState]:
        if params is None:
            refuse(
                "params",
                expected="the parameters",
                got="None",
                remedy="update(grads, state, params)",
            )
        step = state.count + 1
        remedy = "update(grads, state, params, learning_rate=value)"
        rate = rate_of(optimizer, step, extra.get("learning_rate"), remedy=remedy)
        gradients, treedef = jax.tree.flatten(updates)
        leaves = treedef.flatten_up_to(params)
        slots = {name: treedef.flatten_up_to(tree) for name, tree in state.slots.items()}
        made = [
            _update_leaf(optimizer, leaf, {n: s[i] for n, s in slots.items()}, gradient, step, rate)
            for i, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True))
        ]
        new_slots = {name: treedef.unflatten([s[name] for _, s in made]) for name in slots}
        return treedef.unflatten([u for u, _ in made]), RowRuleState(step, new_slots)

    return optax.GradientTransformationExtraArgs(init, update)


def _rows(leaf: Array) -> Array:
    """Return a leaf as rows `[n, D]` in the dtype of the rule's arithmetic."""
    # [3, 5, D] -> [15, D]; [D] -> [1, D]; a scalar -> [1, 1].
    dim = leaf.shape[-1] if leaf.ndim else 1
    return leaf.reshape(math.prod(leaf.shape[:-1]), dim).astype(working_dtype(leaf))


def working_dtype(array: ArrayLike) -> np.dtype:
    """Return the dtype of the rule's arithmetic: float64 for such an array, otherwise float32."""
    return np.dtype(np.float64 if jnp.result_type(array) == jnp.float64 else np.float32)


def _init_leaf(optimizer: TableOptimizer, leaf: Array, seed: int, index: int) -> dict[str, Array]:
    rows = _rows(leaf)
    # A key for each row of each leaf, which depends on the positions of both.
    key = jax.random.fold_in(jax.random.key(seed), index)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows.shape[0], dtype=jnp.uint32))
    shapes = optimizer.slot_shapes(rows.shape[1], rows.dtype)
    slots = optimizer.init_slots(rows, keys)
    # A slot part (D,) has the leaf's shape [3, 5, D]; a part () has one number per row: [3, 5].
    return {
        name: slots[name].reshape(leaf.shape if part.shape else leaf.shape[:-1])
        for name, part in shapes.items()
    }


def _update_leaf(
    optimizer: TableOptimizer,
    leaf: Array,
    slots: dict[str, Array],
    gradient: Array,
    step: Array,
    rate: Any,
) -> tuple[Array, dict[str, Array]]:
    leaf = as_array(leaf)
    rows = _rows(leaf)
    shapes = optimizer.slot_shapes(rows.shape[1], rows.dtype)
    held = {name: as_array(slots[name]) for name in shapes}
    as_rows = {n: s.reshape(rows.shape[:1] + shapes[n].shape) for n, s in held.items()}
    gradients = as_array(gradient).reshape(rows.shape).astype(rows.dtype)
    new_rows, new_slots = optimizer.update_rows(rows, as_rows, gradients, step, rate)
    # optax adds updates to parameters. The sum may differ from new_rows in the last bit.
    difference = (new_rows - rows).reshape(leaf.shape).astype(leaf.dtype)
    return difference, {name: new_slots[name].reshape(slots[name].shape) for name in shapes}


def rate_of(optimizer: TableOptimizer, step: ArrayLike, given: Any, *, remedy: str) -> ArrayLike:
    """Return the given learning rate, or else that of the optimizer.

    Args:
      optimizer: the optimizer.
      step: int32 scalar t, 1 at the first update.
      given: the rate that a user gives instead of the optimizer's, or None.
      remedy: how to give one, for the message.

    Raises:
      ValueError: the rate is a callable without arguments, which would be called in a trace.
    """
    if given is not None:
        return given
    rate: Any = optimizer.learning_rate
    host = learning_rate_kind(rate) is LearningRateKind.HOST
    # In a jit it would be called once, and its value would be part of the program for good.
    if host and isinstance(step, Tracer):
        refuse(
            "learning_rate",
            expected="the value of a callable without arguments, called outside the jit",
            got="none",
            remedy=remedy,
        )
    return optimizer.resolve_learning_rate(step, rate() if host else None)

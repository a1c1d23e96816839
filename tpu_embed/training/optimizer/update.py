"""Parameters and the state of a transform after one step.

Enters: checked gradients, summed over the replicas. Leaves: the values of all parameters and the
state. Called by `TreeOptimizer.apply_gradients`.

Parameters without a gradient are taken out of the trees that the transform sees, with their slots,
so that nothing of them can change. A transform that couples parameters, as a clip by the global
norm, then sees those that have one.
"""

from __future__ import annotations

from typing import Any

import jax
import optax

from tpu_embed._snapshot import as_array
from tpu_embed._types import Array, ArrayLike, PyTree
from tpu_embed.sparse import IndexedSlices, is_indexed_slices
from tpu_embed.training.optimizer.checked_gradients import CheckedGradients
from tpu_embed.training.optimizer.declared import DeclaredOptimizer
from tpu_embed.training.optimizer.rows import check_rows, update_touched
from tpu_embed.training.optimizer.slots import State
from tpu_embed.training.paths import Leaves, listed

__all__ = ["check_update", "update_parameters"]


def check_update(
    what: str, declared: DeclaredOptimizer, leaves: Leaves, old: State, given: CheckedGradients
) -> None:
    """Refuse what `update_parameters` could not do, before anything is computed.

    Args:
      what: the optimizer's name, for messages.
      declared: the optimizer.
      leaves: the parameters.
      old: the state of the transform.
      given: gradients and constraints.

    Raises:
      ValueError: a sparse gradient of a parameter without rows, or for a transform that is not
        row-separable; a state that mixes parameters, some of which have no dense gradient.
    """
    sparse = _sparse(declared, given)
    for i in sparse:
        gradient = f"{what}: gradient of {listed([leaves.labels[i]])}"
        check_rows(gradient, declared.rows, leaves.values[i], old.shared() | old.slots(i))
    if len(given.gradients) - len(sparse) < len(leaves.labels):
        old.check_divisible()


def _sparse(declared: DeclaredOptimizer, given: CheckedGradients) -> dict[int, IndexedSlices]:
    """Return the gradients that are applied to rows, by number of the parameter."""
    if declared.every_row:
        return {}
    return {i: g for i, g in given.gradients.items() if is_indexed_slices(g)}


def update_parameters(
    declared: DeclaredOptimizer,
    leaves: Leaves,
    old: State,
    given: CheckedGradients,
    *,
    step: ArrayLike,
    learning_rate: ArrayLike | None,
) -> tuple[PyTree, PyTree]:
    """Return parameters and state after one step, of what `check_update` lets through.

    Args:
      declared: the optimizer.
      leaves: the parameters.
      old: the state of the transform.
      given: gradients and constraints.
      step: int32 scalar t, 1 at the first update.
      learning_rate: scalar, or None where the transform holds its own.
    """
    sparse = _sparse(declared, given)
    dense = {
        i: g.deduplicate().to_dense() if is_indexed_slices(g) else g
        for i, g in given.gradients.items()
        if i not in sparse
    }
    values = {i: as_array(leaf) for i, leaf in enumerate(leaves.values)}
    with jax.named_scope("update_dense"):
        changed, new = _update_dense(declared, leaves, old, dense, values, learning_rate)
    values |= {i: given.constrained(i, value) for i, value in changed.items()}
    for i, gradient in sparse.items():
        slots = old.shared() | old.slots(i)
        rate = 0.0 if learning_rate is None else learning_rate
        values[i], written = update_touched(
            declared.rows, values[i], slots, gradient, step=step, learning_rate=rate
        )
        new = new.with_slots(i, written)
    return leaves.only(values), new.tree()


def _update_dense(
    declared: DeclaredOptimizer,
    leaves: Leaves,
    old: State,
    gradients: dict[int, Any],
    values: dict[int, Array],
    learning_rate: ArrayLike | None,
) -> tuple[dict[int, Array], State]:
    """Return the parameters that have dense gradients, and the state, its shared part included."""
    params = leaves.only({i: values[i] for i in gradients})
    whole = len(gradients) == len(values)
    state = old.tree() if whole else old.only(gradients)
    with jax.numpy_dtype_promotion("standard"):  # optax is written for it
        updates, new = declared.update(leaves.only(gradients), state, params, learning_rate)
        params = optax.apply_updates(params, updates)
    return dict(leaves.among(params)), old.updated(new)

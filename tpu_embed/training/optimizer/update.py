"""One step of an optimizer over a tree: dense parameters as a whole, tables by their touched rows.

Parameters without a gradient are taken out of the trees that the transform sees, together with
their slots, so they cannot change. A transform that couples parameters, such as a clip by the
global norm, therefore sees only the parameters that have a dense gradient.

Input: checked gradients, summed over the replicas; parameters and state.
Output: the new values of all parameters, and the new state.
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
from tpu_embed.training.optimizer.rows import check_rows, update_parameter_rows
from tpu_embed.training.optimizer.slots import State
from tpu_embed.training.paths import Leaves, listed


def check_update(
    what: str, declared: DeclaredOptimizer, leaves: Leaves, old: State, given: CheckedGradients
) -> None:
    """Refuse gradients that `update_parameters` cannot apply, before anything is computed.

    Args:
      what: the optimizer's name, for messages.
      declared: the optimizer.
      leaves: the parameters.
      old: the state of the transform.
      given: gradients and constraints.

    Raises:
      ValueError: a sparse gradient belongs to a parameter without rows, or the transform is not
        row-separable; the state mixes parameters and some of them have no dense gradient.
    """
    sparse = _sparse(declared, given)
    for i in sparse:
        gradient = f"{what}: gradient of {listed([leaves.labels[i]])}"
        check_rows(gradient, declared.rows, leaves.values[i], old.shared() | old.slots(i))
    # Fewer dense gradients than parameters: the slots of the others have to be taken out.
    if len(given.gradients) - len(sparse) < len(leaves.labels):
        old.check_divisible()


def _sparse(declared: DeclaredOptimizer, given: CheckedGradients) -> dict[int, IndexedSlices]:
    """Return the gradients that are applied row by row, by number of the parameter."""
    # A rule that changes every row needs the whole gradient, zeros included.
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
    """Return parameters and state after one step. `check_update` must have accepted the arguments.

    Args:
      declared: the optimizer.
      leaves: the parameters.
      old: the state of the transform.
      given: gradients and constraints.
      step: int32 scalar t, 1 at the first update.
      learning_rate: scalar, or None where the transform holds its own.
    """
    # Duplicates are summed before scattering: a scatter-add leaves the order of its sums open.
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
    # The dense update has already advanced what is shared (such as a count). The rows are updated
    # with the old shared values, and only their own slots are written.
    for i, gradient in sparse.items():
        slots = old.shared() | old.slots(i)
        rate = 0.0 if learning_rate is None else learning_rate
        values[i], written = update_parameter_rows(
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
    """Return the new values of parameters with a dense gradient, and the new state.

    Shared leaves of the state are updated here, also if no gradient is dense.
    """
    # Gradients for all parameters: the state goes to the transform as it is, divisible or not.
    params = leaves.only({i: values[i] for i in gradients})
    whole = len(gradients) == len(values)
    state = old.tree() if whole else old.only(gradients)
    with jax.numpy_dtype_promotion("standard"):  # optax is written for it
        updates, new = declared.update(leaves.only(gradients), state, params, learning_rate)
        params = optax.apply_updates(params, updates)
    return dict(leaves.among(params)), old.updated(new)

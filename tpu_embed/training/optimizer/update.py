"""One step of an optimizer over a tree: dense parameters as a whole, tables by their touched rows.

Parameters without a gradient are taken out of the trees that the transform sees, together with
their slots, so they cannot change. A transform that couples parameters, such as a clip by the
global norm, therefore sees only the parameters that have a dense gradient.

Input: checked gradients, summed over the replicas; parameters and state.
Output: the new values of all parameters, and the new state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import optax

from tpu_embed._checks import message
from tpu_embed._snapshot import as_array
from tpu_embed._types import Array, ArrayLike, PyTree
from tpu_embed.sparse import is_indexed_slices
from tpu_embed.training.optimizer.declared import DeclaredOptimizer
from tpu_embed.training.optimizer.rows import check_rows, update_parameter_rows
from tpu_embed.training.optimizer.slots import State
from tpu_embed.training.paths import Leaves, listed


def check_update(
    what: str,
    declared: DeclaredOptimizer,
    leaves: Leaves,
    old: State,
    gradients: Mapping[int, Any],
) -> list[int]:
    """Return which parameters are updated row by row, after checking that all can be updated.

    Args:
      what: the optimizer's name, for messages.
      declared: the optimizer.
      leaves: the parameters.
      old: the state of the transform.
      gradients: by number of the parameter.

    Raises:
      ValueError: a sparse gradient belongs to a parameter without rows, or the transform is not
        row-separable; the state mixes parameters and some of them have no dense gradient.
    """
    # A rule that changes every row needs the whole gradient, zeros included.
    every_row = declared.rule is not None and declared.rule.updates_every_row
    sparse = [i for i, g in gradients.items() if is_indexed_slices(g) and not every_row]
    for i in sparse:
        gradient = f"{what}: gradient of {listed([leaves.labels[i]])}"
        check_rows(gradient, declared.rows, leaves.values[i], old.slots() | old.slots(i))
    # Fewer dense gradients than parameters: the slots of the others have to be taken out.
    if len(gradients) - len(sparse) < len(leaves.labels) and not old.divisible:
        raise ValueError(
            message(
                "optimizer",
                expected="a transform whose state has a part for each parameter",
                got="one that mixes the parameters, of which some have no gradient",
                remedy="give a gradient for every parameter, zeros if need be",
            )
        )
    return sparse


def update_parameters(
    declared: DeclaredOptimizer,
    leaves: Leaves,
    old: State,
    gradients: Mapping[int, Any],
    sparse: Collection[int],
    *,
    constraints: Mapping[int, Callable[[Array], Any]],
    step: ArrayLike,
    learning_rate: ArrayLike | None,
) -> tuple[PyTree, PyTree]:
    """Return parameters and state after one step. `check_update` must have accepted the arguments.

    Args:
      declared: the optimizer.
      leaves: the parameters.
      old: the state of the transform.
      gradients: by number of the parameter.
      sparse: the parameters that are updated row by row.
      constraints: functions by number of the parameter, applied after a dense update.
      step: int32 scalar t, 1 at the first update.
      learning_rate: scalar, or None where the transform holds its own.

    Raises:
      ValueError: a constraint changes the shape of its parameter.
    """
    # Duplicates are summed before scattering: a scatter-add leaves the order of its sums open.
    dense = {
        i: g.deduplicate().to_dense() if is_indexed_slices(g) else g
        for i, g in sorted(gradients.items())
        if i not in sparse
    }
    values = dict(enumerate(map(as_array, leaves.values)))
    with jax.named_scope("update_dense"):
        # Shared leaves of the state are updated here, also if no gradient is dense.
        params, state = leaves.only({i: values[i] for i in dense}), old.only(dense)
        with jax.numpy_dtype_promotion("standard"):  # optax is written for it
            updates, state = declared.update(leaves.only(dense), state, params, learning_rate)
            changed = jax.tree.leaves(optax.apply_updates(params, updates))
    for i, value in zip(dense, changed, strict=True):
        values[i] = _constrained(constraints[i], value) if i in constraints else value
    # The dense update has already advanced what is shared (such as a count). The rows are updated
    # with the old shared values, and only their own slots are written.
    new = old.updated(state)
    for i in sparse:
        slots = old.slots() | old.slots(i)
        rate = 0.0 if learning_rate is None else learning_rate
        values[i], written = update_parameter_rows(
            declared.rows, values[i], slots, gradients[i], step=step, learning_rate=rate
        )
        new = new.with_slots(i, written)
    return leaves.only(values), new.structure.unflatten(new.values)


def _constrained(constraint: Callable[[Array], Any], parameter: Array) -> Array:
    new = as_array(constraint(parameter))
    if new.shape != parameter.shape:
        raise ValueError(
            message(
                "a constraint's result",
                expected=f"shape {parameter.shape}",
                got=f"shape {new.shape}",
                remedy="return an array in the parameter's shape",
            )
        )
    return new.astype(parameter.dtype)

"""One step of an optimizer over a tree: dense parameters as a whole, tables by their touched rows.

Parameters without a gradient are taken out of the trees that the transform sees, together with
their slots, so they cannot change. A transform that couples parameters, such as a clip by the
global norm, therefore sees only the parameters that have a dense gradient.

In a table, the rows that a sparse gradient names and their slots are gathered, updated by the rule,
and written back. Under a jit that donates the arrays this happens in place. An engine's tables have
a function of their own, `apply_rule` of `core/update/sharded.py`: it knows the row format of a
stack and gives the same bits in every program, while here a parameter is an array `[V, …, D]` of
the user's own tree, and the rule is compiled as part of the user's program.

So an optimizer is declared once and applied in two ways (`DeclaredOptimizer`): a dense parameter is
updated by an optax transform, a table with a sparse gradient by a rule over rows.

Input: gradients and constraints by path, as a user gives them; parameters and state.
Output: the same by number of the parameter, once all is checked and before anything is computed;
the new values of all parameters, and the new state.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpu_embed._checks import message, refuse
from tpu_embed._snapshot import as_array
from tpu_embed._types import Array, ArrayLike, PyTree
from tpu_embed.kernels import dispatch
from tpu_embed.optimizers.base import TableOptimizer
from tpu_embed.optimizers.dense import dense_transform, rate_of, working_dtype
from tpu_embed.optimizers.optax_rows import OptaxOptimizer
from tpu_embed.sparse import IndexedSlices, is_indexed_slices
from tpu_embed.training.paths import Leaves, State, listed


@final
class SumsItself(optax.GradientTransformationExtraArgs):
    """Marker type of the transforms of `cross_shard`, so that gradients are not summed twice."""


def summed_twice(what: str, got: str) -> ValueError:
    """Return the error of an optimizer that sums gradients inside of another that does.

    Args:
      what: the name of the optimizer, for messages.
      got: what sums inside.
    """
    expected = "an optimizer without an axis of its own"
    remedy = "sum once: leave the axis out of one, or give the transform inside cross_shard"
    return ValueError(message(what, expected=expected, got=got, remedy=remedy))


@final
class DeclaredOptimizer:
    """Hold an optimizer as a transform of trees, and make a rule over rows of it on first use.

    Args:
      given: one of `tpu_embed.optimizers`, or an optax transform.

    Raises:
      ValueError: `given` is neither.
    """

    def __init__(self, given: Any) -> None:
        # Both are wrappers around an optax transform, and handled as that transform.
        if isinstance(given, OptaxOptimizer):
            given = given.transform
        if isinstance(given, optax.MultiSteps):
            given = given.gradient_transformation()
        self._given = given
        self.sums_itself = isinstance(given, SumsItself)
        self.rule: TableOptimizer | None = None
        if isinstance(given, TableOptimizer):
            self.rule = given
            self.dense = dense_transform(given, seed=0)
        elif isinstance(given, optax.GradientTransformation):
            self.dense = optax.with_extra_args_support(given)
        else:
            made = f"{given.__name__}(...)" if isinstance(given, type) else "optimizers.SGD(0.1)"
            refuse(
                "optimizer",
                expected="one of tpu_embed.optimizers or an optax transform",
                got=repr(given),
                remedy=f"make one: {made}",
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what was given; the transform made from a rule has functions that cannot be."""
        return DeclaredOptimizer, (self._given,)

    @functools.cached_property
    def rows(self) -> TableOptimizer:
        """The rule over rows.

        Raises:
          ValueError: the transform is not row-separable.
        """
        # A property and not made in __init__: a transform that is not row-separable is still an
        # optimizer of dense parameters.
        if self.rule is not None:
            return self.rule
        try:
            return OptaxOptimizer(self.dense)
        except ValueError as error:
            refuse(
                "IndexedSlices",
                expected="a rule over rows",
                got=f"an optax transform that is not one ({error})",
                remedy="give tables an Optimizer of their own: var_list chooses parameters",
                cause=error,
            )

    def update(
        self, gradients: PyTree, state: PyTree, params: PyTree, learning_rate: ArrayLike | None
    ) -> tuple[PyTree, PyTree]:
        """Return the updates and the next state of the transform.

        Raises:
          ValueError: the transform needs the loss (as `optax.polyak_sgd` does).
        """
        extra = {} if learning_rate is None else {"learning_rate": learning_rate}
        try:
            return self.dense.update(gradients, state, params, **extra)
        except TypeError as error:
            if not self._reads_the_loss(gradients, state, params):
                raise
            refuse(
                "optimizer",
                expected="a transform of gradients, state and parameters alone",
                got=f"one that reads the loss too ({error})",
                remedy="call its own update(grads, state, params, value=, grad=, value_fn=)",
                cause=error,
            )

    def _reads_the_loss(self, gradients: PyTree, state: PyTree, params: PyTree) -> bool:
        """Return whether an update that failed would succeed if it were given the loss."""
        # The names under which optax passes the loss: its value, its gradient, and its function.
        value = jnp.zeros(())
        loss = {"value": value, "grad": gradients, "value_fn": lambda _: value}
        try:
            jax.eval_shape(lambda: self.dense.update(gradients, state, params, **loss))
        except Exception:
            return False  # a user's own transform may raise anything; its first error says more
        return True

    def learning_rate(self, step: ArrayLike, given: ArrayLike | None) -> ArrayLike | None:
        """Return the learning rate of an update, None if the transform holds its own.

        Args:
          step: int32 scalar t, 1 at the first update.
          given: the rate that a user gives instead of the rule's, or None.

        Raises:
          ValueError: a rate is given to an optax transform, or is missing inside a jit.
        """
        if self.rule is None:
            if given is not None:
                refuse(
                    "learning_rate",
                    expected="none: an optax transform holds its own",
                    got=repr(given),
                    remedy="optax.inject_hyperparams puts it into the state",
                )
            return None
        remedy = "apply_gradients(..., learning_rate=value)"
        return rate_of(self.rule, step, given, remedy=remedy)


# -- checks ----------------------------------------------------------------------------------------


def check_gradients(
    what: str,
    grads_and_vars: Iterable[Any],
    leaves: Leaves,
    constraints: Mapping[Any, Callable[[Array], Any]],
) -> tuple[dict[int, Any], dict[int, Callable[[Array], Any]]]:
    """Return the gradients that are not None, and the constraints, by number of the parameter.

    Args:
      what: the optimizer's name, for messages.
      grads_and_vars: pairs of a gradient or None, and a path.
      leaves: the parameters.
      constraints: functions by path.

    Raises:
      TypeError: an entry is not a pair, or a gradient cannot become an array.
      ValueError: a path is unknown or repeated, a gradient does not have its parameter's shape or
        belongs to an integer parameter, or there is no gradient at all.
      RuntimeError: a constraint is given for a parameter whose gradient is `IndexedSlices`.
    """
    # Leaves a, b, c and pairs [(g, "c"), (None, "a")]: numbers [2, 0], gradients {2: g}.
    pairs = [*grads_and_vars]
    for entry in pairs:
        if not isinstance(entry, (tuple, list)) or len(entry) != 2:
            refuse(
                f"{what}: grads_and_vars",
                expected="pairs of a gradient and a path",
                got=repr(entry),
                remedy="compute_gradients makes them",
                error=TypeError,
            )
    numbers = leaves.find_all([path for _, path in pairs], what=f"{what}: grads_and_vars")
    gradients = {
        i: _gradient(f"{what}: gradient of {listed([leaves.labels[i]])}", g, leaves.values[i])
        for i, (g, _) in zip(numbers, pairs, strict=True)
        if g is not None
    }
    if not gradients:
        names = listed(leaves.labels[i] for i in numbers or range(len(leaves.labels)))
        refuse(
            f"{what}: grads_and_vars",
            expected="a gradient for at least one variable",
            got=f"none for {names}",
            remedy="use one of them in the loss, or skip this update",
        )
    # A constraint maps a whole parameter, a sparse gradient must not touch rows it does not name.
    places = leaves.find_all(constraints, what=f"{what}: constraints")
    for i in places:
        if is_indexed_slices(gradients.get(i)):
            refuse(
                f"{what}: constraint on {listed([leaves.labels[i]])}",
                expected="a dense gradient",
                got="IndexedSlices, which update single rows",
                remedy="clip_weight_min and clip_weight_max of a rule bound touched rows",
                error=RuntimeError,
            )
    return gradients, dict(zip(places, constraints.values(), strict=True))


def _gradient(what: str, gradient: Any, parameter: Any) -> Any:
    """Return a checked gradient, as an array or `IndexedSlices`."""
    kind = jnp.result_type(parameter)
    if not jnp.issubdtype(kind, jnp.inexact):
        refuse(
            what,
            expected="None, for a parameter of integers",
            got=type(gradient).__name__,
            remedy="leave it out: integers are not trained",
        )
    shape = np.shape(parameter)
    if is_indexed_slices(gradient):
        # Parameter [V, …, D]: indices [N], values [N, …, D].
        values, indices = np.shape(gradient.values), np.shape(gradient.indices)
        fits = len(indices) == 1 and values == (*indices, *gradient.dense_shape[1:])
        if gradient.dense_shape != shape or not fits:
            refuse(
                what,
                expected=f"IndexedSlices of dense_shape {shape}, values [N, *{shape[1:]}], "
                "indices [N]",
                got=f"dense_shape {gradient.dense_shape}, values {values}, indices {indices}",
                remedy="dense_shape is the shape of the parameter",
            )
    else:
        try:
            gradient = as_array(gradient)
        except (TypeError, ValueError) as error:
            refuse(
                what,
                expected="an array, IndexedSlices or None",
                got=repr(gradient),
                remedy="give one pair for each leaf of the parameters",
                error=TypeError,
                cause=error,
            )
        if gradient.shape != shape:
            refuse(
                what,
                expected=f"the parameter's shape {shape}",
                got=f"shape {gradient.shape}",
                remedy="pair each gradient with the path of its own parameter",
            )
        # A float gradient keeps its own precision; integers become the parameter's floats.
        if not jnp.issubdtype(gradient.dtype, jnp.inexact):
            gradient = gradient.astype(kind)
    # A complex gradient of a real parameter would lose its imaginary part. True > False: the
    # gradient is complex and the parameter is not.
    kinds = [jnp.issubdtype(dtype, jnp.complexfloating) for dtype in (gradient.dtype, kind)]
    if kinds[0] > kinds[1]:
        refuse(
            what,
            expected=f"floats, as {kind}",
            got=str(gradient.dtype),
            remedy="take its real part, if that is what is meant",
        )
    return gradient


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
      ValueError: a sparse gradient belongs to a parameter without rows, or a slot of it does not
        have the shape that the rule expects per row, or the transform is not row-separable; the
        state mixes parameters and some of them have no dense gradient.
    """
    # A rule that changes every row needs the whole gradient, zeros included.
    every_row = declared.rule is not None and declared.rule.updates_every_row
    sparse = [i for i, g in gradients.items() if is_indexed_slices(g) and not every_row]
    for i in sparse:
        gradient = f"{what}: gradient of {listed([leaves.labels[i]])}"
        rule, table, slots = declared.rows, leaves.values[i], old.slots() | old.slots(i)
        shape = jnp.shape(table)
        if len(shape) < 2:
            refuse(
                gradient,
                expected="an array, or IndexedSlices of a parameter [V, …, D]",
                got=f"IndexedSlices of one of shape {shape}",
                remedy="give the table a last axis of one: table[:, None]",
            )
        # Table [V, M, D]: a slot of shape [D] per row is [V, M, D], one of shape [] is [V, M].
        for name, slot in rule.slot_shapes(shape[-1], working_dtype(table)).items():
            expected = (*shape[:-1], *slot.shape) if slot.per_row else slot.shape
            got = jnp.shape(slots[name]) if name in slots else None
            if got != expected:
                refuse(
                    f"{gradient}: slot {name}",
                    expected=f"shape {expected}",
                    got="none" if got is None else f"shape {got}",
                    remedy="a transform that keeps such slots needs dense gradients",
                )
    # Fewer dense gradients than parameters: the slots of the others have to be taken out.
    if len(gradients) - len(sparse) < len(leaves.labels) and not old.divisible:
        refuse(
            "optimizer",
            expected="a transform whose state has a part for each parameter",
            got="one that mixes the parameters, of which some have no gradient",
            remedy="give a gradient for every parameter, zeros if need be",
        )
    return sparse


# -- updates ---------------------------------------------------------------------------------------


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
        values[i] = value
        if i in constraints:
            new = as_array(constraints[i](value))
            if new.shape != value.shape:
                refuse(
                    "a constraint's result",
                    expected=f"shape {value.shape}",
                    got=f"shape {new.shape}",
                    remedy="return an array in the parameter's shape",
                )
            values[i] = new.astype(value.dtype)
    # The dense update has already advanced what is shared (such as a count). The rows are updated
    # with the old shared values, and only their own slots are written.
    after = old.updated(state)
    for i in sparse:
        slots = old.slots() | old.slots(i)
        rate = 0.0 if learning_rate is None else learning_rate
        values[i], written = update_parameter_rows(
            declared.rows, values[i], slots, gradients[i], step=step, learning_rate=rate
        )
        after = after.with_slots(i, written)
    return leaves.only(values), after.structure.unflatten(after.values)


def update_parameter_rows(
    rule: TableOptimizer,
    table: Array,
    slots: Mapping[str, Array],
    gradient: IndexedSlices,
    *,
    step: ArrayLike,
    learning_rate: ArrayLike,
) -> tuple[Array, dict[str, Array]]:
    """Update the rows that a gradient names, each once, with the sum of its values.

    `check_rows` must have accepted the table and the slots.

    Args:
      rule: the rule over rows.
      table: `[V, …, D]`. All vectors `[D]` of an entry of the first axis are updated together.
      slots: `[V, …, D]`, or `[V, …]` for one number per row, or an array shared by all rows.
      gradient: the gradient by the table.
      step: int32 scalar t, 1 at the first update.
      learning_rate: scalar.

    Returns:
      the table and the slots, in their shapes and dtypes.

    Example:
      >>> from tpu_embed.optimizers import SGD
      >>> gradient = IndexedSlices(jnp.ones((2, 1)), jnp.array([2, 2]), (3, 1))
      >>> done, _ = update_parameter_rows(
      ...     SGD(0.5), jnp.ones((3, 1)), {}, gradient, step=1, learning_rate=0.5
      ... )
      >>> done.tolist()
      [[1.0], [1.0], [0.0]]
    """
    # Row ids [2, 2, 0] of a table [V, D] with values a, b, c become [2, 0, V] with a + b, c and
    # zeros. The id V is padding: it is never written. Sums are made in the rule's dtype.
    dtype = working_dtype(table)
    shapes = rule.slot_shapes(table.shape[-1], dtype)
    unique = dataclasses.replace(gradient, values=gradient.values.astype(dtype)).deduplicate()

    # The rule sees a matrix of rows. Table [V, M, D] and U unique row ids: read gives [U·M, D],
    # write reshapes back to [U, M, D]. A slot with one number per row is [V, M] and [U·M].
    def read(array: Array, part: tuple[int, ...]) -> Array:
        return dispatch.gather_rows(array, unique.indices).reshape(-1, *part)

    def write(array: Array, rows: Array) -> Array:
        values = rows.astype(array.dtype).reshape(-1, *array.shape[1:])
        return dispatch.set_rows(array, unique.indices, values)

    with jax.named_scope("update_touched"):
        rows = read(table, table.shape[-1:]).astype(dtype)
        held = {
            name: read(slots[name], s.shape).astype(s.dtype) if s.per_row else slots[name]
            for name, s in shapes.items()
        }
        summed = unique.values.reshape(rows.shape).astype(dtype)
        new_rows, new = rule.update_rows(rows, held, summed, step, learning_rate)
        written = {
            name: write(slots[name], new[name]) if s.per_row else new[name]
            for name, s in shapes.items()
        }
        return write(table, new_rows), written

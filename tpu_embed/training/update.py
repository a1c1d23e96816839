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

Users name a parameter by its `jax.tree_util` key path, or by the `keystr` of that path. The tree
`{"w": [a, b]}` has the leaves `['w'][0]` and `['w'][1]`, with the numbers 0 and 1 (`Leaves`).
optax keeps one state for the whole tree. For `adam` over {b, w} its leaves are count, mu of b, mu
of w, nu of b, nu of w: the slots mu and nu per parameter, and a shared count (`State`).

Input: gradients and constraints by path, as a user gives them; parameters and state.
Output: the same by number of the parameter, once all is checked and before anything is computed;
the new values of all parameters, and the new state.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath, keystr

from tpu_embed._checks import message, refuse
from tpu_embed._types import Array, ArrayLike, PyTree, as_array
from tpu_embed.kernels import dispatch
from tpu_embed.optimizers.base import TableOptimizer
from tpu_embed.optimizers.optax_rows import OptaxOptimizer, name_slots
from tpu_embed.optimizers.row_optimizer import dense_transform, rate_of, working_dtype
from tpu_embed.sparse import IndexedSlices, is_indexed_slices

Path = KeyPath | str
"""A key path, or its `keystr`."""


NOTHING = optax.MaskedNode()
"""Stands for an absent leaf. It is a tree without leaves, so optax transforms skip it."""


class Leaves(NamedTuple):
    """A flattened tree: lists with one entry per leaf, in flattening order.

    Attributes:
      structure: the structure of the tree.
      paths: the key path of each leaf.
      labels: the `keystr` of each path.
      values: the leaves.
    """

    structure: Any
    paths: list[KeyPath]
    labels: list[str]
    values: list[Any]

    def find(self, path: Any, *, what: str) -> int:
        """Return the number of the leaf at a path.

        Raises:
          ValueError: no leaf has this path.
        """
        label = path if isinstance(path, str) else repr(path)
        if isinstance(path, tuple):
            label = keystr(path)
        if label not in self.labels:
            refuse(
                what,
                expected=f"the path of one of {listed(self.labels)}",
                got=label,
                remedy="paths are those of jax.tree_util, or their keystr",
            )
        return self.labels.index(label)

    def find_all(self, paths: Iterable[Any], *, what: str) -> list[int]:
        """Return the numbers of the leaves at some paths, in the order of the paths.

        Raises:
          ValueError: no leaf has one of the paths, or a path occurs twice.
        """
        found = [self.find(path, what=what) for path in paths]
        for i in found:
            if found.count(i) > 1:
                got = self.labels[i] or "the parameter"
                refuse(
                    what,
                    expected="each path once",
                    got=f"{got} twice",
                    remedy="leave the repeated one out",
                )
        return found

    def only(self, keep: Mapping[int, Any]) -> PyTree:
        """Return a tree with `NOTHING` at every leaf whose number is not in `keep`."""
        # Leaves a, b, c and keep = {1: x}: the tree of [NOTHING, x, NOTHING].
        return self.structure.unflatten(
            [keep.get(i, NOTHING) for i in range(len(self.labels))]
        )


def is_nothing(tree: Any) -> bool:
    """Return whether a tree is `NOTHING`."""
    return isinstance(tree, optax.MaskedNode)


def leaves_of(params: PyTree) -> Leaves:
    """Return the leaves of a tree with their paths.

    Raises:
      ValueError: the tree has no leaves.

    Example:
      >>> leaves_of({"w": 1.0, "b": [2.0]}).labels
      ["['b'][0]", "['w']"]
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(params)
    if not pairs:
        refuse(
            "params",
            expected="at least one array",
            got=repr(params),
            remedy="give a pytree of arrays",
        )
    paths = [path for path, _ in pairs]
    return Leaves(
        structure, paths, [keystr(path) for path in paths], [leaf for _, leaf in pairs]
    )


def listed(labels: Iterable[str]) -> str:
    """Return paths as text for a message."""
    # A tree that is a single array has one leaf, whose keystr is the empty string.
    return ", ".join(label or "the parameter" for label in labels)


_NOBODY = -1
"""The owner of a leaf that belongs to no parameter."""


class State(NamedTuple):
    """The leaves of a state, as lists with one entry per leaf.

    Attributes:
      structure: the structure of the state.
      names: the name of each leaf; the same slot of several parameters has one name.
      owners: the number of the parameter that each leaf belongs to, -1 for none.
      values: the leaves.
      divisible: whether the owners are known. If not, they are all -1.
    """

    structure: Any
    names: list[str]
    owners: list[int]
    values: list[Array]
    divisible: bool

    def slots(self, owner: int = _NOBODY) -> dict[str, Array]:
        """Return a parameter's slots by name; without a number what belongs to no parameter."""
        each = zip(self.names, self.owners, self.values, strict=True)
        return {name: value for name, whose, value in each if whose == owner}

    def only(self, parameters: Collection[int]) -> PyTree:
        """Return the state without the slots of parameters other than these.

        The state must be divisible, or these be all parameters. What belongs to no parameter stays.
        """
        # parameters [1] of {b, w}: [count, mu b, mu w] -> the tree of [count, NOTHING, mu w].
        kept = {_NOBODY, *parameters}
        pairs = zip(self.values, self.owners, strict=True)
        return self.structure.unflatten(
            [x if owner in kept else NOTHING for x, owner in pairs]
        )

    def updated(self, state: PyTree) -> State:
        """Return this state with new values from a state that `only` made.

        Where the given state has `NOTHING`, the old value stays.
        """
        new = self.structure.flatten_up_to(state)
        pairs = zip(new, self.values, strict=True)
        return self._replace(values=[old if is_nothing(x) else x for x, old in pairs])

    def with_slots(self, parameter: int, slots: Mapping[str, Array]) -> State:
        """Return this state with new slots of one parameter; shared leaves keep their values."""
        each = zip(self.names, self.owners, self.values, strict=True)
        new = [
            slots.get(name, old) if whose == parameter else old
            for name, whose, old in each
        ]
        return self._replace(values=new)


def take_apart(
    transform: optax.GradientTransformation, state: PyTree, params: Leaves
) -> State:
    """Return the leaves of a transform's state with their names and owners.

    Args:
      transform: the transform that made the state.
      state: a state as `transform.init` returns it.
      params: the parameters that the state is for; their values are not read.

    Example:
      >>> from tpu_embed.training.update import leaves_of
      >>> params = {"b": 1.0, "w": 2.0}
      >>> transform = optax.adam(0.1)
      >>> state = take_apart(transform, transform.init(params), leaves_of(params))
      >>> state.slots(1), state.slots()
      ({'mu': Array(0., dtype=float32...), 'nu': ...}, {'count': Array(0, dtype=int32)})
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(state)
    paths, values = [path for path, _ in pairs], [leaf for _, leaf in pairs]
    owners = _owners(transform, state, params)
    divisible = owners is not None
    owners = owners or [_NOBODY] * len(values)
    # The path of a slot ends with its parameter's path, which is not part of the slot's name:
    # path (0, mu, w) with the owner w, of depth 1, is of the kind (0, mu).
    depths = [len(params.paths[owner]) if owner >= 0 else 0 for owner in owners]
    kinds = [
        path[: len(path) - depth] for path, depth in zip(paths, depths, strict=True)
    ]
    distinct = list(dict.fromkeys(kinds))
    name_of = dict(zip(distinct, name_slots(distinct), strict=True))
    return State(
        structure, [name_of[kind] for kind in kinds], owners, values, divisible
    )


def _owners(
    transform: optax.GradientTransformation, state: PyTree, params: Leaves
) -> list[int] | None:
    """Return the owner of each leaf of the state, None if that cannot be found out.

    optax finds out by running `transform.init` on a placeholder and looking where it reappears.
    """
    # Replace each slot by the number of its parameter and every other leaf by -1:
    # [count, mu b, mu w] -> [-1, 0, 1].
    numbers = params.structure.unflatten(range(len(params.labels)))
    try:
        with jax.numpy_dtype_promotion("standard"):
            owners = optax.tree_map_params(
                transform,
                lambda leaf, number: leaf if is_nothing(leaf) else number,
                state,
                numbers,
                transform_non_params=lambda rest: jax.tree.map(lambda _: _NOBODY, rest),
                is_leaf=is_nothing,
            )
    except (AttributeError, LookupError, TypeError, ValueError):
        return None  # init got a placeholder in place of arrays; a transform may fail in many ways
    found = jax.tree.leaves(owners)
    return found if len(found) == len(jax.tree.leaves(state)) else None


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
    remedy = (
        "sum once: leave the axis out of one, or give the transform inside cross_shard"
    )
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
            made = (
                f"{given.__name__}(...)"
                if isinstance(given, type)
                else "optimizers.SGD(0.1)"
            )
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
        self,
        gradients: PyTree,
        state: PyTree,
        params: PyTree,
        learning_rate: ArrayLike | None,
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

    def learning_rate(
        self, step: ArrayLike, given: ArrayLike | None
    ) -> ArrayLike | None:
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
    numbers = leaves.find_all(
        [path for _, path in pairs], what=f"{what}: grads_and_vars"
    )
    gradients = {
        i: _gradient(
            f"{what}: gradient of {listed([leaves.labels[i]])}", g, leaves.values[i]
        )
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
    kinds = [
        jnp.issubdtype(dtype, jnp.complexfloating) for dtype in (gradient.dtype, kind)
    ]
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
            updates, state = declared.update(
                leaves.only(dense), state, params, learning_rate
            )
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
    unique = dataclasses.replace(
        gradient, values=gradient.values.astype(dtype)
    ).deduplicate()

    # The rule sees a matrix of rows. Table [V, M, D] and U unique row ids: read gives [U·M, D],
    # write reshapes back to [U, M, D]. A slot with one number per row is [V, M] and [U·M].
    def read(array, part):
        return dispatch.gather_rows(array, unique.indices).reshape(-1, *part)

    def write(array, rows):
        values = rows.astype(array.dtype).reshape(-1, *array.shape[1:])
        return dispatch.set_rows(array, unique.indices, values)

    with jax.named_scope("update_touched"):
        rows = read(table, table.shape[-1:]).astype(dtype)
        held = {
            name: read(slots[name], s.shape).astype(s.dtype)
            if s.per_row
            else slots[name]
            for name, s in shapes.items()
        }
        summed = unique.values.reshape(rows.shape)
        new_rows, new = rule.update_rows(rows, held, summed, step, learning_rate)
        written = {
            name: write(slots[name], new[name]) if s.per_row else new[name]
            for name, s in shapes.items()
        }
        return write(table, new_rows), written

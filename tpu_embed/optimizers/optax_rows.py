"""Any row-separable optax transform as the optimizer of a table.

The transform's `update` is mapped over the rows. Leaves of its state with the shape `()`, such as a
count, stay unmapped and are shared by the whole stack. All other leaves become slots, one per row.

A transform is row-separable if its update of a row depends on that row alone. A clip by the global
norm, for example, is not. Nothing in a transform says which it is, so it is tried: two updates of
four rows, once row by row and once all together, must agree.

optax raises a float to the power of an int32 count, which JAX's strict promotion refuses. So every
call of a transform is made under the promotion that optax is written for.

Input: an optax transform; then rows, slots and gradients.
Output: a `TableOptimizer`, or an error that says why no table can be trained with the transform;
then rows and slots.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath, SequenceKey, keystr

from tpu_embed._checks import refuse
from tpu_embed._types import Array, ArrayLike, PyTree
from tpu_embed.kernels.operands import CompiledRule
from tpu_embed.optimizers.base import Slots, SlotShape, TableOptimizer, Updated


class _Layout(NamedTuple):
    """The state of one row: its structure, and one slot per leaf, in the order of the leaves."""

    treedef: Any
    slots: dict[str, SlotShape]

    @property
    def axes(self) -> list[int | None]:
        """For each leaf the axis that `vmap` maps: 0, or None if all rows share the leaf."""
        return [0 if slot.per_row else None for slot in self.slots.values()]


@final
@dataclasses.dataclass(frozen=True, eq=False)
class OptaxOptimizer(TableOptimizer):
    """Update each row with an optax transform, as if it were the only parameter.

        u, state = transform.update(g, state, w);  w = w + u

    It is compared by identity, so tables with two different objects of this class do not stack. The
    transform holds its own learning rate.

    Args:
      transform: a row-separable transform: its update of a row must not depend on other rows.

    Raises:
      ValueError: the transform is not row-separable, or is a `MultiSteps`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> optimizer = OptaxOptimizer(optax.sgd(0.1, momentum=0.9))
      >>> rows = jnp.ones((2, 3))
      >>> slots = optimizer.init_slots(rows, jax.random.split(jax.random.key(0), 2))
      >>> rows, slots = optimizer.update_rows(rows, slots, jnp.ones((2, 3)), 1, 0.0)
      >>> print(f"{float(rows[0, 0]):.4f}", slots["trace"].shape)
      0.9000 (2, 3)

    Reference:
      optax: an optimizer is a pair of pure functions, init and update.
    """

    transform: optax.GradientTransformation

    learning_rate = None
    use_gradient_accumulation = True

    def __post_init__(self) -> None:
        _check_row_separable(self)

    @property
    def updates_every_row(self) -> bool:
        return False

    def slot_shapes(self, dim: int, dtype: Any) -> dict[str, SlotShape]:
        return self._layout(dim, dtype).slots

    def init_slots(self, rows: Array, keys: Array) -> Slots:
        leaves = self._init_leaves(rows)
        return dict(
            zip(self.slot_shapes(rows.shape[-1], rows.dtype), leaves, strict=True)
        )

    def compiled_rule(
        self, step: ArrayLike, learning_rate: Array
    ) -> CompiledRule | None:
        return None

    def update_rows(
        self,
        rows: Array,
        slots: Mapping[str, Array],
        gradients: Array,
        step: ArrayLike,
        learning_rate: ArrayLike,
    ) -> Updated:
        names = list(self.slot_shapes(rows.shape[-1], rows.dtype))
        updates, leaves = self._update_leaves(
            rows, [slots[name] for name in names], gradients
        )
        return rows + updates, dict(zip(names, leaves, strict=True))

    def describe(self) -> dict[str, Any]:
        return {
            "class": type(self).__name__,
            "transform": transform_name(self.transform),
        }

    def _layout(self, dim: int, dtype: Any) -> _Layout:
        # State of one row [D] of adam: count [], mu [D], nu [D]. The count is shared, the others
        # are slots of all rows, [n, D].
        row = jax.ShapeDtypeStruct((dim,), jnp.dtype(dtype))
        pairs, treedef = jax.tree_util.tree_flatten_with_path(
            jax.eval_shape(functools.partial(init_state, self.transform), row)
        )
        names = name_slots([path for path, _ in pairs])
        shapes = [
            SlotShape(leaf.shape, leaf.dtype, per_row=leaf.shape != ())
            for _, leaf in pairs
        ]
        return _Layout(treedef, dict(zip(names, shapes, strict=True)))

    def _init_leaves(self, rows: Array) -> list[Array]:
        """Return the leaves of the states of rows `[n, D]`: `[n, …]`, or shared."""
        layout = self._layout(rows.shape[-1], rows.dtype)
        dtypes = [slot.dtype for slot in layout.slots.values()]

        def init(row):
            leaves = jax.tree.leaves(init_state(self.transform, row))
            return [
                _as(leaf, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)
            ]

        return jax.vmap(init, out_axes=layout.axes)(rows)

    def _update_leaves(
        self, rows: Array, leaves: list[Array], gradients: Array
    ) -> tuple[Array, list[Array]]:
        """Return the updates, to be added to rows `[n, D]`, and the new leaves."""
        layout = self._layout(rows.shape[-1], rows.dtype)

        def update_row(row, state, g):
            u, new_state = apply_transform(
                self.transform, g, layout.treedef.unflatten(state), row
            )
            new = _same_leaves(new_state, layout)
            return _as(u, row.dtype), new

        mapped = jax.vmap(
            update_row, in_axes=(0, layout.axes, 0), out_axes=(0, layout.axes)
        )
        return mapped(rows, leaves, gradients)


def _same_leaves(state: Any, layout: _Layout) -> list[Array]:
    """Return the leaves of a new state, in the dtypes of the old one.

    Raises:
      ValueError: the state has another structure, or a leaf another shape.
    """
    leaves, treedef = jax.tree.flatten(state)
    shapes = [jnp.shape(leaf) for leaf in leaves]
    expected = [slot.shape for slot in layout.slots.values()]
    if treedef != layout.treedef or shapes != expected:
        refuse(
            "state after an update", expected=f"as before: {expected}", got=str(shapes)
        )
    dtypes = [slot.dtype for slot in layout.slots.values()]
    return [_as(leaf, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]


def _as(leaf: Any, dtype: Any) -> Array:
    """Return a leaf as an array of exactly this dtype (a key array stays as it is)."""
    array = jnp.asarray(leaf)
    return (
        array
        if jnp.issubdtype(array.dtype, jax.dtypes.extended)
        else array.astype(dtype)
    )


def as_table_optimizer(optimizer: Any) -> TableOptimizer | None:
    """Return the optimizer that a user gives as a `TableOptimizer`.

    Args:
      optimizer: one of `tpu_embed.optimizers`, a row-separable optax transform, or None.

    Returns:
      a `TableOptimizer` or None as it is; an optax transform wrapped in `OptaxOptimizer`.

    Raises:
      ValueError: `optimizer` is none of these, or a transform that is not row-separable.

    Example:
      >>> import optax
      >>> as_table_optimizer(optax.sgd(0.1)).describe()
      {'class': 'OptaxOptimizer', 'transform': 'chain'}
      >>> as_table_optimizer("adam")
      Traceback (most recent call last):
      ValueError: optimizer: expected one of tpu_embed.optimizers, an optax transform or None, ...

    Reference:
      optax: the protocol of a gradient transformation.
    """
    if optimizer is None or isinstance(optimizer, TableOptimizer):
        return optimizer
    if isinstance(optimizer, (optax.GradientTransformation, optax.MultiSteps)):
        return OptaxOptimizer(optimizer)  # type: ignore[arg-type]
    refuse(
        "optimizer",
        expected="one of tpu_embed.optimizers, an optax transform or None",
        got=repr(optimizer),
        remedy=f"make one: {optimizer.__name__}(...)"
        if isinstance(optimizer, type)
        else "",
    )


def init_state(transform: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Return the transform's first state."""
    with jax.numpy_dtype_promotion("standard"):
        return transform.init(params)


def apply_transform(
    transform: optax.GradientTransformation,
    gradients: PyTree,
    state: PyTree,
    params: PyTree,
) -> tuple[Any, PyTree]:
    """Return the transform's updates and next state."""
    update = optax.with_extra_args_support(transform).update
    with jax.numpy_dtype_promotion("standard"):
        return update(gradients, state, params)


def transform_name(transform: Any) -> str:
    """Return the name of the function that made a transform."""
    # The update of optax.adam(0.1) is a local function, `chain.<locals>.update_fn`: "chain".
    update = getattr(transform, "update", None)
    return getattr(update, "__qualname__", type(transform).__name__).split(".")[0]


def name_slots(paths: Sequence[KeyPath]) -> list[str]:
    """Return one unique name per leaf of an optax state.

    The name is that of the leaf's field. If several leaves share it, their positions in the chain
    are put before it. If that is not unique either, the name is the whole path.

    Args:
      paths: the key paths of the leaves.

    Returns:
      the names, in the order of `paths`.

    Example:
      >>> import jax, optax
      >>> state = optax.adam(lambda count: 0.1).init(1.0)
      >>> name_slots([path for path, _ in jax.tree_util.tree_leaves_with_path(state)])
      ['0_count', 'mu', 'nu', '1_count']

    Reference:
      The fields of optax's states.
    """
    candidates = [_candidates(path) for path in paths]
    level = [0] * len(paths)
    # Level 0: count, mu, nu, count. The counts clash and go to level 1: 0_count and 1_count.
    for deeper in (1, 2):
        names = [options[i] for options, i in zip(candidates, level, strict=True)]
        uses = collections.Counter(names)
        level = [
            deeper if uses[name] > 1 else i
            for name, i in zip(names, level, strict=True)
        ]
    return [options[i] for options, i in zip(candidates, level, strict=True)]


def _candidates(path: KeyPath) -> tuple[str, str, str]:
    """Return three names: the field, the field after its chain positions, and the whole path."""
    # A key is the name of a field, a dictionary's key, or a position.
    keys = [(keystr((key,), simple=True), isinstance(key, SequenceKey)) for key in path]
    field = next(
        (word for word, is_position in reversed(keys) if not is_position), "state"
    )
    positions = [word for word, is_position in keys if is_position]
    return (
        field,
        "_".join([*positions, field]),
        "_".join([word for word, _ in keys] or [field]),
    )


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


def _check_row_separable(optimizer: OptaxOptimizer) -> None:
    """Refuse a transform whose update of a row depends on other rows.

    Two updates of a few rows are computed twice: with the transform mapped over the rows, and with
    the transform applied to all rows as one leaf. Both results must agree.

    Raises:
      ValueError: the results differ, the transform cannot be mapped over rows, or it is a
        `MultiSteps`.
    """
    transform = optimizer.transform
    what = f"optimizer {transform_name(transform)!r}"
    init = functools.partial(init_state, transform)
    _refuse_multi_steps(transform, init, what)

    def update(rows, state, gradients):
        return apply_transform(transform, gradients, state, rows)

    def probe(rows, gradients):
        by_row = optimizer._init_leaves, optimizer._update_leaves
        return tuple(
            _two_updates(*one, rows, gradients) for one in (by_row, (init, update))
        )

    # The optimizer may be constructed inside a user's jit: compute here and now nevertheless.
    try:
        with jax.ensure_compile_time_eval():
            mapped, whole = jax.device_get(jax.jit(probe)(*_samples()))
    except Exception as error:
        refuse(
            what,
            expected=_EXPECTED,
            got=f"one that cannot be mapped over rows ({_first_line(error)})",
            remedy="scalars of its state are shared by all rows and may not depend on them; "
            + _BELONGS,
            cause=error,
        )
    updates_agree = all(map(_agree, mapped[0], whole[0]))
    if not updates_agree or not _states_agree(mapped[1], whole[1]):
        refuse(
            what,
            expected=_EXPECTED,
            got="one whose update of a row, or its state, changes with the other rows",
            remedy=f"{_BELONGS}; tpu_embed.optimizers.LAMB takes its norms per row",
        )


def _refuse_multi_steps(transform: Any, init: Callable[[Any], Any], what: str) -> None:
    """Raise `ValueError` for a `MultiSteps`, which its state shows also inside a chain."""
    multi = isinstance(transform, optax.MultiSteps)
    if not multi:
        row = jax.ShapeDtypeStruct((_DIM,), jnp.float32)
        try:
            state = jax.eval_shape(init, row)
        except Exception as error:
            refuse(
                what,
                expected="a transform with a state for one row",
                got=f"one that fails on a row ({_first_line(error)})",
                cause=error,
            )
        states = jax.tree.leaves(state, is_leaf=_is_multi_steps_state)
        multi = any(_is_multi_steps_state(leaf) for leaf in states)
    if multi:
        refuse(
            what,
            expected="a transform that updates at every step",
            got="optax.MultiSteps",
            remedy="a row that no id touches in a step would not be counted; use a larger batch, "
            + ("or accumulate activation gradients before update"),
        )


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
    values = (np.cos(7.0 * grid) + 1.5 * np.sign(np.cos(7.0 * grid))).reshape(
        -1, n, _DIM
    )
    gradients = np.abs(values[1:]) * np.sign(values[1]) * np.asarray(_SCALES)[:, None]
    gradients[1::2, ::2] *= -1.0
    return values[0].astype(np.float32), gradients.astype(np.float32)


def _two_updates(
    init: Callable[[Array], Any],
    update: Callable[..., Any],
    rows: Array,
    gradients: Array,
) -> tuple[list[Array], list[Array]]:
    """Return the updates of each step and the leaves of the last state."""
    state, updates = init(rows), []
    for step in range(_STEPS):
        u, state = update(rows, state, gradients[step])
        rows = rows + jnp.asarray(u).astype(rows.dtype)
        updates.append(u)
    return updates, jax.tree.leaves(state)


def _states_agree(one_by_one: list[np.ndarray], together: list[np.ndarray]) -> bool:
    """Return whether the states agree, as far as their leaves can be matched.

    A leaf that exists once for all rows must be the same in every row. Leaves of other shapes can't
    be matched; for them only the updates are compared.
    """
    # Mapped leaf [n, D] with a whole leaf [n, D] or [D]; mapped [n] with [n] or [].
    return all(
        _agree(a, np.broadcast_to(b, a.shape))
        for a, b in zip(one_by_one, together, strict=True)
        if b.shape in (a.shape, a.shape[1:])
    )


def _agree(one_by_one: np.ndarray, together: np.ndarray) -> bool:
    """Return whether two arrays `[n, ...]` agree, relative to the largest entry of each row."""
    if one_by_one.shape != together.shape:
        return False
    n = one_by_one.shape[0] if one_by_one.ndim else 1
    a, b = (
        np.asarray(x).astype(np.float64).reshape(n, -1) for x in (one_by_one, together)
    )
    largest = np.max(np.abs(a), axis=-1, keepdims=True, initial=0.0)
    # Equal infinities differ by NaN, so equality and NaN in both are tested by themselves.
    close = np.abs(a - b) <= _TOLERANCE * largest
    return bool(np.all(close | (a == b) | (np.isnan(a) & np.isnan(b))))


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else repr(error)

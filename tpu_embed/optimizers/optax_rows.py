"""Any row-separable optax transform as the optimizer of a table.

The transform's `update` is mapped over the rows. Leaves of its state with the shape `()`, such as a
count, stay unmapped and are shared by the whole stack. All other leaves become slots, one per row.

Input: an optax transform; then rows, slots and gradients.
Output: a `TableOptimizer`; then rows and slots.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import optax

from tpu_embed._checks import message
from tpu_embed._types import Array, ArrayLike
from tpu_embed.kernels.rules import CompiledRule
from tpu_embed.optimizers._optax_calls import apply_transform, init_state, transform_name
from tpu_embed.optimizers._probe import check_row_separable
from tpu_embed.optimizers._slot_names import name_slots
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
        check_row_separable(self.transform, self._init_leaves, self._update_leaves)

    @property
    def updates_every_row(self) -> bool:
        return False

    def slot_shapes(self, dim: int, dtype: Any) -> dict[str, SlotShape]:
        return self._layout(dim, dtype).slots

    def init_slots(self, rows: Array, keys: Array) -> Slots:
        leaves = self._init_leaves(rows)
        return dict(zip(self.slot_shapes(rows.shape[-1], rows.dtype), leaves, strict=True))

    def compiled_rule(self, step: ArrayLike, learning_rate: Array) -> CompiledRule | None:
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
        updates, leaves = self._update_leaves(rows, [slots[name] for name in names], gradients)
        return rows + updates, dict(zip(names, leaves, strict=True))

    def describe(self) -> dict[str, Any]:
        return {"class": type(self).__name__, "transform": transform_name(self.transform)}

    def _layout(self, dim: int, dtype: Any) -> _Layout:
        # State of one row [D] of adam: count [], mu [D], nu [D]. The count is shared, the others
        # are slots of all rows, [n, D].
        row = jax.ShapeDtypeStruct((dim,), jnp.dtype(dtype))
        pairs, treedef = jax.tree_util.tree_flatten_with_path(
            jax.eval_shape(functools.partial(init_state, self.transform), row)
        )
        names = name_slots([path for path, _ in pairs])
        shapes = [SlotShape(leaf.shape, leaf.dtype, per_row=leaf.shape != ()) for _, leaf in pairs]
        return _Layout(treedef, dict(zip(names, shapes, strict=True)))

    def _init_leaves(self, rows: Array) -> list[Array]:
        """Return the leaves of the states of rows `[n, D]`: `[n, …]`, or shared."""
        layout = self._layout(rows.shape[-1], rows.dtype)
        dtypes = [slot.dtype for slot in layout.slots.values()]

        def init(row: Array) -> list[Array]:
            leaves = jax.tree.leaves(init_state(self.transform, row))
            return [_as(leaf, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]

        return jax.vmap(init, out_axes=layout.axes)(rows)

    def _update_leaves(
        self, rows: Array, leaves: list[Array], gradients: Array
    ) -> tuple[Array, list[Array]]:
        """Return the updates, to be added to rows `[n, D]`, and the new leaves."""
        layout = self._layout(rows.shape[-1], rows.dtype)

        def update_row(row: Array, state: list[Array], g: Array) -> tuple[Array, list[Array]]:
            u, new_state = apply_transform(self.transform, g, layout.treedef.unflatten(state), row)
            new = _same_leaves(new_state, layout)
            return _as(u, row.dtype), new

        mapped = jax.vmap(update_row, in_axes=(0, layout.axes, 0), out_axes=(0, layout.axes))
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
        what = "state after an update"
        raise ValueError(message(what, expected=f"as before: {expected}", got=str(shapes)))
    dtypes = [slot.dtype for slot in layout.slots.values()]
    return [_as(leaf, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]


def _as(leaf: Any, dtype: Any) -> Array:
    """Return a leaf as an array of exactly this dtype (a key array stays as it is)."""
    array = jnp.asarray(leaf)
    return array if jnp.issubdtype(array.dtype, jax.dtypes.extended) else array.astype(dtype)


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
    expected = "one of tpu_embed.optimizers, an optax transform or None"
    remedy = f"make one: {optimizer.__name__}(...)" if isinstance(optimizer, type) else ""
    raise ValueError(message("optimizer", expected=expected, got=repr(optimizer), remedy=remedy))

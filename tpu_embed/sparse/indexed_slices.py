"""A gradient that is zero outside of some rows, stored as these rows and their row ids.

The gradient of a table `[V, D]` after looking up N ids is `values` `[N, D]` and `indices` `[N]`.
The indices are leaves of the pytree, so a plain `jax.tree.map` would scale them too. Norms, scaling
and clipping therefore go through the functions here, or through
`jax.tree.map(f, tree, is_leaf=is_indexed_slices)`.

Input: pytrees of gradients, some of which are `IndexedSlices`.
Output: such pytrees again, or the norm over all gradients.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import check_integers, refuse
from tpu_embed._types import Array, ArrayLike, PyTree, Tracer, as_array, snapshot
from tpu_embed.core.exchange import number_runs
from tpu_embed.kernels import dispatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class IndexedSlices:
    """Hold an array that is zero outside of some rows: the sum of `values[i]` at row `indices[i]`.

    A row may occur any number of times; its values are summed. An entry whose index is
    `dense_shape[0]` is padding: its value is ignored.

    Args:
      values: `[N, …]` numbers; `…` is `dense_shape[1:]`.
      indices: `[N]` integers in [0, `dense_shape[0]`].
      dense_shape: the shape of the whole array, a static field.

    Raises:
      TypeError: the indices are not integers.

    Example:
      >>> slices = IndexedSlices(jnp.ones((3, 2)), jnp.array([4, 0, 4]), (5, 2))
      >>> slices.to_dense()[:, 0].tolist()
      [1.0, 0.0, 0.0, 0.0, 2.0]
    """

    values: Array
    indices: Array
    dense_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    # Makes `numpy_array + slices` call __radd__ instead of NumPy's own addition.
    __array_ufunc__ = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense_shape", tuple(int(n) for n in self.dense_shape))
        # JAX also builds this pytree from placeholders without a dtype, and from float0 tangents.
        dtype = getattr(self.indices, "dtype", None)
        if dtype is not None and dtype != jax.dtypes.float0:
            check_integers("IndexedSlices.indices", dtype)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return self.dense_shape

    def deduplicate(self) -> IndexedSlices:
        """Return an equal gradient in which every row occurs once.

        Returns:
          N entries again: each row once, in the order of first appearance, then padding. The values
          of a row are summed in the order of their positions, in float32 at least.

        Example:
          >>> slices = IndexedSlices(jnp.ones((3, 2)), jnp.array([4, 0, 4]), (5, 2))
          >>> slices.deduplicate().indices.tolist()
          [4, 0, 5]
        """
        n, size = self.indices.shape[0], self.dense_shape[0]
        if n == 0:
            return self
        # V = 5 and indices [4, 0, 4]. A stable sort gives runs of equal ids: positions [1, 0, 2],
        # run [0, 1, 1], run_row_ids [0, 4, 5 = padding]; sums[r] is the sum of run r.
        sorted_ids, positions = dispatch.sort_rows(self._valid_indices())
        run, run_row_ids = number_runs(sorted_ids, size)
        ordered = dispatch.gather_rows(_widened(self.values), positions)
        sums = dispatch.segment_sum(ordered, run, n).astype(self.values.dtype)
        # The first position of each run, [1, 0, n]; sorting by it restores the order of first
        # appearance: runs 1, 0, 2, so rows [4, 0, 5].
        firsts = jnp.full(n, n, jnp.int32).at[run].min(positions)
        _, order = dispatch.sort_rows(jnp.where(run_row_ids < size, firsts, n))
        rows = dispatch.gather_rows(run_row_ids, order)
        sums = dispatch.gather_rows(sums, order)
        return clean_padding(IndexedSlices(sums, rows, self.dense_shape))

    def compact(self) -> IndexedSlices:
        """Return an equal gradient without padding.

        This works outside of a jit only: the number of entries depends on the values of indices.

        Raises:
          ValueError: the indices are traced.
        """
        if isinstance(self.indices, Tracer):
            refuse(
                "IndexedSlices.compact",
                expected="known values",
                got="traced ones",
                remedy="call compact outside the jit; deduplicate keeps the shape",
            )
        kept = np.flatnonzero(np.asarray(self._valid_indices()) < self.dense_shape[0])
        return IndexedSlices(self.values[kept], self.indices[kept], self.dense_shape)

    def to_dense(self) -> Array:
        """Return the whole array, `dense_shape`, which is as large as the table."""
        return self + jnp.zeros(self.dense_shape, self.dtype)

    def __add__(self, other: Any) -> Any:
        """Return the sum with other slices (the entries of both), or with an array (an array).

        Args:
          other: `IndexedSlices` of the same `dense_shape`, an array of that shape, or 0.

        Raises:
          ValueError: `other` has another shape.
        """
        if isinstance(other, int) and other == 0:
            return self  # the built-in `sum` starts with 0
        if np.shape(other) != self.dense_shape:
            refuse(
                "IndexedSlices: sum",
                expected=f"IndexedSlices or an array, of shape {self.dense_shape}",
                got=f"shape {np.shape(other)}",
            )
        if isinstance(other, IndexedSlices):
            values = jnp.concatenate([as_array(one.values) for one in (self, other)])
            indices = jnp.concatenate([as_array(one.indices) for one in (self, other)])
            return IndexedSlices(values, indices, self.dense_shape)
        array = as_array(other)
        dtype = jnp.promote_types(array.dtype, self.values.dtype)
        whole = _widened(array.astype(dtype))
        values = as_array(self.values).astype(whole.dtype)
        return whole.at[self._valid_indices()].add(values, mode="drop").astype(dtype)

    __radd__ = __add__

    def __mul__(self, factor: ArrayLike) -> IndexedSlices:
        """Return the product with a scalar.

        Raises:
          ValueError: the factor is not a scalar.
        """
        if np.ndim(factor):
            refuse(
                "IndexedSlices: product",
                expected="a scalar",
                got=f"shape {np.shape(factor)}",
            )
        values, kept = _product(as_array(self.values), factor), as_array(self.indices)
        return dataclasses.replace(self, values=values, indices=kept)

    __rmul__ = __mul__

    def __truediv__(self, divisor: ArrayLike) -> IndexedSlices:
        """Return the product with 1 / divisor, a scalar."""
        return self * (1.0 / divisor)

    def __neg__(self) -> IndexedSlices:
        """Return the product with -1."""
        return self * -1.0

    def _valid_indices(self) -> Array:
        """Return the indices, with padding in place of those outside of the table.

        Raises:
          ValueError: values, indices and dense_shape do not fit together.
        """
        # V = 5: [-1, 3, 7] -> [5, 3, 5]. int8 could not hold V = 1000, so narrow indices widen.
        indices, size = as_array(self.indices), self.dense_shape[0]
        if indices.dtype.itemsize < 4:
            indices = indices.astype(jnp.int32)
        expected = (
            indices.shape[0] if indices.ndim == 1 else -1,
            *self.dense_shape[1:],
        )
        if self.values.shape != expected:
            refuse(
                "IndexedSlices",
                expected=f"indices [N], values [N, *{self.dense_shape[1:]}]",
                got=f"shapes {indices.shape} and {self.values.shape}",
                remedy="under vmap, call its methods inside the mapped function",
            )
        absent = (indices < 0) | (indices >= size)
        return jnp.where(absent, jnp.asarray(size, indices.dtype), indices)


def clean_padding(gradient: IndexedSlices) -> IndexedSlices:
    """Return an equal gradient in which all padding has the index V and values of zero."""
    indices = gradient._valid_indices()
    kept = (indices < gradient.shape[0]).reshape(-1, *[1] * (gradient.values.ndim - 1))
    return IndexedSlices(jnp.where(kept, gradient.values, 0), indices, gradient.shape)


def is_indexed_slices(tree: Any) -> bool:
    """Return whether `tree` is an `IndexedSlices`; pass it as `is_leaf` for a tree of gradients."""
    return isinstance(tree, IndexedSlices)


def scale(gradients: PyTree, factor: ArrayLike) -> PyTree:
    """Return gradients multiplied by a scalar; None stays None.

    Args:
      gradients: a pytree of arrays and `IndexedSlices`.
      factor: `[]`.
    """

    def product(g):
        return (
            g * factor if is_indexed_slices(g) else _product(_checked_floats(g), factor)
        )

    return jax.tree.map(product, gradients, is_leaf=is_indexed_slices)


def global_norm(gradients: PyTree) -> Array:
    """Return √(Σ g²) over all numbers of all gradients, `[]`.

    A row that occurs more than once in an `IndexedSlices` counts with the sum of its values.

    Args:
      gradients: a pytree of float arrays and `IndexedSlices`.

    Raises:
      TypeError: a gradient is an array of integers.
    """
    squares = [
        _squares(g) for g in jax.tree.leaves(gradients, is_leaf=is_indexed_slices)
    ]
    dtype = np.result_type(np.float32, *(square.dtype for square in squares))
    return jnp.sqrt(
        sum((square.astype(dtype) for square in squares), jnp.zeros((), dtype))
    )


def _squares(gradient: Any) -> Array:
    """Return Σ g² of one gradient, in float32 at least."""
    if is_indexed_slices(gradient):
        # Widen first: the sums of a row must not be rounded to bfloat16 before they are squared.
        wide = dataclasses.replace(gradient, values=_widened(gradient.values))
        numbers = wide.deduplicate().values
    else:
        numbers = _checked_floats(gradient)
    sizes = _widened(jnp.abs(numbers))
    return jnp.sum(sizes * sizes)


def _checked_floats(gradient: Any) -> Array:
    """Return a gradient as an array.

    Raises:
      TypeError: the gradient has an integer dtype.
    """
    numbers = as_array(gradient)
    if not jnp.issubdtype(numbers.dtype, jnp.inexact):
        refuse(
            "gradient",
            expected="gradients of floats",
            got=str(numbers.dtype),
            remedy="leave parameters of integers out",
            error=TypeError,
        )
    return numbers


def _widened(numbers: Array) -> Array:
    """Return numbers in a dtype for sums and products: float32 at least."""
    numbers = as_array(numbers)
    small = jnp.issubdtype(numbers.dtype, jnp.floating) and numbers.dtype.itemsize < 4
    return numbers.astype(jnp.float32) if small else numbers


def _product(numbers: Array, factor: ArrayLike) -> Array:
    """Return numbers times a scalar, in their own dtype."""
    wide = _widened(numbers)
    return (wide * jnp.asarray(snapshot(factor), wide.dtype)).astype(numbers.dtype)


def clip_by_global_norm(gradients: PyTree, max_norm: ArrayLike) -> PyTree:
    """Return gradients multiplied by min(1, max_norm / `global_norm`).

    Args:
      gradients: a pytree of arrays and `IndexedSlices`.
      max_norm: the largest norm, positive.

    Reference: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural
    networks", 2013.
    """
    norm = global_norm(gradients)
    limit = jnp.asarray(snapshot(max_norm), norm.dtype)
    # Both branches of a where are evaluated: the inner one keeps a norm of 0 out of the division.
    factor = jnp.where(
        norm > limit, limit / jnp.where(norm > 0, norm, 1), jnp.ones_like(norm)
    )
    return scale(gradients, factor)

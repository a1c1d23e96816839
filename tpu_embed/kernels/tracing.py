"""What arrays in a program depend on: mesh axes over which they differ, and what was read before.

Inside a `shard_map` with `check_vma=True`, JAX tracks for every array over which mesh axes its
values vary. For the results of custom calls it has to be told. The attribute that holds the axes
was renamed between releases of JAX; this file knows both names.

XLA derives the order of operations from data dependencies alone. A table is written in its own
memory only if everything that reads the old rows comes first; if XLA does not know, it copies the
whole table to be safe. Optimization barriers do not help: the CPU compiler drops them before it
decides about copies. So what writes adds a zero to its row ids that is computed from what was read.

Input: arrays. Output: names of mesh axes, or arrays marked as varying over them; a zero that XLA
cannot know before it has the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpu_embed._types import Array


def varying_axes(array: Any) -> frozenset[str]:
    """Return the axes over which an array is known to differ; none outside a `shard_map`.

    Example:
      >>> varying_axes(jax.numpy.ones(3))
      frozenset()
    """
    return axes_of(jax.typeof(array))


def axes_of(aval: Any) -> frozenset[str]:
    """Return the axes over which the arrays of an abstract value differ."""
    # `manual_axis_type` in later releases, `vma` in earlier ones.
    kind = getattr(aval, "manual_axis_type", None)
    return kind.varying if kind is not None else getattr(aval, "vma", frozenset())


def as_varying(array: Array, axes: frozenset[str]) -> Array:
    """Return the array, marked as varying over `axes` in addition to its own axes."""
    missing = tuple(sorted(axes - varying_axes(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def zero_after(arrays: Sequence[Array]) -> Array:
    """Return an int32 zero, `[]`, that XLA cannot compute before all of the arrays.

    Args:
      arrays: numbers of any shape, with at least one each.
    """
    zero = jnp.int32(0)
    # Take one float's bits as an integer and clear the sign bit: the result is at least 0, so its
    # minimum with 0 is 0, for NaN and infinity too. XLA does not see that and keeps the dependency.
    for array in arrays:
        first = jax.lax.stop_gradient(array).reshape(-1)[0].astype(jnp.float32)
        bits = jax.lax.bitcast_convert_type(first, jnp.int32)
        zero += jnp.minimum(bits & 0x7FFFFFFF, 0)
    return zero

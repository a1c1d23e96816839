"""Find and set the mesh axes over which an array differs from device to device.

Inside a `shard_map` with `check_vma=True`, JAX tracks for every array over which mesh axes its
values vary. For the results of custom calls it has to be told. The attribute that holds the axes
was renamed between releases of JAX; this file knows both names.

Input: arrays. Output: names of mesh axes, or arrays marked as varying over them.
"""

from __future__ import annotations

from typing import Any

import jax

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

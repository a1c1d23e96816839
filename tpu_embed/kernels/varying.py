"""Over which mesh axes an array differs, inside a `shard_map` that keeps count (`check_vma=True`).

Enters and leaves: arrays. JAX has renamed the attribute that says it; this file knows its names.
Called by `cpu.py`, whose results JAX knows nothing of, and by lookups and optimizers that run
inside a user's `shard_map`.
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
    kind = getattr(aval, "manual_axis_type", None)
    return kind.varying if kind is not None else getattr(aval, "vma", frozenset())


def as_varying(array: Array, axes: frozenset[str]) -> Array:
    """Return an array that counts as differing over `axes`, beside those over which it does."""
    missing = tuple(sorted(axes - varying_axes(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array

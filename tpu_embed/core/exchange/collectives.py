"""Collectives over any number of mesh axes, including none, and what runs them on each device.

A collective exchanges or combines the arrays of several devices, inside `shard_map`. JAX's
collectives need at least one axis. These also accept none: then there is only one device in the
exchange, and nothing has to be sent.

Input: arrays local to one device, and names of mesh axes. Output: the exchanged arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpu_embed._types import Array
from tpu_embed.core.layout import MeshAxes


def per_device(
    function: Callable, axes: MeshAxes, in_specs: Any, out_specs: Any
) -> Callable:
    """Return a function that runs on each device of the mesh, with that device's parts of arrays.

    Args:
      function: takes and returns the parts; collectives may be called inside.
      axes: the mesh.
      in_specs: the partition specs of the arguments, a prefix of their trees.
      out_specs: those of the results.
    """
    return jax.shard_map(
        function,
        mesh=axes.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


def axis_index(names: Sequence[str]) -> Array:
    """Return this device's row-major index over the named axes, int32 `[]`; 0 without axes."""
    return jnp.int32(jax.lax.axis_index(tuple(names))) if names else jnp.int32(0)


def all_to_all(x: Array, names: Sequence[str]) -> Array:
    """Send `x[d]` to device d of the named axes; return `[S, …]`, entry s sent by device s.

    Args:
      x: `[S, …]`, one part per destination.
      names: the axes; () if there is one device.
    """
    if not names:
        return x
    # On 2 devices: device 0 has [a0, a1], device 1 has [b0, b1]; afterwards device 0 has [a0, b0]
    # and device 1 has [a1, b1].
    return jax.lax.all_to_all(x, tuple(names), split_axis=0, concat_axis=0, tiled=True)


def all_gather(x: Array, names: Sequence[str]) -> Array:
    """Return `[n, …]`: the `x` of all n devices of the named axes, in row-major order."""
    if not names:
        return x[None]
    return jax.lax.all_gather(x, tuple(names), axis=0, tiled=False)


def psum_scatter(x: Array, names: Sequence[str]) -> Array:
    """Sum `x` over the named axes; return `[…]`, the part `x[d]` of the sum on device d.

    Args:
      x: `[n, …]`, one part per device of the axes.
      names: the axes; () if there is one device.
    """
    if not names:
        return x[0]
    return jax.lax.psum_scatter(x, tuple(names), scatter_dimension=0, tiled=False)


def psum(x: Array, names: Sequence[str]) -> Array:
    """Sum `x` over the named axes."""
    return jax.lax.psum(x, tuple(names)) if names else x

"""The mesh, what its axes do (split the batch, split a table's rows), and the collectives.

Enters: a mesh and names of axes; inside `shard_map`, arrays local to one device. Leaves: the axes'
roles; the arrays, exchanged. Called by all that knows of several devices, `route.py` above all.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tpu_embed._types import Array


def axis_index(names: Sequence[str]) -> Array:
    """Return this device's row-major index over the named axes, int32 `[]`."""
    return jnp.int32(jax.lax.axis_index(tuple(names))) if names else jnp.int32(0)


def all_to_all(x: Array, names: Sequence[str]) -> Array:
    """Send `x[d]` to device d of the named axes; return what came, `[S, …]` by source.

    Args:
      x: `[S, …]`, a part a destination.
      names: the axes; () when there is one device.
    """
    if not names:
        return x
    return jax.lax.all_to_all(x, tuple(names), split_axis=0, concat_axis=0, tiled=True)


def all_gather(x: Array, names: Sequence[str]) -> Array:
    """Return `[n, …]`: `x` of every device of the named axes, row-major."""
    if not names:
        return x[None]
    return jax.lax.all_gather(x, tuple(names), axis=0, tiled=False)


def psum(x: Array, names: Sequence[str]) -> Array:
    """Sum `x` over the named axes."""
    return jax.lax.psum(x, tuple(names)) if names else x


def any_device(flag: Array, mesh: Mesh) -> Array:
    """Tell whether `flag` (bool `[]`) is set on any device of the mesh."""
    return jax.lax.pmax(flag.astype(jnp.int32), mesh.axis_names) > 0

"""Joins the dense ids of several lookups of one feature into one batch.

Lookups `[3, 5, H=2]` and `[4, H=3]` become 15 + 4 bags of width 3: narrower bags are filled with
padding, and empty bags are appended until every replica gets equally many.

Input: ids and weights with any leading axes.
Output: ids and weights `[B, H]`, or `[B]` if no lookup has bags.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.ids import narrow_ids
from tpu_embed.core.layout import MeshAxes


class DenseIds(NamedTuple):
    """The ids of one lookup, or of all iterations of a loop around it.

    Attributes:
      ids: int32 or int64 `[…, H]`, or `[…]` for one id per bag.
      weights: floats in the shape of the ids, or None.
      bags: whether the last axis is the bag.
    """

    ids: Array
    weights: Array | None
    bags: bool

    @property
    def lead(self) -> tuple[int, ...]:
        """The sizes of the axes before the bag."""
        # bags is 0 or 1: [3, 5, H] with bags -> (3, 5); [3, 5] without -> (3, 5).
        return self.ids.shape[: self.ids.ndim - self.bags]

    def columns(self, width: int, axes: MeshAxes) -> Array:
        """Return the ids as `[B, width]`."""
        return self._columns(self.ids, width, PADDING_ID, axes)

    def scales(self, width: int, dtype: np.dtype, axes: MeshAxes) -> Array:
        """Return the weights as `[B, width]`; ones if the lookup has none."""
        given = jnp.ones(self.ids.shape, dtype) if self.weights is None else self.weights
        return self._columns(given.astype(dtype), width, 0, axes)

    def _columns(self, array: Array, width: int, fill: int, axes: MeshAxes) -> Array:
        own = flat(array if self.bags else array[..., None], len(self.lead), axes)
        return jnp.pad(own, ((0, 0), (0, width - own.shape[1])), constant_values=fill)


def join(lookups: Sequence[DenseIds], axes: MeshAxes) -> tuple[Array, Array | None]:
    """Return the ids of all lookups one after the other, and the weights if any lookup has them.

    Args:
      lookups: lookups of one feature.
      axes: the mesh, whose replicas the number of bags must divide into.

    Returns:
      ids `[B]` if no lookup has bags, otherwise `[B, H]` with the widest H; weights in the shape of
      the ids, or None.
    """
    bags = any(lookup.bags for lookup in lookups)
    width = max([lookup.ids.shape[-1] for lookup in lookups if lookup.bags], default=1)
    wide = np.result_type(*(lookup.ids.dtype for lookup in lookups))
    ids = jnp.concatenate([lookup.columns(width, axes).astype(wide) for lookup in lookups])
    # Round up to a multiple of the replicas, at least one bag each: 19 bags on 4 -> 20; 0 -> 4.
    count = -(-max(1, ids.shape[0]) // axes.replicas) * axes.replicas
    ids = padded(ids if bags else ids[:, 0], count, PADDING_ID)
    given = [lookup.weights.dtype for lookup in lookups if lookup.weights is not None]
    if not given:
        return ids, None
    dtype = jnp.result_type(*given)
    weights = jnp.concatenate([lookup.scales(width, dtype, axes) for lookup in lookups])
    return ids, padded(weights if bags else weights[:, 0], count, 0)


def as_signed(ids: Any) -> Array:
    """Return integers as int32, or as int64 if their dtype needs it and x64 is on.

    A number too large for the result's dtype becomes the largest one, which is not a row of any
    table.

    Args:
      ids: integers of any dtype. NumPy arrays are clipped before JAX could wrap them around.
    """
    # Bits without the sign: int32 has 31 and fits; uint32 has 32 and needs int64, as int64 does.
    wide = ids.dtype.itemsize * 8 - (np.dtype(ids.dtype).kind == "i") > 31
    return narrow_ids(ids, jax.dtypes.canonicalize_dtype(np.int64) if wide else np.int32)


def flat(array: Array, lead: int, axes: MeshAxes) -> Array:
    """Return the array with its first `lead` axes merged into one: `[3, 5, H]` -> `[15, H]`."""
    return axes.reshape(array, (math.prod(array.shape[:lead]), *array.shape[lead:]))


def padded(array: Array, count: int, fill: int) -> Array:
    """Return the array with its first axis filled up to the length `count`."""
    missing = ((0, count - array.shape[0]), *((0, 0) for _ in array.shape[1:]))
    return jnp.pad(array, missing, constant_values=fill) if count > array.shape[0] else array

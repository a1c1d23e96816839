"""The dense ids of several lookups of one feature as one batch of an engine.

Enters: ids and weights of any leading axes. Leaves: features and weights `[B, H]`, the narrower
bags filled with padding, with empty bags at the end until the devices get equally many. Called by
`engine_lookup.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import PADDING_ID, Array

__all__ = ["DenseIds", "flat", "join", "padded", "signed"]


class DenseIds(NamedTuple):
    """The ids of one lookup, or of all iterations of a loop around it.

    Attributes:
      ids: int32 or int64 `[…, H]`, or `[…]`, an id a bag.
      weights: floats of their shape, or None.
      bags: the last axis is the bag.
    """

    ids: Array
    weights: Array | None
    bags: bool

    @property
    def lead(self) -> tuple[int, ...]:
        """The axes of bags."""
        return self.ids.shape[: self.ids.ndim - self.bags]

    def columns(self, width: int) -> Array:
        """Return the ids as `[B, width]`."""
        return self._columns(self.ids, width, PADDING_ID)

    def scales(self, width: int, dtype: np.dtype) -> Array:
        """Return the weights as `[B, width]`, ones where there are none."""
        given = jnp.ones(self.ids.shape, dtype) if self.weights is None else self.weights
        return self._columns(given.astype(dtype), width, 0)

    def _columns(self, array: Array, width: int, fill: int) -> Array:
        own = flat(array if self.bags else array[..., None], len(self.lead))
        return jnp.pad(own, ((0, 0), (0, width - own.shape[1])), constant_values=fill)


def join(lookups: Sequence[DenseIds], replicas: int) -> tuple[Array, Array | None]:
    """Return the ids, and the weights if any has them, of all lookups one after the other.

    Args:
      lookups: of one feature.
      replicas: parts that the bags must divide into.

    Returns:
      `[B]` where no lookup has bags, else `[B, H]` with the widest H; weights of its shape.
    """
    bags = any(lookup.bags for lookup in lookups)
    width = max([lookup.ids.shape[-1] for lookup in lookups if lookup.bags], default=1)
    wide = np.result_type(*(lookup.ids.dtype for lookup in lookups))
    ids = jnp.concatenate([lookup.columns(width).astype(wide) for lookup in lookups])
    count = -(-max(1, ids.shape[0]) // replicas) * replicas
    ids = padded(ids if bags else ids[:, 0], count, PADDING_ID)
    given = [lookup.weights.dtype for lookup in lookups if lookup.weights is not None]
    if not given:
        return ids, None
    dtype = jnp.result_type(*given)
    weights = jnp.concatenate([lookup.scales(width, dtype) for lookup in lookups])
    return ids, padded(weights if bags else weights[:, 0], count, 0)


def signed(ids: Any) -> Array:
    """Return integers as int32, or as int64 where they need it and x64 is on.

    A number too large for that becomes its largest, which is no row.

    Args:
      ids: integers of any dtype; NumPy's are judged before jax would wrap them.
    """
    wide = ids.dtype.itemsize * 8 - (np.dtype(ids.dtype).kind == "i") > 31
    dtype = jax.dtypes.canonicalize_dtype(np.int64) if wide else np.dtype(np.int32)
    most = np.iinfo(dtype)
    if isinstance(ids, np.ndarray):
        return jnp.asarray(np.clip(ids, max(most.min, np.iinfo(ids.dtype).min), most.max), dtype)
    if np.iinfo(ids.dtype).max > most.max:
        ids = jnp.minimum(ids, jnp.asarray(most.max, ids.dtype))
    return ids.astype(dtype)


def flat(array: Array, lead: int) -> Array:
    """Return the array with its first `lead` axes made one."""
    return array.reshape(math.prod(array.shape[:lead]), *array.shape[lead:])


def padded(array: Array, count: int, fill: int) -> Array:
    """Return the array with `fill` at the end of its first axis, until that is `count` long."""
    missing = ((0, count - array.shape[0]), *((0, 0) for _ in array.shape[1:]))
    return jnp.pad(array, missing, constant_values=fill) if count > array.shape[0] else array

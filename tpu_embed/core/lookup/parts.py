"""Cut what belongs to a batch into equal parts by its examples, on each device by itself.

An array `[B, …]` is cut along its first axis. Of sequences, a part has the events of its examples.
Where they begin depends on the lengths, but how many there is room for must be known:

    C = 8 events of 4 examples    a a b b b c d d
    2 parts of at most C' = 5     a a b b b, then c d d - -

Input: the arrays of one device, and the number of a part. Output: the part; or the arrays with
something else in its place.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import Array, PyTree
from tpu_embed.core.lookup.jagged import Jagged

ARRAYS = (jax.Array, Jagged)
"""What an activation is, and what may belong to one."""


def flatten_arrays(tree: PyTree) -> tuple[list[Any], Any]:
    """Return the arrays of a tree, where a `Jagged` counts as one, and the tree without them."""
    return jax.tree.flatten(tree, is_leaf=lambda one: isinstance(one, Jagged))


def extent_of(array: Any, replicas: int) -> tuple[int | None, Any, int]:
    """Return how large an array is that is split into so many replicas, outside of a program.

    Returns:
      B, None of a single number; of a `Jagged` its row splits `[S, B / S + 1]` and C, else None, 0.
    """
    if not isinstance(array, Jagged):
        return next(iter(np.shape(array)), None), None, 0
    splits = array.row_splits
    return replicas * (splits.shape[1] - 1), splits, array.values.shape[1]


def take_part(array: Any, *, room: int, number: Array, count: int) -> Any:
    """Return a part of one device's examples.

    Args:
      array: `[B / S, …]`, or a `Jagged` of one replica.
      room: C' of a `Jagged`, at least the events of the part.
      number: of the part, int32 from 0.
      count: how many parts there are.
    """
    if not isinstance(array, Jagged):
        size = array.shape[0] // count
        return jax.lax.dynamic_slice_in_dim(array, number * size, size)
    start, shift, splits = _span(array, room, number, count)
    events = jax.lax.dynamic_slice_in_dim(array.values[0], start, room)
    # What follows the part's events in the slice belongs to other examples.
    inside = _column(jnp.arange(room, dtype=jnp.int32) < splits[-1], events)
    events = jnp.where(inside, jnp.roll(events, -shift, axis=0), jnp.zeros((), events.dtype))
    return Jagged(events[None], splits[None])


def put_part(array: Any, new: Array, *, room: int, number: Array, count: int) -> Array:
    """Return one device's values with others in the place of a part.

    Args:
      array: as for `take_part`.
      new: shaped like the values of the part.
      room: as for `take_part`.
      number: as for `take_part`.
      count: as for `take_part`.
    """
    if not isinstance(array, Jagged):
        return jax.lax.dynamic_update_slice_in_dim(array, new, number * new.shape[0], axis=0)
    start, shift, splits = _span(array, room, number, count)
    values, places = array.values[0], jnp.arange(room, dtype=jnp.int32) - shift
    events = jax.lax.dynamic_slice_in_dim(values, start, room)
    inside = _column((places >= 0) & (places < splits[-1]), events)
    events = jnp.where(inside, jnp.roll(new[0], shift, axis=0), events)
    return jax.lax.dynamic_update_slice_in_dim(values, events, start, axis=0)[None]


def _span(sequences: Jagged, room: int, number: Array, count: int) -> tuple[Array, Array, Array]:
    """Return where the events of a part are on one device: in a slice of C' places.

    Returns:
      the first place of the slice; how far after it the part's events begin; the part's row splits.
    """
    # C = 10 places, C' = 4, and a part with the events at 8 and 9: a slice from 8 on would end
    # beyond C, so it is the one from 6 on, in which they begin at 2.
    size = (sequences.row_splits.shape[1] - 1) // count
    splits = jax.lax.dynamic_slice_in_dim(sequences.row_splits[0], number * size, size + 1)
    start = jnp.minimum(splits[0], sequences.values.shape[1] - room)
    return start, splits[0] - start, splits - splits[0]


def _column(mask: Array, events: Array) -> Array:
    """Return a mask `[C']` as `[C', 1, …]`."""
    return mask.reshape(-1, *[1] * (events.ndim - 1))

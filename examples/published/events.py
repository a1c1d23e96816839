"""The events of one replica, as networks take them, and dropout that devices do not change.

The C events `[C, D]` of several histories stand in a row, one history after the other.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from tpu_embed import Jagged


class Events(NamedTuple):
    """The events of one replica.

    Attributes:
      history: values float [C, D], the rows of the items.
      labels: int32 [C], of each event another one, the same on any number of devices; with `rng`,
        they decide what is dropped.
      rng: a PRNG key of the step; None: nothing is dropped.
      times: int32 [C], the time of each event, in seconds; None: not known.
      next_times: int32 [C], the time of the event that follows each; None: not known.
    """

    history: Jagged
    labels: jax.Array
    rng: jax.Array | None
    times: jax.Array | None = None
    next_times: jax.Array | None = None


def drop(x: jax.Array, rate: float, rng: jax.Array | None, labels: jax.Array) -> jax.Array:
    """Set a random share of the entries of `x` to 0, and divide the others by 1 - rate.

    Args:
      x: floats [..., D].
      rate: the share, from 0 to below 1.
      rng: a PRNG key; None: `x` is returned as it is.
      labels: int32 [...]; rows with one label lose the same entries.
    """
    if rng is None or not rate:
        return x
    keys = jax.vmap(jax.random.fold_in, (None, 0))(rng, labels.reshape(-1))
    draw = functools.partial(jax.random.bits, shape=x.shape[-1:], dtype=jnp.uint16)
    kept = jax.vmap(draw)(keys).reshape(x.shape) < round((1 - rate) * 2**16)
    return jnp.where(kept, x / (1 - rate), 0)


def drop_events(x: jax.Array, rate: float, events: Events, layer: int) -> jax.Array:
    """Do what `drop` does to `x` `[C, D]`; of an event, each layer loses other entries."""
    rng = None if events.rng is None else jax.random.fold_in(events.rng, layer)
    return drop(x, rate, rng, events.labels)


def normal(rngs: nnx.Rngs, *shape: int) -> nnx.Param:
    return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape))


class Positions(nnx.Module):
    """Add a vector for the position of an event in its history, if the config wants it."""

    def __init__(self, config, rngs: nnx.Rngs):
        length = config.longest + 1
        self.table = normal(rngs, length, config.dim) if config.positions else None

    def __call__(self, x: jax.Array, history: Jagged) -> jax.Array:
        return x if self.table is None else x + self.table[...][history.positions]

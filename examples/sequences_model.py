"""HSTU layers over jagged histories, and the softmax over all items for the next one.

`feature_config` declares the tables, and `pieces` cuts the histories. The rest works on one
replica: C events `[C, D]` of several histories, one after the other, and their segment ids `[C]`.
An event attends to the events before it in its own history. A history has at most W events, so that
all of them are in its own block of W events or in the block before it: the scores are
`[C / W, W, 2 W]`, not `[C, C]`, and no history is padded to the longest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tpu_embed import FeatureConfig, TableConfig

Model = Callable[[Any], jax.Array]  # of a replica's `Jagged`, such as a `Network`


def feature_config(config, items: int) -> dict:
    normal = jax.nn.initializers.normal(config.init_scale)
    table = TableConfig(items, config.dim, initializer=normal, name="items")
    return {"history": FeatureConfig(table, jagged=True), "item": FeatureConfig(table)}


def pieces(histories: list[np.ndarray], longest: int, rng) -> list[np.ndarray]:
    """Return histories of at most `longest` events: long ones are cut, elsewhere each time.

    The last event of a piece, which is only predicted, is the first of the next piece.
    """
    found = []
    for history in histories:
        before = rng.integers(longest - 1) if len(history) > longest else 0
        starts = range(-before, len(history) - 1, longest - 1)
        found += [history[max(start, 0) : start + longest] for start in starts]
    return found


def in_blocks(events: jax.Array, length: int, fill: float) -> jax.Array:
    """Return the blocks of `length` events, after one that is empty: `[C / W + 1, W, …]`."""
    inner = [(0, 0)] * (events.ndim - 1)
    padded = jnp.pad(events, [(length, -len(events) % length), *inner], constant_values=fill)
    return padded.reshape(-1, length, *events.shape[1:])


def attend(query, key, value, segments, bias) -> jax.Array:
    """Return the sum of values, weighted by SiLU(Q Kᵀ + r) / W, `[C, heads, d]`.

    Args:
      query, key, value: float [C, heads, d].
      segments: int32 [C], the history of each event.
      bias: float [heads, W], r by how many events the key is before the query.
    """
    events, longest = len(segments), bias.shape[1]

    def own(x, fill=0):
        return in_blocks(x, longest, fill)[1:]

    def with_previous(x, fill=0):  # [C / W, 2 W, …]
        blocks = in_blocks(x, longest, fill)
        return jnp.concatenate([blocks[:-1], blocks[1:]], axis=1)

    # Query i of a block is event W + i of two blocks, so key j is W + i - j events before it.
    distance = longest + np.arange(longest)[:, None] - np.arange(2 * longest)
    same = own(segments, -1)[:, :, None] == with_previous(segments, -2)[:, None]
    scores = jnp.einsum("bqhd,bkhd->bhqk", own(query), with_previous(key))
    scores += bias[:, np.clip(distance, 0, longest - 1)]
    seen = same & (distance >= 0) & (distance < longest)
    weights = jnp.where(seen[:, None], jax.nn.silu(scores), 0) / longest
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, with_previous(value))
    return mixed.reshape(-1, *value.shape[1:])[:events]


class Layer(nnx.Module):
    """One HSTU layer (Zhai et al., "Actions Speak Louder than Words", 2024)."""

    def __init__(self, config, rngs: nnx.Rngs):
        dim, self.heads = config.dim, config.heads
        self.before = nnx.LayerNorm(dim, rngs=rngs)
        self.inner = nnx.Linear(dim, 4 * dim, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros((config.heads, config.longest)))
        self.after = nnx.LayerNorm(dim, rngs=rngs)
        self.outer = nnx.Linear(dim, dim, rngs=rngs)

    def __call__(self, x: jax.Array, segments: jax.Array) -> jax.Array:
        gate, *qkv = jnp.split(jax.nn.silu(self.inner(self.before(x))), 4, axis=-1)
        query, key, value = (y.reshape(len(y), self.heads, -1) for y in qkv)
        mixed = attend(query, key, value, segments, self.bias[...]).reshape(x.shape)
        return x + self.outer(self.after(mixed) * gate)


class Network(nnx.Module):
    """Map each event of a replica's histories to the vector of what comes next, `[C, D]`."""

    def __init__(self, config, rngs: nnx.Rngs):
        self.scale = 1 / config.init_scale
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.layers)])
        self.last = nnx.LayerNorm(config.dim, rngs=rngs)

    def __call__(self, history) -> jax.Array:
        x, segments = history.values * self.scale, history.segment_ids
        for layer in self.layers:
            x = layer(x, segments)
        return self.last(x)


def next_item_losses(network: Model, history, items: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a replica's sum of -log softmax of the next events, and how many there are.

    Args:
      network: the model.
      history: `Jagged` of one replica.
      items: float [items, D], the vectors of all items.
    """
    # The event after place c is place c + 1, unless another history begins there, or none.
    segments, predicted = history.segment_ids, network(history)[:-1]
    there = (segments[1:] == segments[:-1]) & history.valid[1:]
    own = (predicted * history.values[1:]).sum(-1)
    loss = jax.nn.logsumexp(predicted @ items.T, axis=-1) - own
    return jnp.where(there, loss, 0).sum(), there.sum()


def last_vectors(network: Model, history) -> jax.Array:
    """Return what comes after the last event of each history, `[B / S, D]` of a replica."""
    return history.with_values(network(history)).last()

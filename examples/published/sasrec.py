"""SASRec with sampled softmax on Amazon's reviews: the next item of each user, of all items.

The network is Kang and McAuley's, "Self-Attentive Sequential Recommendation", 2018: causal softmax
attention and a small network per event. Its loss is a softmax over the next item and items drawn at
random, not the published one of one wrong item each.
"""

from __future__ import annotations

import functools
import math

import beside  # noqa: F401, finds the modules that examples share
import jax
import jax.numpy as jnp
import numpy as np
from events import Events, Positions, drop_events
from flax import nnx
from reviews import main


def in_blocks(x: jax.Array, width: int, fill: int = 0) -> jax.Array:
    """Cut `x` `[C, …]` into blocks of W events, after a block of `fill`: `[1 + ⌈C / W⌉, W, …]`."""
    inner = [(0, 0)] * (x.ndim - 1)
    cut = jnp.pad(x, [(width, -len(x) % width), *inner], constant_values=fill)
    return cut.reshape(-1, width, *x.shape[1:])


def softmax_attention(q, k, v, factors, segments, width: int) -> jax.Array:
    """Return causal attention within each history, `[C, heads, d]`.

    All that an event attends to is in its own block of W events or in the one before, so the scores
    are `[⌈C / W⌉, heads, W, 2 W]`.

    Args:
      q, k, v: floats [C, heads, d].
      factors: floats [C, heads, W], by which an event's weights of the event n places before it are
        multiplied.
      segments: int32 [C], the history of each event.
      width: W, at least the length of the longest history.
    """
    before_and_own = [in_blocks(x, width) for x in (k, v)]
    k, v = (jnp.concatenate([x[:-1], x[1:]], axis=1) for x in before_and_own)  # [⌈C / W⌉, 2 W, …]
    q, own = in_blocks(q, width)[1:], in_blocks(segments, width, -1)
    same = own[1:, :, None] == jnp.concatenate([own[:-1], own[1:]], axis=1)[:, None]
    # Query i of a block is event W + i of two blocks, so key j is W + i - j events before it.
    distance = width + np.arange(width)[:, None] - np.arange(2 * width)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    allowed = (same & (distance >= 0))[:, None]
    weights = jax.nn.softmax(jnp.where(allowed, scores, -1e9), axis=-1)  # finite, so never NaN
    factors = in_blocks(factors, width)[1:].swapaxes(1, 2)  # [⌈C / W⌉, heads, W, W]
    before = np.clip(distance, 0, width - 1)[None, None]
    weights *= jnp.take_along_axis(factors, before, axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return mixed.reshape(-1, *v.shape[2:])[: len(segments)]


class SASRecBlock(nnx.Module):
    """Attention, then two linear layers with a ReLU between, each beside what it was given."""

    def __init__(self, config, rngs: nnx.Rngs):
        dim, self.heads, self.longest = config.dim, config.heads, config.longest
        self.before, self.between = (nnx.LayerNorm(dim, rngs=rngs) for _ in range(2))
        self.qkv, self.out = nnx.Linear(dim, 3 * dim, rngs=rngs), nnx.Linear(dim, dim, rngs=rngs)
        self.first = nnx.Linear(dim, config.hidden, rngs=rngs)
        self.second = nnx.Linear(config.hidden, dim, rngs=rngs)
        self.rate = config.dropout

    def __call__(self, x: jax.Array, events: Events, layer: int) -> jax.Array:
        parts = jnp.split(self.qkv(self.before(x)), 3, axis=-1)
        q, k, v = (y.reshape(len(x), self.heads, -1) for y in parts)
        width, layers = self.longest + 1, range(4 * layer + 1, 4 * layer + 5)
        of_weights, of_attention, of_hidden, last = (
            functools.partial(drop_events, rate=self.rate, events=events, layer=n) for n in layers
        )
        factors = of_weights(jnp.ones((len(x), self.heads * width), x.dtype))
        factors = factors.reshape(len(x), self.heads, width)
        mixed = softmax_attention(q, k, v, factors, events.history.segment_ids, width)
        x = x + of_attention(self.out(mixed.reshape(x.shape)))
        hidden = self.second(of_hidden(jax.nn.relu(self.first(self.between(x)))))
        return x + last(hidden)


class SASRec(nnx.Module):
    """Map each event to the vector of what comes next, `[C, D]`."""

    def __init__(self, config, rngs: nnx.Rngs):
        self.rate, self.positions = config.dropout, Positions(config, rngs)
        self.blocks = nnx.List([SASRecBlock(config, rngs) for _ in range(config.blocks)])
        self.last = nnx.LayerNorm(config.dim, rngs=rngs)

    def __call__(self, events: Events) -> jax.Array:
        x = self.positions(events.history.values, events.history)
        x = drop_events(x, self.rate, events, 0)
        for layer, block in enumerate(self.blocks):
            x = block(x, events, layer)
        return self.last(x)


if __name__ == "__main__":
    main(__doc__, "sasrec_amazon.py", SASRec)

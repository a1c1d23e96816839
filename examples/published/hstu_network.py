"""HSTU: Zhai et al., "Actions Speak Louder than Words", 2024, as their code has it for MovieLens.

In each block the first linear layer has no bias, and the LayerNorms have no parameters. Attention
has biases by position, and by time where times are given.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from events import Events, Positions, drop_events, normal
from flax import nnx

from tpu_embed.nn import jagged_attention

TILE = 64  # events of a block of attention


def published_bucket(elapsed: jax.Array) -> jax.Array:
    """Return ⌊ln(seconds) / 0.301⌋, as the authors' code has it."""
    return (jnp.log(jnp.maximum(elapsed, 1).astype(jnp.float32)) / 0.301).astype(jnp.int32)


class HSTULayer(nnx.Module):
    """X + W₂ drop(LayerNorm(A V) ⊙ U), where U, V, Q, K = split(SiLU(W₁ LayerNorm(X)))."""

    def __init__(self, config, rngs: nnx.Rngs):
        dim, self.heads, self.longest = config.dim, config.heads, config.longest
        plain = {"use_bias": False, "use_scale": False, "epsilon": 1e-6}
        self.before, self.after = (nnx.LayerNorm(dim, rngs=rngs, **plain) for _ in range(2))
        spread = nnx.initializers.normal(0.02)
        self.inner = nnx.Linear(dim, 4 * dim, use_bias=False, kernel_init=spread, rngs=rngs)
        self.outer = nnx.Linear(dim, dim, kernel_init=nnx.initializers.xavier_uniform(), rngs=rngs)
        self.position_bias = normal(rngs, self.heads, self.longest + 1)
        self.time_bias = normal(rngs, self.heads, config.buckets) if config.buckets else None
        self.rate = config.dropout

    def __call__(self, x: jax.Array, events: Events, layer: int) -> jax.Array:
        gate, *vqk = jnp.split(jax.nn.silu(self.inner(self.before(x))), 4, axis=-1)
        v, q, k = (y.reshape(len(x), self.heads, -1) for y in vqk)
        known = {
            "longest": self.longest + 1,
            "position_bias": self.position_bias[...],
            "block": TILE,
        }
        if self.time_bias is not None:
            known |= {"time_bias": self.time_bias[...], "times": events.times}
            known |= {"query_times": events.next_times, "time_bucket": published_bucket}
        mixed = jagged_attention(q, k, v, events.history.row_splits, **known).reshape(x.shape)
        return x + self.outer(drop_events(self.after(mixed) * gate, self.rate, events, layer + 1))


class HSTU(nnx.Module):
    """Map each event to the vector of what comes next, `[C, D]`."""

    def __init__(self, config, rngs: nnx.Rngs):
        self.rate, self.positions = config.dropout, Positions(config, rngs)
        self.layers = nnx.List([HSTULayer(config, rngs) for _ in range(config.blocks)])

    def __call__(self, events: Events) -> jax.Array:
        history = events.history
        x = history.values * math.sqrt(history.values.shape[-1])
        x = drop_events(self.positions(x, history), self.rate, events, 0)
        for layer, block in enumerate(self.layers):
            x = block(x, events, layer)
        return x

"""HSTU layers (Zhai et al., "Actions Speak Louder than Words", 2024) over jagged sequences.

Input: a vector per event `[N, D]`, and what is known about the events. Output: the same shape.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from tpu_embed.nn import jagged_attention


class Sequences(NamedTuple):
    """What `jagged_attention` is told about N events of B examples, on one device."""

    splits: jax.Array  # int32 [B + 1]
    times: jax.Array | None = None  # int32 [N]
    query_times: jax.Array | None = None  # int32 [N]
    candidate: jax.Array | None = None  # bool [N]


class Layer(nnx.Module):
    """X + Y, where Y = (LayerNorm(A V) ⊙ U) W₂ + b₂ and U, V, Q, K = split(SiLU(X W₁ + b₁)).

    Args:
      dim: D.
      heads: how many heads divide D.
      longest: L, by which sums of attention are divided, and the number of positions.
      buckets: of the table of biases by time; 0 for no such table.
      rngs: of the initial values.
      block: W, events of a block.
      norm_first: whether U, V, Q and K are made of LayerNorm(X) in place of X.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        longest: int,
        buckets: int = 0,
        rngs: nnx.Rngs,
        block: int = 128,
        norm_first: bool = False,
    ):
        self.heads, self.longest, self.block = heads, longest, block
        self.first = nnx.LayerNorm(dim, rngs=rngs) if norm_first else None
        self.inner = nnx.Linear(dim, 4 * dim, rngs=rngs)
        self.position_bias = nnx.Param(jnp.zeros((heads, longest)))
        self.time_bias = nnx.Param(jnp.zeros((heads, buckets))) if buckets else None
        self.norm = nnx.LayerNorm(dim, rngs=rngs)
        self.outer = nnx.Linear(dim, dim, rngs=rngs)

    def __call__(self, x: jax.Array, sequences: Sequences) -> jax.Array:
        inner = self.inner(x if self.first is None else self.first(x))
        u, v, q, k = jnp.split(jax.nn.silu(inner), 4, axis=-1)
        q, k, heads_of_v = (y.reshape(len(x), self.heads, -1) for y in (q, k, v))
        mixed = jagged_attention(
            q,
            k,
            heads_of_v,
            sequences.splits,
            longest=self.longest,
            position_bias=self.position_bias[...],
            time_bias=None if self.time_bias is None else self.time_bias[...],
            times=sequences.times,
            query_times=sequences.query_times,
            candidate=sequences.candidate,
            block=self.block,
        )
        return x + self.outer(self.norm(mixed.reshape(x.shape)) * u)


class Stack(nnx.Module):
    """Several layers, and a LayerNorm at the end.

    Args:
      layers: how many.
      dim, heads, options: those of each `Layer`.
      rngs: of the initial values.
    """

    def __init__(self, layers: int, dim: int, heads: int, *, rngs: nnx.Rngs, **options):
        self.layers = nnx.List([Layer(dim, heads, rngs=rngs, **options) for _ in range(layers)])
        self.last = nnx.LayerNorm(dim, rngs=rngs)

    def __call__(self, x: jax.Array, sequences: Sequences) -> jax.Array:
        for layer in self.layers:
            x = layer(x, sequences)
        return self.last(x)

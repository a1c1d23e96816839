"""A transformer whose layers read characters, and a memory of n-grams beside them.

The memory's vectors are projected to a key and a value. How much of the value is added to the
stream follows from how well the key fits what the network has made of the text so far (Cheng et
al., "Conditional memory via scalable lookup", 2026, arXiv:2601.07372, section 2.3).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx


class Block(nnx.Module):
    """Causal attention and two linear layers, each added to what it reads."""

    def __init__(self, config, rngs: nnx.Rngs) -> None:
        plain = nnx.initializers.normal(0.02)
        into_stream = nnx.initializers.normal(0.02 / math.sqrt(2 * config.layers))
        width, options = config.width, {"use_bias": False, "rngs": rngs}
        self.heads = config.heads
        self.norms = nnx.List([nnx.LayerNorm(width, **options) for _ in range(2)])
        self.project = nnx.Linear(width, 3 * width, kernel_init=plain, **options)
        self.attended = nnx.Linear(width, width, kernel_init=into_stream, **options)
        self.widen = nnx.Linear(width, 4 * width, kernel_init=plain, **options)
        self.narrow = nnx.Linear(4 * width, width, kernel_init=into_stream, **options)

    def __call__(self, stream: jax.Array) -> jax.Array:
        """Return the stream [B, L, width] with what the block adds."""
        projected = self.project(self.norms[0](stream))
        split = projected.reshape(*stream.shape[:2], 3, self.heads, -1)
        found = jax.nn.dot_product_attention(*jnp.unstack(split, axis=2), is_causal=True)
        stream = stream + self.attended(found.reshape(stream.shape))
        return stream + self.narrow(nnx.gelu(self.widen(self.norms[1](stream))))


class Memory(nnx.Module):
    """What the rows of n-grams add to the stream."""

    def __init__(self, config, rngs: nnx.Rngs) -> None:
        columns, width = len(config.orders) * config.memory_heads, config.width
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(3)])
        self.project = nnx.Linear(columns * config.memory_dim, 2 * width, use_bias=False, rngs=rngs)
        # What is nearby begins as nothing, so that the value alone is added.
        self.weights = nnx.Param(jnp.zeros((4, width)))
        self.apart = max(config.orders)

    def __call__(self, stream: jax.Array, rows: jax.Array) -> jax.Array:
        """Return [B, L, width] for a stream of this shape.

        Args:
          stream: what the network has made of the text so far.
          rows: [B, L, C, D], those of the n-grams that end at each place; zeros where none does.
        """
        key, value = jnp.split(self.project(rows.reshape(*rows.shape[:2], -1)), 2, axis=-1)
        fit = (self.norms[0](stream) * self.norms[1](key)).sum(-1, keepdims=True)
        value = jax.nn.sigmoid(fit / math.sqrt(stream.shape[-1])) * value
        return value + nnx.silu(self._nearby(self.norms[2](value)))

    def _nearby(self, value: jax.Array) -> jax.Array:
        """Return weighted sums of each place and of earlier ones, [B, L, width] as the value.

        It is a convolution of each number by itself, written as sums: the gradient of `nnx.Conv`
        with `feature_group_count` is too large on a mesh with an axis over which its input is not
        split, by the size of that axis (JAX 0.10 to 0.12).
        """
        count, length = len(self.weights[...]), value.shape[1]
        padded = jnp.pad(value, ((0, 0), ((count - 1) * self.apart, 0), (0, 0)))
        starts = range(0, count * self.apart, self.apart)
        places = (padded[:, start : start + length] for start in starts)
        weighted = (a * b for a, b in zip(self.weights[...], places, strict=True))
        return sum(weighted, jnp.zeros_like(value))


class Network(nnx.Module):
    """Logits of the next character at each place.

    Args:
      config: the numbers of `configs/memory_lm.py`.
      characters: how many there are.
      with_memory: whether it reads a memory.
      rngs: of the initial parameters.
    """

    def __init__(self, config, characters: int, *, with_memory: bool, rngs: nnx.Rngs) -> None:
        plain, width = nnx.initializers.normal(0.02), config.width
        self.places = nnx.Param(plain(rngs.params(), (config.block, width)))
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(width, use_bias=False, rngs=rngs)
        self.head = nnx.Linear(width, characters, use_bias=False, kernel_init=plain, rngs=rngs)
        self.memory_layer = config.memory_layer
        self.memory = Memory(config, rngs) if with_memory else None

    def __call__(self, activations: dict[str, jax.Array]) -> jax.Array:
        """Return logits [B, L, characters] of vectors of characters [B, L, width], and memory."""
        stream = activations["character"] + self.places
        for number, block in enumerate(self.blocks):
            if self.memory is not None and number == self.memory_layer:
                stream = stream + self.memory(stream, activations["memory"])
            stream = block(stream)
        return self.head(self.norm(stream))

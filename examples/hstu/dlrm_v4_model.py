"""The network of MLPerf's DLRMv4: HSTU layers over a request, and a score for each candidate.

All of it works on one replica, whose R requests stand one after the other. The sequence of a
request is its n contexts (the user, and ids that cross two features), its history, its candidates.
Sizes are those of the reference's README (mlcommons/training, recommendation, November 2026). What
it leaves open: the vectors of an event's tables are concatenated before their two linear layers; an
event's time is that of the square root of the minutes before the request. Dropout is left out.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from places import find_candidates

from tpu_embed import Jagged
from tpu_embed.nn import jagged_attention

DAY, WEEK = 86_400, 7 * 86_400  # seconds


class Samples(NamedTuple):
    """The requests of one replica; with a first axis of replicas, those of all."""

    contexts: jax.Array  # float [R, n, D]
    history: Jagged  # float [C, t · D], the vectors of t tables side by side
    candidates: Jagged  # float [K, t · D]
    actions: jax.Array  # int32 [C], bits: listened, liked, skipped
    times: jax.Array  # int32 [C], seconds
    asked: jax.Array  # int32 [R], the time of each request


class TwoLayers(nnx.Module):
    """A linear layer, y ⊙ sigmoid(LayerNorm(y)), and another linear layer."""

    def __init__(self, sizes: tuple[int, int, int], rngs: nnx.Rngs, dtype):
        self.first = nnx.Linear(sizes[0], sizes[1], rngs=rngs, dtype=dtype)
        self.norm = nnx.LayerNorm(sizes[1], rngs=rngs)
        self.second = nnx.Linear(sizes[1], sizes[2], rngs=rngs, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.first(x)
        return self.second(y * jax.nn.sigmoid(self.norm(y)).astype(y.dtype))


class WideLayer(nnx.Module):
    """One HSTU layer. What it projects to the result is [U, X, LayerNorm(A V) ⊙ U]."""

    def __init__(self, config, rngs: nnx.Rngs):
        self.heads, self.longest, self.block = config.heads, config.longest, config.block
        self.sizes = [config.value_dim, config.value_dim, config.key_dim, config.key_dim]
        width, values = config.width, config.heads * config.value_dim
        self.before = nnx.LayerNorm(width, rngs=rngs)
        inner = config.heads * sum(self.sizes)
        self.inner = nnx.Linear(width, inner, rngs=rngs, dtype=config.dtype)
        self.after = nnx.LayerNorm(values, rngs=rngs)
        self.outer = nnx.Linear(2 * values + width, width, rngs=rngs, dtype=config.dtype)

    def __call__(self, x: jax.Array, splits: jax.Array, candidate: jax.Array) -> jax.Array:
        """Return the next vectors of all places, `[N, width]`; `candidate` bool [N]."""
        projected = jax.nn.silu(self.inner(self.before(x))).reshape(len(x), self.heads, -1)
        ends = [sum(self.sizes[:i]) for i in (1, 2, 3)]
        u, v, q, k = jnp.split(projected, ends, axis=-1)
        options = {"longest": self.longest, "block": self.block}
        mixed = jagged_attention(q, k, v, splits, candidate=candidate, **options)
        gate = u.reshape(len(x), -1)
        gated = self.after(mixed.reshape(len(x), -1)).astype(gate.dtype) * gate
        mixed = self.outer(jnp.concatenate([gate, x.astype(gate.dtype), gated], axis=-1))
        return x + mixed.astype(x.dtype)


class DlrmV4(nnx.Module):
    """Map the requests of a replica to logits, one per candidate."""

    def __init__(self, config, rngs: nnx.Rngs):
        dim, width, dtype = config.dim, config.width, config.dtype
        tables, contexts, scale = len(config.histories), len(config.contexts), config.dim**-0.5
        event = tables * dim
        self.event = TwoLayers((event, config.hidden_size, width), rngs, dtype)
        self.actions = nnx.Param(0.1 * jax.random.normal(rngs.params(), (3, config.action_dim)))
        self.action = nnx.Linear(3 * config.action_dim, width, rngs=rngs, dtype=dtype)
        kernel = scale * jax.random.normal(rngs.params(), (contexts, dim, width))
        self.context = nnx.Param(kernel)
        uniform = nnx.initializers.uniform
        self.positions = nnx.Embed(config.positions, width, rngs=rngs, embedding_init=uniform(0.02))
        self.ages = nnx.Embed(config.ages, width, rngs=rngs, embedding_init=uniform(0.02))
        self.layers = nnx.List([WideLayer(config, rngs) for _ in range(config.layers)])
        self.clock = nnx.Linear(width + 4, width, rngs=rngs)
        self.user_norm, self.item_norm = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.item = TwoLayers((event, width, width), rngs, dtype)
        self.head = TwoLayers((width, width, 1), rngs, jnp.float32)

    def __call__(self, requests: Samples) -> jax.Array:
        """Return logits, float32 `[K]`; those beyond the last candidate mean nothing."""
        sequence, candidate, places = self.sequence(requests)
        x, splits = sequence.values, sequence.row_splits
        for layer in self.layers:
            x = nnx.remat(WideLayer.__call__)(layer, x, splits, candidate)
        candidates = requests.candidates
        asked = candidates.spread(requests.asked)
        turns = 2 * jnp.pi * jnp.stack([asked % DAY / DAY, asked % WEEK / WEEK], axis=-1)
        user = jnp.concatenate([x[places], jnp.sin(turns), jnp.cos(turns)], axis=-1)
        user = self.user_norm(self.clock(user))
        return self.head(user * self.item_norm(self.item(candidates.values)))[:, 0]

    def sequence(self, requests: Samples) -> tuple[Jagged, jax.Array, jax.Array]:
        """Return what the layers work on.

        Returns:
          the sequences, float32 `[N, width]`, N = R · n + C + K; which places are candidates, bool
          [N]; the place of each candidate, int32 [K].
        """
        count, n = requests.contexts.shape[:2]
        history, candidates, asked = requests.history, requests.candidates, requests.asked
        first = jnp.einsum("rnd,ndw->rnw", requests.contexts, self.context[...])
        every_n = n * jnp.arange(count + 1, dtype=jnp.int32)
        contexts = Jagged(first.reshape(count * n, -1), every_n)
        events = self.event(history.values) + self.action(self.of_actions(requests.actions))
        shown = self.event(candidates.values)
        parts = (history, events), (candidates, shown)
        x = contexts.concatenate([part.with_values(y.astype(jnp.float32)) for part, y in parts])

        # How long before its request each place was, in seconds: 0 but in the history.
        before = history.with_values(history.spread(asked) - requests.times)
        of_contexts = Jagged(jnp.zeros(count * n, jnp.int32), every_n)
        of_shown = candidates.with_values(jnp.zeros(len(shown), jnp.int32))
        ages = of_contexts.concatenate([before, of_shown])
        bucket = jnp.sqrt(jnp.maximum(ages.values, 0) / 60).astype(jnp.int32)
        # All candidates of a request have the position that follows its history.
        follows = n + history.lengths  # [R]
        position = jnp.minimum(x.positions, x.spread(follows))
        added = self.positions(jnp.minimum(position, self.positions.num_embeddings - 1))
        added += self.ages(jnp.minimum(bucket, self.ages.num_embeddings - 1))
        return x.with_values(x.values + added), *find_candidates(x, candidates, follows)

    def of_actions(self, bits: jax.Array) -> jax.Array:
        """Return a vector for the set bits of each action, `[C, 3 · action_dim]`."""
        there = ((bits[:, None] >> jnp.arange(3)) & 1).astype(jnp.float32)
        return (there[..., None] * self.actions[...]).reshape(len(bits), -1)

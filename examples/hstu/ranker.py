"""A score for each candidate of a request: candidates stand after the history, in one sequence.

The history is computed once for all candidates. Each of them attends to the history and to itself,
so its score does not depend on which others there are.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from layers import Sequences, Stack
from places import find_candidates

from tpu_embed import FeatureConfig, Jagged, TableConfig


class Requests(NamedTuple):
    """The requests of one replica; `Jagged` without the axis of replicas, of B requests each."""

    history: Jagged  # float [C, D], the vectors of the events
    candidates: Jagged  # float [M, D]
    times: Jagged | None = None  # int32 [C], when the events were
    now: jax.Array | None = None  # int32 [B], the time of each request


def feature_config(items: TableConfig) -> dict[str, FeatureConfig]:
    """Return the two features of a request, which share the table of items."""
    return {name: FeatureConfig(items, jagged=True) for name in ("history", "candidates")}


class Ranker(nnx.Module):
    """HSTU layers over history and candidates, and a logit of each candidate.

    Args:
      layers, dim, heads, options: those of `Stack`.
      rngs: of the initial values.
    """

    def __init__(self, layers: int, dim: int, heads: int, *, rngs: nnx.Rngs, **options):
        self.stack = Stack(layers, dim, heads, rngs=rngs, **options)
        self.kind = nnx.Param(0.1 * jax.random.normal(rngs.params(), (dim,)))  # marks candidates
        self.head = nnx.Linear(dim, 1, rngs=rngs)

    def __call__(self, requests: Requests) -> Jagged:
        """Return the logit of each candidate, float `[M]`, as a `Jagged`."""
        history, candidates = requests.history, requests.candidates
        marked = candidates.with_values(candidates.values + self.kind[...])
        joined = history.concatenate([marked])
        flags, places = find_candidates(joined, candidates, history.lengths)
        times = None
        if requests.times is not None and requests.now is not None:
            now = candidates.with_values(candidates.spread(requests.now))
            times = requests.times.concatenate([now]).values
        about = Sequences(joined.row_splits, times, None, flags)
        logits = self.head(self.stack(joined.values, about))[:, 0]
        return candidates.with_values(jnp.where(candidates.valid, logits[places], 0))


def listwise_losses(logits: Jagged, chosen: jax.Array) -> jax.Array:
    """Return -log softmax of the chosen candidate among those of its request, float `[B]`.

    Args:
      logits: float [M].
      chosen: int32 [B], the position of the chosen one among the request's candidates.
    """
    counted = jnp.where(logits.valid, jax.lax.stop_gradient(logits.values), -jnp.inf)
    # Relative to the request's own largest logit, so that no sum of exponentials becomes 0.
    largest = jax.ops.segment_max(counted, logits.segment_ids, len(logits.lengths))
    shifted = jnp.where(logits.valid, logits.values - logits.spread(largest), -jnp.inf)
    total = logits.with_values(jnp.exp(shifted)).sums()
    return jnp.log(total) - shifted[logits.row_splits[:-1] + chosen]


def served(network: Ranker):
    """Return a function for `io.export_model`, of activations, times `[B, H]` and `now` `[B]`.

    It gives the logits of the candidates, float [B, K], in the places of their ids; H and K are the
    columns of both features.
    """

    def model(activations, times, now):
        history, candidates = (
            Jagged(x.values[0], x.row_splits[0])
            for x in (activations["history"], activations["candidates"])
        )
        when = Jagged.from_padded(times, history.lengths, 1, len(history.values))
        when = Jagged(when.values[0], when.row_splits[0])
        logits = network(Requests(history, candidates, when, now))
        return logits.to_padded(len(candidates.values) // len(now))[0]

    return model

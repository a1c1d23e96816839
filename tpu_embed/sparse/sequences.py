"""The jagged sequences of an engine's only feature, as its lookups and updates pass them on.

A lookup is one equation with one float result. The row splits of a `Jagged` are known from the ids
alone and have no gradient, so they stay outside of the equation. Its result is the values
`[S, C, D]` of a placed batch. Of dense ids it is `[…, L, D]`, padded as of any other sequence, so
that lookups are mapped, repeated in loops and joined in the same way.

Input: ids, and the result of such an equation or its gradient. Output: a `Jagged`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tpu_embed._checks import message
from tpu_embed._types import Array, Tracer
from tpu_embed.core.batch import Batch, padded_lengths
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.lookup import Jagged, row_splits


def is_jagged(engine: EmbeddingEngine) -> bool:
    """Return whether the only feature of an engine is jagged."""
    return engine.layout.features[0].config.jagged


def check_sequences(engine: EmbeddingEngine, what: str, ids: Any) -> None:
    """Check the shape of dense ids of a jagged feature.

    Raises:
      ValueError: it is not `[B, H]`, or the replicas do not divide B.
    """
    replicas = engine.layout.axes.replicas
    if ids.ndim == 2 and ids.shape[0] and ids.shape[0] % replicas == 0:
        return
    expected = f"[B, H] for jagged sequences, where {replicas} replicas divide B"
    remedy = "tpu_embed.pad_batch adds empty examples"
    raise ValueError(message(what, expected=expected, got=f"{ids.shape}", remedy=remedy))


def pad(found: Array | Jagged, width: int, engine: EmbeddingEngine) -> Array:
    """Return the activations of dense ids `[B, H]` as an array, `[B, L, D]` of a `Jagged`."""
    return found.to_padded(_length(width, engine))[0] if isinstance(found, Jagged) else found


def as_jagged(found: Array, ids: Any, engine: EmbeddingEngine) -> Jagged:
    """Return the sequences that a lookup has found.

    Args:
      found: `[S, C, D]` of a placed batch, `[B, L, D]` of dense ids.
      ids: the batch, or signed integers `[B, H]`.
      engine: an engine whose only feature is jagged.
    """
    if isinstance(ids, Batch):
        return Jagged(found, row_splits(ids, ids.layout_in(engine.layout))[0])
    lengths = padded_lengths(ids, found.shape[1])
    return Jagged.from_padded(found, lengths, engine.layout.axes.replicas)


def place_gradient(
    padded: Array, features: dict[str, Array], weights: Any, engine: EmbeddingEngine
) -> tuple[Any, Any, Jagged]:
    """Return the operands of an update by padded gradients: batch, weights and gradient.

    Args:
      padded: `[B, L, D]`.
      features: the dense ids `[B, H]`, by the feature's name.
      weights: one weight per id in the same structure, or None.
      engine: an engine whose only feature is jagged.
    """
    (ids,), capacity = features.values(), None
    lengths = padded_lengths(ids, padded.shape[1])
    batch: Any = features
    if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((features, weights))):
        # Outside of a jit the engine counts the ids, and so chooses the capacity.
        batch, weights = engine.place(features, weights), None
        capacity = batch.spec.feature_shapes[0].capacity
    replicas = engine.layout.axes.replicas
    return batch, weights, Jagged.from_padded(padded, lengths, replicas, capacity)


def fill_columns(gradients: list[Array], width: int, engine: EmbeddingEngine) -> list[Array]:
    """Return gradients `[B, L, D]` of sequences of several widths at the L of the widest ids."""
    longest = _length(width, engine)
    return [jnp.pad(g, ((0, 0), (0, longest - g.shape[1]), (0, 0))) for g in gradients]


def _length(width: int, engine: EmbeddingEngine) -> int:
    """Return L, how many of H ids of a row are looked up."""
    return min(engine.layout.features[0].config.max_sequence_length or width, width)

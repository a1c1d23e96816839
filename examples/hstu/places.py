"""The places of the events of one replica, and of the candidates among them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from tpu_embed import Jagged
from tpu_embed.data import place_values


def find_candidates(
    joined: Jagged, candidates: Jagged, before: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return which values are candidates, bool `[N]`, and where each of them is, int32 `[M]`.

    Args:
      joined: the sequences of R requests, N values; the candidates of each are its last ones.
      candidates: the same candidates by themselves, M values.
      before: int32 [R], how many values of each sequence come before its candidates.
    """
    # A request that begins at place 4, with 2 values before its candidates: its candidate 1 is at
    # place 4 + 2 + 1.
    flags = (joined.positions >= joined.spread(before)) & joined.valid
    return flags, candidates.spread(joined.row_splits[:-1] + before) + candidates.positions


def in_places(engine, batch, feature: str, rows: Sequence[np.ndarray]) -> jax.Array:
    """Send one number per event to the place of the event's row, int32 `[S, C]`.

    Args:
      engine: which has placed the batch.
      batch: the placed batch.
      feature: a jagged feature.
      rows: the numbers of each example; examples that `pad_batch` has added may be missing.
    """
    paths = [one.path for one in engine.layout.features]
    examples = batch.spec.sizes[paths.index(feature)]
    padded = [*rows, *[np.zeros(0, np.int32)] * (examples - len(rows))]
    splits = np.cumsum([0, *map(len, padded)])
    values = np.concatenate(padded).astype(np.int32)
    return place_values(engine, batch, feature, values, splits).values

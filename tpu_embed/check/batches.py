"""Draw batches: the ids of a feature as the package takes them, and the bags that they mean.

Both are made from one array of ids and one of weights, so that every form of input is known to mean
these bags.

Input: a generator, a feature and the form of its ids. Output: a `FeatureInput`.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from tpu_embed.check.oracle import Bags
from tpu_embed.config import FeatureConfig
from tpu_embed.core.ids import RaggedIds, SparseIds

Form = Literal["one", "dense", "nested", "sparse", "ragged"]
"""`[B]`, `[B, H]`, `[B, K, H]`, `SparseIds`, `RaggedIds`."""

_HOT, _INNER = 4, 2
"""H and K."""


class FeatureInput(NamedTuple):
    """What one feature gets in one batch.

    Attributes:
      ids: as `place` takes them.
      weights: likewise; None where all are one.
      bags: what these ids mean.
    """

    ids: Any
    weights: Any
    bags: Bags


def draw(
    rng: np.random.Generator, feature: FeatureConfig, form: Form, batch: int, *, weighted: bool
) -> FeatureInput:
    """Draw the ids of one feature.

    Args:
      rng: where the ids come from.
      feature: the feature; a sequence if it has a `max_sequence_length`.
      form: the form of the ids.
      batch: B.
      weighted: whether the ids have weights.
    """
    shape = {"one": (batch,), "nested": (batch, _INNER, _HOT)}.get(form, (batch, _HOT))
    ids = rng.integers(0, feature.table.vocabulary_size, shape).astype(np.int32)
    ids[rng.random(shape) < 0.3] = -1
    weights = np.ones(shape, np.float32)
    if weighted:
        weights = rng.uniform(0.5, 2, shape).astype(np.float32)
    return FeatureInput(
        *_given(form, ids, weights, weighted), _meaning(feature, form, ids, weights)
    )


def _given(form: Form, ids: np.ndarray, weights: np.ndarray, weighted: bool) -> tuple[Any, Any]:
    """Return ids and weights in a form; -1 is padding, which sparse and ragged ids leave out."""
    if form in ("one", "dense", "nested"):
        return ids, weights if weighted else None
    present = ids >= 0
    values, own = ids[present], weights[present] if weighted else None
    if form == "sparse":
        return SparseIds(np.argwhere(present), values, ids.shape, own), None
    splits = np.concatenate([[0], np.cumsum(present.sum(1))])
    return RaggedIds(values, splits, own), None


def _meaning(feature: FeatureConfig, form: Form, ids: np.ndarray, weights: np.ndarray) -> Bags:
    """Return the bags of ids `[B, …, H]`, where -1 is padding."""
    if form == "one":
        bags = [[(i, 1.0)] * (i >= 0) for i in ids.tolist()]
        return Bags(bags, None, ids.shape)
    hot = ids.shape[-1]
    rows = [
        list(zip(i.tolist(), w.tolist(), strict=True))
        for i, w in zip(ids.reshape(-1, hot), weights.reshape(-1, hot), strict=True)
    ]
    present = [[(i, w) for i, w in row if i >= 0] for row in rows]
    length = feature.max_sequence_length
    if not length:
        return Bags(present, feature.table.combiner, ids.shape[:-1])
    # A sequence: every position is a bag of at most one id. A ragged row has no gaps.
    found = present if form == "ragged" else rows
    padded = [(row + [(-1, 1.0)] * length)[:length] for row in found]
    bags = [[(i, w)] * (i >= 0) for row in padded for i, w in row]
    return Bags(bags, None, (len(ids), length))

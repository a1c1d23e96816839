"""What a layer is given, as its engine takes it.

Input: the ids of one layer, with names or without. Output: features and weights of an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.sparse import FEATURE, engine_of_inputs


def inputs_of(own: EmbeddingEngine, ids: Any, weights: Any) -> tuple[EmbeddingEngine, Any, Any]:
    """Return the engine for the inputs of a layer, and its features and weights.

    Args:
      own: the engine of the layer, for one input without a name.
      ids: as for `EmbeddingBag.place`.
      weights: likewise.
    """
    if isinstance(ids, Mapping):
        given = None if weights is None else {n: weights.get(n) for n in ids}
        return engine_of_inputs(own, ids), dict(ids), given
    return own, {FEATURE: ids}, None if weights is None else {FEATURE: weights}

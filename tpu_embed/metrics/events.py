"""What a state has counted since it was made: steps, and events such as ids that were not allowed.

Input: an engine and its state. Output: the counters by name, and by feature where each has its own.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.state import TableState, check_state


def counters(engine: EmbeddingEngine, state: TableState) -> dict[str, Any]:
    """Return the step, and the counters of training so far.

    Args:
      engine: the engine that made the state.
      state: the state.

    Returns:
      `step`, the number of updates applied; `overflows`, always 0 (until 0.2.0 a spec given inside
      a jit could have too little room); `bad_ids` by feature path, the ids in traced batches
      that no policy allows; and, unless `on_bad_gradient` is "allow", `bad_gradients` by feature
      path, the number of skipped steps in which the gradient of the feature was not finite. With
      living vocabularies also `refused_batches`, the steps skipped inside a jit because the batch
      was not in order, and `vocabularies` by table: `keys` that have a row, `occupancy`, their
      share of the rows, and totals of keys "admitted", "evicted", "expired", "unseen" and
      "forgotten", of all batches that were admitted, whatever was placed ahead. With tables on the
      host also `storage` by table: what `engine.storage.counters` has.

    Raises:
      ValueError: the state is not this engine's.
    """
    check_state(state, engine.layout)
    paths = [feature.path for feature in engine.layout.features]
    counted: dict[str, Any] = {"step": int(state.step)}
    for name, count in sorted(jax.device_get(state.counters).items()):
        by_feature = np.ndim(count) > 0
        counted[name] = dict(zip(paths, count.tolist(), strict=True)) if by_feature else int(count)
    if engine.vocabularies is not None:
        capacity = engine.vocabularies.capacity
        counted["vocabularies"] = {
            name: {"occupancy": one["keys"] / capacity(name), **one}
            for name, one in engine.vocabularies.admitted_counters.items()
        }
    if engine.storage is not None:
        counted["storage"] = engine.storage.counters
    return counted

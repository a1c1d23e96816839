"""How large the numbers in tables and slots are: norms, means, and rows with NaN or infinity.

Input: an engine and its state. Output: one dict of numbers per table.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.state import Field, TableState, check_state, fields, norms


def table_statistics(engine: EmbeddingEngine, state: TableState) -> dict[str, dict[str, Any]]:
    """Measure every table, and every slot with one entry per row, in one pass over them.

    Each device reads its own rows, a few thousand at a time, in float32 (float64 for a float64
    table). All processes must call this, and all get the same numbers.

    Args:
      engine: the engine that made the state.
      state: the state, which is not changed.

    Returns:
      One dict per table: `norm`, the Euclidean norm of the table; `max_row_norm`, the largest norm
      of a row; `mean`, the mean of its elements; `non_finite_rows`, the number of rows with NaN or
      infinity, which the other figures leave out; `slots`, the same figures by slot.

    Raises:
      ValueError: the state is not this engine's.

    Example:
      >>> import jax, tpu_embed
      >>> ones = jax.nn.initializers.ones
      >>> table = tpu_embed.TableConfig(8, 2, initializer=ones, name="films")
      >>> engine = EmbeddingEngine([tpu_embed.FeatureConfig(table)])
      >>> state = engine.init(jax.random.key(0))
      >>> table_statistics(engine, state)["films"]["norm"]
      4.0
    """
    engine.layout.check_on_devices("table_statistics")
    check_state(state, engine.layout)
    sums = jax.device_get(norms.of_state(state, engine.layout))
    found: dict[str, dict[str, Any]] = {name: {} for name in engine.table_configs}
    for f in fields(engine.layout):
        if not f.shape.per_row:
            continue
        numbers = _numbers(sums[f.stack.name][f.slot or norms.TABLE], f)
        if f.slot is None:
            found[f.table.name] = {**numbers, "slots": {}}
        else:
            found[f.table.name]["slots"][f.slot] = numbers
    return found


def _numbers(sums: norms.RowNorms, f: Field) -> dict[str, Any]:
    t = f.stack.tables.index(f.table)
    return {
        "norm": math.sqrt(sums.squares[t]),
        "max_row_norm": math.sqrt(sums.largest[t]),
        "mean": float(sums.sums[t]) / max(1, int(sums.finite[t]) * math.prod(f.shape.shape)),
        "non_finite_rows": int(sums.non_finite[t]),
    }

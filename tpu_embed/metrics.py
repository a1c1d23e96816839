"""Statistics to watch during training: of the ids in a batch, of the tables, and event counters.

They are computed on request, outside of a jit; training itself does not pay for them.

Input: an engine, with a batch of ids or a state. Output: nested dicts of plain Python numbers,
which `write_scalars` writes for TensorBoard.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from tpu_embed import _checks
from tpu_embed._types import PyTree
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.ids import RaggedIds, SparseIds
from tpu_embed.core.state import Field, TableState, check_state, fields, norms

__all__ = ["batch_statistics", "counters", "table_statistics", "write_scalars"]


class ScalarWriter(Protocol):
    """An object that writes scalars, such as the `SummaryWriter` of tensorboardX or torch."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> Any:
        """Write one number."""


def batch_statistics(
    engine: EmbeddingEngine, features: PyTree, *, hottest: int = 10
) -> dict[str, dict[str, Any]]:
    """Count the ids of a batch on the host, table by table.

    Args:
      engine: the engine of the tables.
      features: as for `place`. When there are several processes, this is one process's part of the
        batch, and the numbers are about this part.
      hottest: how many of the most frequent ids to list.

    Returns:
      One dict per table: `ids`, the number of ids that are looked up; `unique`, the number of rows
      that they touch; `unique_ratio`, unique / ids (0 without ids); `bad`, the number of ids that
      are outside of the table and that `on_bad_id` dropped or clipped; `hottest`, pairs (id,
      count), the most frequent first and the smaller id first among equals; `hottest_share`, the
      fraction of all ids that are the most frequent one.

    Raises:
      ValueError: whatever `place` refuses; `hottest` is not an integer of at least 1.
      TypeError: whatever `place` refuses.

    Example:
      >>> import numpy as np, tpu_embed
      >>> films = tpu_embed.TableConfig(8, 2, name="films")
      >>> engine = EmbeddingEngine({"film": tpu_embed.FeatureConfig(films)})
      >>> batch_statistics(engine, {"film": np.array([5, 3, 5, -1])})["films"]["hottest"]
      [(5, 2), (3, 1)]
    """
    top = _checks.check_int("hottest", hottest, minimum=1)
    ids: dict[str, list[np.ndarray]] = {name: [] for name in engine.table_configs}
    bad = dict.fromkeys(ids, 0)
    hosts = engine.host_ids(features)
    given = engine._structure.match(features, what="features")
    for feature, leaf, host in zip(engine.layout.features, given, hosts, strict=True):
        ids[feature.table.name].append(host.ids[host.ids >= 0])
        bad[feature.table.name] += _bad(leaf, feature.table.vocabulary_size)
    return {name: _counts(np.concatenate(ids[name]), bad[name], top) for name in ids}


def _bad(leaf: Any, vocabulary_size: int) -> int:
    """Return how many ids are outside [0, V); in dense arrays -1 is padding and not counted."""
    if isinstance(leaf, (SparseIds, RaggedIds)):
        return int(np.count_nonzero((leaf.values < 0) | (leaf.values >= vocabulary_size)))
    ids = np.asarray(leaf)
    return int(np.count_nonzero((ids < 0) & (ids != -1) | (ids >= vocabulary_size)))


def _counts(ids: np.ndarray, bad: int, top: int) -> dict[str, Any]:
    rows, counts = np.unique(ids, return_counts=True)
    # `rows` ascends and the sort is stable: among equal counts, smaller ids come first.
    first = np.argsort(-counts, kind="stable")[:top]
    total = max(1, ids.size)
    return {
        "ids": int(ids.size),
        "unique": int(rows.size),
        "unique_ratio": rows.size / total,
        "bad": bad,
        "hottest": list(zip(rows[first].tolist(), counts[first].tolist(), strict=True)),
        "hottest_share": int(counts.max(initial=0)) / total,
    }


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


def counters(engine: EmbeddingEngine, state: TableState) -> dict[str, Any]:
    """Return the step, and the counters of training so far.

    Args:
      engine: the engine that made the state.
      state: the state.

    Returns:
      `step`, the number of updates applied; `overflows`, how many exchanges took the worst-case
      branch; `bad_ids` by feature path, the ids in traced batches that no policy allows; and,
      unless `on_bad_gradient` is "allow", `bad_gradients` by feature path, the number of skipped
      steps in which the gradient of the feature was not finite.

    Raises:
      ValueError: the state is not this engine's.
    """
    check_state(state, engine.layout)
    paths = [feature.path for feature in engine.layout.features]
    counted: dict[str, Any] = {"step": int(state.step)}
    for name, count in sorted(jax.device_get(state.counters).items()):
        by_feature = np.ndim(count) > 0
        counted[name] = dict(zip(paths, count.tolist(), strict=True)) if by_feature else int(count)
    return counted


def write_scalars(writer: ScalarWriter, step: int, statistics: Mapping[str, Any]) -> None:
    """Write every number in nested statistics, tagged by its path such as `tables/films/norm`.

    Other values, such as lists of ids, are skipped. When there are several processes, only one
    should write.

    Args:
      writer: any object with `add_scalar(tag, value, step)`.
      step: the step that the statistics belong to.
      statistics: nested mappings of numbers.

    Example:
      >>> class Printer:
      ...     def add_scalar(self, tag, value, step):
      ...         print(step, tag, value)
      >>> write_scalars(Printer(), 3, {"tables": {"films": {"norm": 4.0}}})
      3 tables/films/norm 4.0
    """
    for tag, value in _scalars(statistics, ""):
        writer.add_scalar(tag, value, step)


def _scalars(nested: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in nested.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif _checks.is_number(value):
            yield f"{prefix}{name}", value

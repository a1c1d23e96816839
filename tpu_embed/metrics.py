"""Numbers to watch while training: of a batch, of the tables, of what was counted.

Enters: an engine, with a batch of ids or a state. Leaves: nested dicts of plain Python numbers,
which `write_scalars` writes for TensorBoard. Called by users, outside a jit; what is not asked for
costs nothing.
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
    """What writes scalars: the `SummaryWriter` of tensorboardX or torch, or anything like it."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> Any:
        """Write one number."""


def batch_statistics(
    engine: EmbeddingEngine, features: PyTree, *, hottest: int = 10
) -> dict[str, dict[str, Any]]:
    """Count the ids of a batch, table by table, on the host.

    Args:
      engine: whose tables they are of.
      features: what `place` takes; of many processes, this one's part, and the numbers are its.
      hottest: how many of the most frequent ids to list.

    Returns:
      By table: `ids`, those that are looked up; `unique`, the rows they touch; `unique_ratio`,
      unique / ids (0 without ids); `bad`, ids outside the table that `on_bad_id` dropped or
      clipped; `hottest`, pairs of an id and how often it occurs, the most frequent first, of equal
      ones the smallest; `hottest_share`, the part of the ids that is the first of them.

    Raises:
      ValueError: what `place` refuses; `hottest` is no integer of at least 1.
      TypeError: what `place` refuses.

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
    judged = engine.host_ids(features)
    given = engine._structure.match(features, what="features")
    for feature, leaf, host in zip(engine.layout.features, given, judged, strict=True):
        ids[feature.table.name].append(host.ids[host.ids >= 0])
        bad[feature.table.name] += _bad(leaf, feature.table.vocabulary_size)
    return {name: _counts(np.concatenate(ids[name]), bad[name], top) for name in ids}


def _bad(leaf: Any, vocabulary_size: int) -> int:
    """Return how many ids are outside [0, V); -1 pads dense arrays."""
    if isinstance(leaf, (SparseIds, RaggedIds)):
        return int(np.count_nonzero((leaf.values < 0) | (leaf.values >= vocabulary_size)))
    ids = np.asarray(leaf)
    return int(np.count_nonzero((ids < 0) & (ids != -1) | (ids >= vocabulary_size)))


def _counts(ids: np.ndarray, bad: int, top: int) -> dict[str, Any]:
    rows, counts = np.unique(ids, return_counts=True)
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
    """Measure every table and every slot that has a part a row, in one pass over them.

    Each device reads the rows it has, a few thousand at a time, in float32 (float64 for a float64
    table); every process gets the same numbers, and all of them must call it.

    Args:
      engine: the engine.
      state: its state; it stays as it is.

    Returns:
      By table: `norm`, the Euclidean norm of all its numbers; `max_row_norm`, that of its longest
      row; `mean` of its numbers; `non_finite_rows`, rows with NaN or infinity in them, which the
      others leave out; `slots`, the same by slot.

    Raises:
      ValueError: it is no state of this engine.

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
    """Return the step, and what training has counted so far.

    Args:
      engine: the engine.
      state: its state.

    Returns:
      `step`, updates applied; `overflows`, exchanges that took the worst-case branch; by feature
      path `bad_ids`, those met inside a jit that no policy allows, and, where `on_bad_gradient` is
      not "allow", `bad_gradients`, steps left out in which its gradient was not finite.

    Raises:
      ValueError: it is no state of this engine.
    """
    check_state(state, engine.layout)
    paths = [feature.path for feature in engine.layout.features]
    counted: dict[str, Any] = {"step": int(state.step)}
    for name, count in sorted(jax.device_get(state.counters).items()):
        by_feature = np.ndim(count) > 0
        counted[name] = dict(zip(paths, count.tolist(), strict=True)) if by_feature else int(count)
    return counted


def write_scalars(writer: ScalarWriter, step: int, statistics: Mapping[str, Any]) -> None:
    """Write every number of nested statistics, tagged by its names: `tables/films/norm`.

    What is no number, such as a list of ids, is left out. Of many processes, let one write.

    Args:
      writer: anything with `add_scalar(tag, value, step)`.
      step: the step they belong to.
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

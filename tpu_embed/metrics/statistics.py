"""What a run can be watched by: batches, tables, counters and dynamic vocabularies, and scalars.

`counters` tells what a state has counted since it was made, such as ids that were not allowed;
`table_statistics` how large the numbers in tables and slots are; `batch_statistics` which ids a
batch looks up, and how often: the hot rows, the duplicates and the bad ids; the other two how the
dynamic vocabularies fare. `write_scalars` plots any of them.

Tables are read without a copy: each device reads its own shard, one block of rows at a time. Sums
are taken within each block first and then over pairs of blocks, which keeps the rounding error of
millions of float32 additions small.

Input: an engine, and its state or the ids of a batch.
Output: nested dicts of numbers; calls of a writer, one for each number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tpu_embed._checks import check_int, is_number, refuse
from tpu_embed._types import PADDING_ID, Array, PyTree
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.exchange import collectives
from tpu_embed.core.ids import RaggedIds, SparseIds, looked_up, read_ids
from tpu_embed.core.layout import Layout, MeshAxes, Stack
from tpu_embed.core.state import (
    Field,
    TableState,
    check_state,
    fields,
    read_rows,
    rows_of_tables,
    rule_slots,
    slot_format,
)
from tpu_embed.kernels.formats import PACKED_ROWS, RowFormat
from tpu_embed.vocabulary import Vocabularies, describe_keys

TABLE = ""
"""The key of the table itself; the other keys are names of slots."""

BLOCK_ROWS = 32 * PACKED_ROWS
"""Rows that a device reads at a time."""


class RowNorms(NamedTuple):
    """Statistics of the T tables of a stack, or of one of their slots: arrays `[T]`.

    Attributes:
      sums: sum of all numbers in finite rows.
      squares: sum of their squares.
      largest: the largest sum of squares of one finite row.
      finite: how many rows contain no NaN or infinity.
      non_finite: how many rows do.
    """

    sums: Array
    squares: Array
    largest: Array
    finite: Array
    non_finite: Array


@partial(jax.jit, static_argnames="layout")
def of_state(state: TableState, layout: Layout) -> dict[str, dict[str, RowNorms]]:
    """Return the statistics by stack, then by `TABLE` or the name of a slot.

    Slots that a whole stack shares have no rows and are left out.

    Args:
      state: the state.
      layout: the engine's layout.
    """
    found = {}
    for stack in layout.stacks:
        fields = {TABLE: (state.tables[stack.name], stack.row_format)}
        for name, slot in rule_slots(stack).items():
            if slot.per_row:
                fields[name] = (state.slots[stack.name][name], slot_format(stack, slot))
        found[stack.name] = {
            name: _of_field(*field, stack, layout.axes)
            for name, field in fields.items()
        }
    return found


def _of_field(
    physical: Array, row_format: RowFormat, stack: Stack, axes: MeshAxes
) -> RowNorms:
    """Return the statistics of one physical array."""
    size = min(BLOCK_ROWS, stack.num_rows)
    numbers = np.arange(-(-stack.num_rows // size), dtype=stack.index_dtype)

    def shard(physical):
        # parts: arrays [blocks, T]. `lax.map` runs the blocks one after the other.
        parts = jax.lax.map(
            lambda number: _of_block(physical, number * size, size, row_format, stack),
            numbers,
        )
        mine = RowNorms(
            _in_pairs(parts.sums),
            _in_pairs(parts.squares),
            parts.largest.max(axis=0),
            parts.finite.sum(axis=0, dtype=stack.index_dtype),
            parts.non_finite.sum(axis=0, dtype=stack.index_dtype),
        )
        if not stack.shard_axes:
            return mine
        # Everything adds up over the shards but the largest row, which is a maximum.
        whole = jax.tree.map(
            lambda part: collectives.psum(part, stack.shard_axes), mine
        )
        return whole._replace(largest=jax.lax.pmax(mine.largest, stack.shard_axes))

    spec = axes.spec(stack.shard_axes)
    return collectives.per_device(shard, axes, spec, PartitionSpec())(physical)


def _of_block(
    physical: Array, first: Array, size: int, row_format: RowFormat, stack: Stack
) -> RowNorms:
    """Return the statistics of `size` local rows from `first` on, without those past the end."""
    # The last block starts earlier so that it fits. Of 10 rows in blocks of 4, it reads 6-9 and
    # `fresh` leaves out rows 6 and 7, which the block before has counted.
    start = jnp.minimum(first, stack.num_rows - size)
    local = start + jnp.arange(size, dtype=first.dtype)
    table, _, present = rows_of_tables(stack, stack.tables, local)
    values = read_rows(physical, start, size, row_format).reshape(size, -1)
    finite = jnp.isfinite(values).all(axis=1)
    fresh = present & (local >= first)
    counted = fresh & finite
    # Selected, not multiplied with a mask: 0 * NaN would be NaN.
    kept = jnp.where(counted[:, None], values, 0)
    squares = (kept * kept).sum(axis=1)
    counts = counted.astype(kept.dtype), (fresh & ~finite).astype(kept.dtype)
    # One segment sum for four statistics: columns [rows, 4] become [T, 4], then four arrays [T].
    # Rows of one table are adjacent, so their table numbers ascend.
    of_rows = jnp.stack([kept.sum(axis=1), squares, *counts], axis=1)
    by_table = {"num_segments": len(stack.tables), "indices_are_sorted": True}
    sums, total, whole, broken = jax.ops.segment_sum(of_rows, table, **by_table).T
    largest = jnp.maximum(jax.ops.segment_max(squares, table, **by_table), 0)
    return RowNorms(
        sums, total, largest, whole.astype(jnp.int32), broken.astype(jnp.int32)
    )


def _in_pairs(parts: Array) -> Array:
    """Sum `[n, T]` over the first axis by adding neighbours until one is left, `[T]`."""
    # [a, b, c] is padded to [a, b, c, 0], becomes [a + b, c], then [a + b + c].
    while parts.shape[0] > 1:
        parts = jnp.pad(parts, ((0, parts.shape[0] % 2), (0, 0)))
        parts = parts[0::2] + parts[1::2]
    return parts[0]


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
      dynamic vocabularies also `refused_batches`, the steps skipped inside a jit because the batch
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
        counted[name] = (
            dict(zip(paths, count.tolist(), strict=True)) if by_feature else int(count)
        )
    if engine.vocabularies is not None:
        counted["vocabularies"] = _totals(engine.vocabularies)
    if engine.storage is not None:
        counted["storage"] = engine.storage.counters
    return counted


def table_statistics(
    engine: EmbeddingEngine, state: TableState
) -> dict[str, dict[str, Any]]:
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
    sums = jax.device_get(of_state(state, engine.layout))
    found: dict[str, dict[str, Any]] = {name: {} for name in engine.table_configs}
    for f in fields(engine.layout):
        if not f.shape.per_row:
            continue
        numbers = _numbers(sums[f.stack.name][f.slot or TABLE], f)
        if f.slot is None:
            found[f.table.name] = {**numbers, "slots": {}}
        else:
            found[f.table.name]["slots"][f.slot] = numbers
    return found


def _numbers(sums: RowNorms, f: Field) -> dict[str, Any]:
    t = f.stack.tables.index(f.table)
    return {
        "norm": math.sqrt(sums.squares[t]),
        "max_row_norm": math.sqrt(sums.largest[t]),
        "mean": float(sums.sums[t])
        / max(1, int(sums.finite[t]) * math.prod(f.shape.shape)),
        "non_finite_rows": int(sums.non_finite[t]),
    }


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
      fraction of all ids that are the most frequent one. Keys of dynamic vocabularies count as ids.
      A table on the host has also `hits`, how many of the rows the devices hold after the batches
      placed so far, and `misses`, how many they do not: if this batch is placed next, these rows
      will be brought.

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
    top = check_int("hottest", hottest, minimum=1)
    ids: dict[str, list[np.ndarray]] = {name: [] for name in engine.table_configs}
    bad = dict.fromkeys(ids, 0)
    hosts = engine.host_ids(features)
    given = engine.structure.match(features, what="features", columns=True)
    for feature, leaf, host in zip(engine.layout.features, given, hosts, strict=True):
        config, name = feature.config.table, feature.table.name
        given_ids = host.ids if host.keys is None else host.keys
        ids[name].append(
            given_ids[looked_up(host)]
            if host.keys is not None
            else host.ids[host.ids >= 0]
        )
        if config.vocabulary is None:  # no key of a dynamic vocabulary is bad
            bad[name] += _bad(leaf, config.vocabulary_size)
    joined = {name: np.concatenate(some) for name, some in ids.items()}
    return {
        name: _counts(some, bad[name], top) | _hits(engine, name, some)
        for name, some in joined.items()
    }


def _hits(engine: EmbeddingEngine, name: str, ids: np.ndarray) -> dict[str, int]:
    """Return how many rows of a table on the host are on the devices; nothing of another table."""
    if engine.storage is None or name not in engine.storage.tables:
        return {}
    assert engine.vocabularies is not None, "they give rows their places"
    keys = {0: (name, np.unique(ids).astype(np.uint64))}
    rows = engine.vocabularies.find_all(keys)[1][0].rows
    return {"hits": int((rows >= 0).sum()), "misses": int((rows < 0).sum())}


def _bad(leaf: Any, vocabulary_size: int) -> int:
    """Return how many ids are outside [0, V); in dense arrays -1 is padding and not counted."""
    column = read_ids("", leaf)
    flat = isinstance(column, (SparseIds, RaggedIds))
    # What is masked is missing, so it is not bad.
    ids = np.ma.compressed(column.values if flat else column)
    padding = 0 if flat else int(np.count_nonzero(ids == PADDING_ID))
    return int(np.count_nonzero((ids < 0) | (ids >= vocabulary_size))) - padding


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


def vocabulary_scalars(engine: EmbeddingEngine) -> dict[str, float]:
    """Return numbers to plot of every dynamic vocabulary, by tag; it costs no pass over the keys.

    Args:
      engine: the engine.

    Returns:
      Under `vocabularies/<table>/`: `keys` and `occupancy`, as `counters` has them; totals of keys
      `admitted`, `evicted`, `expired`, `unseen` and `forgotten` in the batches that were admitted;
      and under `vocabularies/<table>/last/` how many were `admitted`, `evicted`, `expired` and
      `unseen` in the last of them. Of a table on the host with row numbers, the keys are the ids
      that the devices hold.

    Raises:
      ValueError: the engine has no dynamic vocabulary, and no table on the host.

    Example:
      >>> import jax, tpu_embed
      >>> words = tpu_embed.DynamicVocabulary()
      >>> table = tpu_embed.TableConfig(8, 2, name="word", vocabulary=words)
      >>> engine = EmbeddingEngine(tpu_embed.FeatureConfig(table))
      >>> state = engine.init(jax.random.key(0))
      >>> state = engine.set_rows(state, "word", keys=["red"], values=[[1, 2]])
      >>> vocabulary_scalars(engine)["vocabularies/word/occupancy"]
      0.125
    """
    maps, found = _maps(engine), {}
    last = maps.last
    for name, numbers in _totals(maps).items():
        if name in last:
            numbers |= {f"last/{what}": n for what, n in last[name].counts().items()}
        found |= {
            f"vocabularies/{name}/{what}": number for what, number in numbers.items()
        }
    return found


def vocabulary_statistics(
    engine: EmbeddingEngine, *, hottest: int = 10
) -> dict[str, dict[str, Any]]:
    """Return how full each dynamic vocabulary is, how old its keys are, and which ones are busy.

    It takes time in proportion to the tables' capacities. `python -m tpu_embed vocabulary` prints
    the same figures of a checkpoint.

    Args:
      engine: the engine.
      hottest: how many keys to list in each order.

    Returns:
      One dict per table, as of the batches that were admitted: `step`; `capacity`, `keys` and
      `occupancy`; `waiting`, the keys that are counted and have no row; `ages`, by share of the
      keys, how many steps ago that many of them had been seen; `totals` and `per_step` of keys
      "admitted", "evicted", "expired", "unseen" and "forgotten"; `most_batches` and `seen_last`,
      the keys that the most batches had and that were seen last, as dicts of `key`, `row`,
      `batches_seen` and `last_seen`; and `waiting_most`, dicts of `key` and `count`.

    Raises:
      ValueError: the engine has no dynamic vocabulary, and no table on the host; `hottest` is not
        an integer of at least 0.
    """
    most, maps, found = check_int("hottest", hottest, minimum=0), _maps(engine), {}
    for name, counted in maps.admitted_counters.items():
        totals = {what: count for what, count in counted.items() if what != "keys"}
        found[name] = describe_keys(
            maps.scores(name), maps.capacity(name), totals, most
        )
    return found


def _totals(maps: Vocabularies) -> dict[str, dict[str, float]]:
    return {
        name: {"occupancy": one["keys"] / maps.capacity(name), **one}
        for name, one in maps.admitted_counters.items()
    }


def _maps(engine: EmbeddingEngine) -> Vocabularies:
    if engine.vocabularies is None:
        refuse(
            "engine",
            expected="a table with vocabulary=DynamicVocabulary(…)",
            got="none",
        )
    return engine.vocabularies


class ScalarWriter(Protocol):
    """An object that writes scalars, such as the `SummaryWriter` of tensorboardX or torch."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> Any:
        """Write one number."""


def write_scalars(
    writer: ScalarWriter, step: int, statistics: Mapping[str, Any]
) -> None:
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
        elif is_number(value):
            yield f"{prefix}{name}", value

"""Which ids a batch looks up, and how often: the hot rows, the duplicates and the bad ids.

Input: an engine and the ids of a batch. Output: one dict of numbers per table.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tpu_embed import _checks
from tpu_embed._types import PADDING_ID, PyTree
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.ids import RaggedIds, SparseIds, looked_up, read_ids


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
      fraction of all ids that are the most frequent one. Keys of living vocabularies count as ids.
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
    top = _checks.check_int("hottest", hottest, minimum=1)
    ids: dict[str, list[np.ndarray]] = {name: [] for name in engine.table_configs}
    bad = dict.fromkeys(ids, 0)
    hosts = engine.host_ids(features)
    given = engine.structure.match(features, what="features", columns=True)
    for feature, leaf, host in zip(engine.layout.features, given, hosts, strict=True):
        config, name = feature.config.table, feature.table.name
        given_ids = host.ids if host.keys is None else host.keys
        ids[name].append(
            given_ids[looked_up(host)] if host.keys is not None else host.ids[host.ids >= 0]
        )
        if config.vocabulary is None:  # no key of a living vocabulary is bad
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

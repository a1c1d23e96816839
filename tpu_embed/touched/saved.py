"""What a record of touched rows keeps in a checkpoint: by key or id, whatever rows these have.

Input: arrays by key. Output: the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tpu_embed.touched.versions import Version


class SavedMarks(NamedTuple):
    """What is known of one table.

    Attributes:
      keys: uint64 `[n]`: of a living vocabulary, all keys that have rows; otherwise the row ids, or
        ids, that were touched.
      touched: int32 `[n]`, the last update of each; -1: none.
      given: int32 `[n]`, the step of the maps at which each got its row; -1: before recording.
      lost: uint64 `[m]`, keys that lost their rows.
      lost_at: int32 `[m]`, the step of the maps at which each lost it.
      lost_since: the first step of the maps after which all lost keys are known.
      shared: the last update of the row that unseen keys share; -1: none.
    """

    keys: np.ndarray
    touched: np.ndarray
    given: np.ndarray
    lost: np.ndarray
    lost_at: np.ndarray
    lost_since: int = 0
    shared: int = -1


class SavedRecord(NamedTuple):
    """What a record of touched rows keeps.

    Attributes:
      version: the moment of the state beside which this is kept.
      start: the first moment since which changes are known.
      ancestors: see `Lineage`.
      known: by `state.step` of earlier versions, their `keys`.
      tables: by table.
    """

    version: Version
    start: Version
    ancestors: tuple[Version, ...]
    known: Mapping[int, int]
    tables: Mapping[str, SavedMarks]


def merge_records(records: Sequence[SavedRecord]) -> SavedRecord:
    """Return what several processes have recorded of one run, with the latest step of each row."""
    first = records[0]
    tables = {name: _merge([one.tables[name] for one in records]) for name in first.tables}
    return first._replace(tables=tables)


def _merge(marks: Sequence[SavedMarks]) -> SavedMarks:
    # All processes have the same maps, so of keys they differ only in what they touched.
    keys, touched, given = (
        np.concatenate([getattr(one, part) for one in marks])
        for part in ("keys", "touched", "given")
    )
    distinct, at = np.unique(keys, return_inverse=True)
    latest = [np.full(distinct.size, -1, np.int32) for _ in (touched, given)]
    for found, steps in zip(latest, (touched, given), strict=True):
        np.maximum.at(found, at, steps)
    shared = max(one.shared for one in marks)
    return marks[0]._replace(keys=distinct, touched=latest[0], given=latest[1], shared=shared)

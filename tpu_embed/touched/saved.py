"""Moments of training runs, which runs go on from which, and what is kept of a run.

A run that is restored from a checkpoint goes on from the moment of the checkpoint. What the first
run did after that moment is not part of the second one, even if both have steps of these numbers:

    run a    step 0 ─── 900 ─── 1000        a model of step 1000 was exported, then the run ended
    run b               900 ───────── 1100  restored from the checkpoint of step 900

So a delta of run b fits a model of run a up to step 900, and no later one.

A checkpoint keeps what is known since when: by key or id, whatever rows these have.

Input: moments, arrays by key. Output: the order of moments, or that they have none; the arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Version(NamedTuple):
    """A moment of a training run.

    Attributes:
      run: the unique name of the run, from the making of its `TouchedRows`, or from its restoring;
        all processes of the run have the same one.
      step: `state.step`, the number of updates applied.
      edits: how often `record_rows` was called; it orders what was published at the same step.
      keys: the number of training batches that dynamic vocabularies, or tables on the host, have
        admitted; 0 without any.
    """

    run: str
    step: int
    edits: int = 0
    keys: int = 0

    def is_up_to(self, later: Version) -> bool:
        """Return whether this moment is not after another one of the same run."""
        # Each number only grows, so the earlier moment has no greater one.
        pairs = zip(self[1:], later[1:], strict=True)
        return self.run == later.run and all(mine <= other for mine, other in pairs)


class Lineage(NamedTuple):
    """A run, and the moments of earlier runs that it goes on from.

    Attributes:
      run: the name of the run.
      ancestors: by earlier run, its last moment that is part of this run's history.
    """

    run: str
    ancestors: tuple[Version, ...] = ()

    def has(self, version: Version) -> bool:
        """Return whether a moment is one of this run, or of what it goes on from."""
        return version.run == self.run or any(version.is_up_to(one) for one in self.ancestors)


class SavedMarks(NamedTuple):
    """What is known of one table.

    Attributes:
      keys: uint64 `[n]`: of a dynamic vocabulary, all keys that have rows; otherwise the row ids,
        or ids, that were touched.
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
    keys, at = np.unique(np.concatenate([one.keys for one in marks]), return_inverse=True)
    latest = {}
    for part in ("touched", "given"):
        latest[part] = np.full(keys.size, -1, np.int32)
        np.maximum.at(latest[part], at, np.concatenate([getattr(one, part) for one in marks]))
    return marks[0]._replace(keys=keys, **latest, shared=max(one.shared for one in marks))

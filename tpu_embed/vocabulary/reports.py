"""What people ask about the keys of a table: how busy they are, and which came and went.

Input: states of maps, and what maps did with a batch. Output: tuples of NumPy arrays, and the
figures of a table in dictionaries, which JSON can hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tpu_embed.vocabulary.table_maps import Moves


class KeyScores(NamedTuple):
    """What decides which keys of a table stay, and which are admitted next.

    Attributes:
      keys: uint64 `[n]`, the keys that have a row, by ascending row.
      rows: int64 `[n]`, their rows.
      last_seen: int64 `[n]`, the last step whose batch had the key.
      batches_seen: int64 `[n]`, how many training batches had the key since its admission, that
        one included.
      waiting_keys: uint64 `[w]`, the keys that are counted and have no row yet, the one first
        counted longest ago first.
      waiting_counts: int64 `[w]`, how many training batches had each of them.
      step: the step of all this: the training batches that were admitted.
    """

    keys: np.ndarray
    rows: np.ndarray
    last_seen: np.ndarray
    batches_seen: np.ndarray
    waiting_keys: np.ndarray
    waiting_counts: np.ndarray
    step: int

    @property
    def ages(self) -> np.ndarray:
        """How many steps ago a batch had each key, int64 `[n]`; 0: the last batch had it."""
        return self.step - self.last_seen


class KeyChanges(NamedTuple):
    """Which keys of a table came and went in one step.

    Attributes:
      step: the step.
      admitted: uint64 `[a]`, the keys that got a row, in order.
      evicted: uint64 `[e]`, the keys that lost their row to one of these.
      expired: uint64 `[x]`, the keys whose `ttl` had passed.
      unseen: how many distinct keys of the batch have no row.
    """

    step: int
    admitted: np.ndarray
    evicted: np.ndarray
    expired: np.ndarray
    unseen: int

    def counts(self) -> dict[str, int]:
        """Return how many there are of each kind, by its name."""
        kinds = ("admitted", "evicted", "expired")
        return {kind: getattr(self, kind).size for kind in kinds} | {"unseen": self.unseen}


def changes_of(
    moves: Moves, before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, KeyChanges]:
    """Return which keys came and went in a step, by table.

    Args:
      moves: what the maps did.
      before: the totals of each table before it, as `Vocabularies.counters` has them.
      after: those after it.
    """
    found = {}
    for name in moves.taken:
        taken = moves.of_keys(name)
        # The keys that lost their rows: first those whose ttl had passed, then the evicted ones.
        expired = after[name]["expired"] - before[name]["expired"]
        lost = taken.evicted_keys
        found[name] = KeyChanges(
            taken.step, taken.new_keys, lost[expired:], lost[:expired], taken.unseen
        )
    return found


QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
"""Shares of the keys whose ages are told: 0.9 -> 40 says that 90 % are at most 40 steps old."""


def describe_keys(
    scores: KeyScores, capacity: int, totals: Mapping[str, int], hottest: int
) -> dict[str, Any]:
    """Return the figures of one table.

    Args:
      scores: of its keys.
      capacity: how many rows it has.
      totals: the keys that were "admitted", "evicted", "expired", "unseen" and "forgotten".
      hottest: how many keys to list in each order.

    Returns:
      `step`; `capacity`, `keys` and `occupancy`, the share of the rows that have a key; `waiting`,
      the keys that are counted and have no row; `ages`, by share of the keys, how many steps ago
      that many of them had been seen; `totals`, and `per_step`, these divided by the steps;
      `most_batches` and `seen_last`, the keys that the most batches had and that were seen last, as
      dicts of `key`, `row`, `batches_seen` and `last_seen`; and `waiting_most`, the waiting keys
      with the largest counts, as dicts of `key` and `count`.

    Example:
      >>> keys, numbers = np.array([7, 5], np.uint64), np.array([0, 1])
      >>> scores = KeyScores(keys, numbers, np.array([1, 4]), numbers + 1, keys[:0], numbers[:0], 4)
      >>> found = describe_keys(scores, 8, {"admitted": 2}, hottest=1)
      >>> found["occupancy"], found["ages"]["0.5"], found["per_step"], found["seen_last"]
      (0.25, 0, {'admitted': 0.5}, [{'key': 5, 'row': 1, 'batches_seen': 2, 'last_seen': 4}])
    """
    ages = np.sort(scores.ages)
    # Of 5 keys, the age of the share 0.5 is that of the third youngest.
    at = [max(0, int(np.ceil(fraction * ages.size)) - 1) for fraction in QUANTILES]
    fields = {
        "row": scores.rows,
        "batches_seen": scores.batches_seen,
        "last_seen": scores.last_seen,
    }
    return {
        "step": scores.step,
        "capacity": capacity,
        "keys": scores.keys.size,
        "occupancy": scores.keys.size / capacity,
        "waiting": scores.waiting_keys.size,
        "ages": {
            f"{fraction:g}": int(ages[i])
            for fraction, i in zip(QUANTILES, at, strict=True)
            if ages.size
        },
        "totals": {name: int(count) for name, count in totals.items()},
        "per_step": {name: int(count) / max(1, scores.step) for name, count in totals.items()},
        "most_batches": _listed(scores.keys, fields, ("batches_seen", "last_seen"), hottest),
        "seen_last": _listed(scores.keys, fields, ("last_seen", "batches_seen"), hottest),
        "waiting_most": _listed(
            scores.waiting_keys, {"count": scores.waiting_counts}, ("count",), hottest
        ),
    }


def _listed(
    keys: np.ndarray, fields: Mapping[str, np.ndarray], order: tuple[str, ...], most: int
) -> list[dict[str, int]]:
    """Return the first keys by some fields, the largest first; among equals, the first one."""
    # The last array of lexsort matters most, so the place among all comes first.
    places = np.arange(keys.size)
    chosen = np.lexsort([places, *(-fields[name] for name in reversed(order))])[:most]
    return [
        {"key": int(keys[i]), **{name: int(array[i]) for name, array in fields.items()}}
        for i in chosen
    ]

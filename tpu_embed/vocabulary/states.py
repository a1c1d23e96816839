"""States of maps as arrays, which a checkpoint keeps: check them, and fit them to a capacity.

Input: a `MapState`. Output: the same, or another one, and which rows of the table move for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tpu_embed._checks import refuse
from tpu_embed.kernels.vocabulary_reference import COUNTERS, MAX_STEP, MapState, Options
from tpu_embed.vocabulary.config import DynamicVocabulary

_PAIRS = {"rows": "keys", "last_seen": "keys", "batches_seen": "keys"} | {
    "waiting_counts": "waiting_keys"
}
"""Fields of a state -> the field that has the same length."""


def check_state(state: MapState, options: Options) -> None:
    """Check that a map with these options can have this state.

    Raises:
      ValueError: a field has a wrong dtype, shape or content.
    """
    for name, array in state._asdict().items():
        dtype = np.uint64 if name.endswith("keys") else np.int64
        shape = {"step": (), "counters": (len(COUNTERS),)}.get(name)
        if shape is None:
            shape = getattr(state, _PAIRS.get(name, name)).shape
        if array.dtype != dtype or array.shape != shape or array.ndim > 1:
            refuse(
                f"MapState.{name}",
                expected=f"{np.dtype(dtype)} of shape {shape}",
                got=f"{array.dtype} of shape {array.shape}",
            )
    last, step, most = state.last_seen, int(state.step), options.num_rows
    _require(state, "step", 0 <= step <= MAX_STEP, f"a number in [0, {MAX_STEP}]")
    bounds = state.rows[[0, -1]] if state.rows.size else np.zeros(2)
    ascending = bounds[0] >= 0 and bounds[1] < most and (np.diff(state.rows) > 0).all()
    _require(state, "rows", ascending, f"ascending numbers in [0, {most})")
    _require(state, "last_seen", ((last >= 1) & (last <= step)).all(), f"steps in [1, {step}]")
    for name in ("batches_seen", "waiting_counts"):
        counts = getattr(state, name)
        _require(state, name, ((counts >= 1) & (counts <= step)).all(), f"counts in [1, {step}]")
    # Sorted: np.unique may use a hash table, which takes ten times as long for millions of keys.
    every = np.sort(np.concatenate([state.keys, state.waiting_keys]))
    distinct = (every[1:] != every[:-1]).all()
    _require(state, "keys", distinct, "distinct keys, none of them waiting")


def _require(state: MapState, name: str, holds: bool | np.bool, expected: str) -> None:
    if not holds:
        refuse(
            f"MapState.{name}",
            expected=expected,
            got=np.array2string(getattr(state, name), threshold=10),
        )


def fit(
    state: MapState, capacity: int, vocabulary: DynamicVocabulary
) -> tuple[MapState, np.ndarray]:
    """Fit a state to a table of another capacity: the keys with the best scores stay.

    The keys that would be evicted last stay (with `evict="none"`: those that were seen last). A
    key keeps its row where the new capacity has that row; the others get the lowest rows that are
    left, in ascending order of their old rows. Keys that do not stay count as evicted. Waiting
    keys beyond the bound are forgotten, those first counted longest ago first.

    Args:
      state: the state of a map.
      capacity: the rows of the table that the state is for.
      vocabulary: the vocabulary of that table.

    Returns:
      The state, and of each of its keys the row it had before, int64 `[n]`.

    Raises:
      ValueError: the state is not that of a map, or the capacity leaves no row for a key.

    Example:
      >>> from tpu_embed.vocabulary import VocabularyMap
      >>> vocabulary = DynamicVocabulary()
      >>> ids = VocabularyMap(vocabulary, 3)
      >>> _ = ids.take(np.zeros(0, np.int64), np.array([7, 8, 9], np.uint64))
      >>> _ = ids.take(np.array([1, 2]), np.zeros(0, np.uint64))  # keys 8 and 9
      >>> state, rows_before = fit(ids.state(), 2, vocabulary)
      >>> state.keys, state.rows, rows_before
      (array([9, 8], dtype=uint64), array([0, 1]), array([2, 1]))
    """
    options = vocabulary.options(capacity, lookahead=0)
    check_state(state, options._replace(num_rows=2**31))
    scores = [state.rows, state.last_seen]
    if options.evict == "lfu":
        scores.append(state.batches_seen)
    dropped = max(0, state.keys.size - options.num_rows)
    stay = np.sort(np.lexsort(scores)[dropped:])  # positions in `keys`, whose rows ascend
    rows = state.rows[stay].copy()
    # Rows (0, 4, 5, 7) in a capacity of 5: 0 and 4 are kept, 5 and 7 become the free rows 1 and 2.
    beyond = rows >= options.num_rows
    is_free = np.ones(rows.size, bool)
    is_free[rows[rows < rows.size]] = False
    rows[beyond] = np.flatnonzero(is_free)[: beyond.sum()]
    order = np.argsort(rows)
    stay = stay[order]
    forgotten = max(0, state.waiting_keys.size - options.waiting)
    lost = {"evicted": dropped, "forgotten": forgotten}
    fitted = MapState(
        keys=state.keys[stay],
        rows=rows[order],
        last_seen=state.last_seen[stay],
        batches_seen=state.batches_seen[stay],
        waiting_keys=state.waiting_keys[forgotten:],
        waiting_counts=state.waiting_counts[forgotten:],
        step=state.step,
        counters=state.counters + np.array([lost.get(name, 0) for name in COUNTERS]),
    )
    return fitted, state.rows[stay]


class RowMoves(NamedTuple):
    """Where the rows of a table go that belong to keys, or to all unseen ones.

    Attributes:
      before: int64 `[n]`, the rows that they had, ascending.
      now: int64 `[n]`, the rows that they have.
    """

    before: np.ndarray
    now: np.ndarray

    def moved(self) -> RowMoves:
        """Return those that do not stay in their places."""
        moved = self.before != self.now
        return RowMoves(self.before[moved], self.now[moved])

    def follow(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which of some rows before, int64 `[m]`, are here, bool `[m]`; and their rows."""
        at = np.searchsorted(self.before, rows)
        here = np.append(self.before, -1)[at] == rows
        return here, self.now[at[here]]


def fit_rows(
    state: MapState,
    before: tuple[int, str],
    capacity: int,
    vocabulary: DynamicVocabulary,
) -> tuple[MapState, RowMoves]:
    """Fit a state to a table of another capacity, as `fit` does, and say which rows move.

    Args:
      state: the state of a map.
      before: the capacity and `unseen` of its table.
      capacity, vocabulary: those of the table that the state is for.

    Raises:
      ValueError: what `fit` refuses.
    """
    fitted, rows = fit(state, capacity, vocabulary)
    pairs = [(rows, fitted.rows)]
    # The shared row is the last one of any capacity.
    if before[1] == vocabulary.unseen == "shared":
        pairs.append((np.array([before[0] - 1]), np.array([capacity - 1])))
    old, new = (np.concatenate(part) for part in zip(*pairs, strict=True))
    order = np.argsort(old)
    return fitted, RowMoves(old[order], new[order])

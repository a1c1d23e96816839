"""The map from keys to rows of one table, and what it did with each training batch.

A key is a number of 64 bits: an item, a user, a hashed string. The map gives it a row of the table
while it matters, by the rules of a `DynamicVocabulary`. It runs on the host, in C++ where the
compiled kernels are, else in NumPy, with the same results.

Input: keys, NumPy arrays. Output: rows, NumPy arrays.
"""

from __future__ import annotations

import threading
from typing import NoReturn

import numpy as np

from tpu_embed._checks import is_int, message, refuse, refuse_pickle
from tpu_embed.kernels import dispatch
from tpu_embed.kernels.vocabulary_reference import (
    COUNTERS,
    MAX_STEP,
    ConflictError,
    MapState,
    Taken,
)
from tpu_embed.storage import RowGroups
from tpu_embed.vocabulary.config import DynamicVocabulary
from tpu_embed.vocabulary.states import check_state


class VocabularyMap:
    """Map keys to rows, and admit, count and evict keys batch by batch.

    Any thread may call any method at any time. Each call sees the map, and leaves it, as it is
    between two batches: `find` beside a `take` of another thread returns the rows of all its keys
    as of before the batch, or of all as of after it. A caller that finds the rows of a batch and
    then takes the batch must see to it that no other batch is taken in between; `take` notices if
    an unknown key has become known or if a row has lost its key.

    What a batch changed is kept in a log until `forget` drops it, so that `rewind` can undo it.

    Args:
      vocabulary: how keys are admitted and evicted.
      capacity: V, the rows of the table, below 2³¹. If `vocabulary.unseen` is "shared", the last
        one is never given to a key.
      lookahead: how many batches may be taken ahead: the rows of the `lookahead` batches before the
        present one are not taken from their keys, nor are those of the present one.

    Raises:
      ValueError: an argument is outside its range.

    Example:
      >>> ids = VocabularyMap(DynamicVocabulary(), capacity=2)
      >>> ids.take(np.zeros(0, np.int64), np.array([7, 5], np.uint64)).rows
      array([0, 1])
      >>> ids.take(ids.find(np.array([7], np.uint64)), np.array([9], np.uint64)).evicted_rows
      array([1])
      >>> ids.find(np.array([7, 5, 9], np.uint64))
      array([ 0, -1,  1])
    """

    def __init__(self, vocabulary: DynamicVocabulary, capacity: int, lookahead: int = 0) -> None:
        self._options = vocabulary.options(capacity, lookahead)
        self._map = dispatch.vocabulary_kernels().KeyMap(self._options)
        self._lock = threading.Lock()  # held by one call at a time, `find` excepted

    def __len__(self) -> int:
        """Return the number of keys that have a row."""
        with self._lock:
            return len(self._map)

    def __reduce__(self) -> NoReturn:
        refuse_pickle("VocabularyMap", remedy="keep its state() and load_state() that")

    @property
    def step(self) -> int:
        """The number of training batches taken so far."""
        with self._lock:
            return self._map.step

    @property
    def steps(self) -> set[int]:
        """The step, as `GroupedMap` has one per group."""
        return {self.step}

    @property
    def earliest(self) -> int:
        """The earliest step that `rewind` and `state` reach."""
        with self._lock:
            return self._map.earliest

    @property
    def counters(self) -> dict[str, int]:
        """Totals of all steps, by the names of `COUNTERS`.

        "admitted": keys that got a row; "evicted": that lost it to another key; "expired": whose
        ttl passed; "unseen": distinct keys that had no row, summed over the batches; "forgotten":
        waiting keys that were forgotten. The first is the sum of the next two and of `len`.
        """
        with self._lock:
            return dict(zip(COUNTERS, self._map.counters.tolist(), strict=True))

    @property
    def nbytes(self) -> int:
        """The bytes of memory that the map has asked for, its log included."""
        with self._lock:
            return self._map.nbytes

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the row of each key; the map does not change.

        Args:
          keys: uint64 `[n]`.

        Returns:
          int64 `[n]`; -1 for keys without a row.
        """
        return self._map.find(_line(keys, np.uint64))

    def keys(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all keys that have a row, uint64 `[n]`, and the rows, int64 `[n]`, ascending."""
        state = self.state()
        return state.keys, state.rows

    def take(self, known: np.ndarray, unknown: np.ndarray, *, at_once: bool = False) -> Taken:
        """Take one training batch: one step.

        The scores of known keys move; rows whose ttl has passed become free; every unknown key is
        counted once; those that `admit_after` batches have had are admitted in order, each into the
        lowest free row, else into the row of an evicted key; keys that find no row wait on; at
        last the waiting keys that are too many are forgotten.

        Args:
          known: int64 `[k]`, the rows of those keys of the batch that `find` knows; rows may
            repeat.
          unknown: uint64 `[m]`, the keys of the batch that `find` does not know, in batch order;
            keys may repeat.
          at_once: whether unknown keys are admitted whatever `admit_after` says.

        Returns:
          What was done, with the row of each unknown key.

        Raises:
          ValueError: a row has no key, or an unknown key has a row; or 2³² − 2 batches were taken.
            The map is as it was.
        """
        known, unknown = _line(known, np.int64), _line(unknown, np.uint64)
        with self._lock:
            if self._map.step >= MAX_STEP:
                refuse("VocabularyMap.take", expected=f"at most {MAX_STEP} batches", got="one more")
            try:
                return self._map.take(known, unknown, at_once=at_once)
            except ConflictError as conflict:
                raise ValueError(_conflict_message(*conflict.args)) from None

    def rows_needed(self, lost: np.ndarray) -> int:
        """Return how many rows there must be, so that keys that found none, uint64 `[n]`, do."""
        return self._options.num_rows + np.unique(lost).size

    def rewind(self, step: int) -> None:
        """Undo the batches taken after `step`, as if they had never been taken.

        This takes time in proportion to the capacity.

        Raises:
          ValueError: the log does not reach `step`.
        """
        with self._lock:
            self._map.rewind(self._reached("VocabularyMap.rewind", step))

    def forget(self, step: int) -> None:
        """Drop the log of the batches up to `step`: they can no longer be undone.

        Raises:
          ValueError: `step` has not been taken.
        """
        with self._lock:
            now = self._map.step
            if not is_int(step) or step > now:
                refuse("VocabularyMap.forget", expected=f"a step of at most {now}", got=repr(step))
            self._map.forget(int(step))

    def state(self, step: int | None = None) -> MapState:
        """Return everything that the map knew after `step`, as arrays of its own.

        Args:
          step: None: the present one.

        Raises:
          ValueError: the log does not reach `step`.
        """
        with self._lock:
            wanted = self._map.step if step is None else step
            return self._map.state(self._reached("VocabularyMap.state", wanted))

    def check_state(self, state: MapState) -> None:
        """Check that the map can have this state.

        Raises:
          ValueError: it cannot.
        """
        check_state(state, self._options)

    def load_state(self, state: MapState) -> None:
        """Replace everything that the map knows; its log is empty then.

        Args:
          state: of a map of this capacity; `fit` makes it from one of another capacity.

        Raises:
          ValueError: the map cannot have this state. It is as it was.
        """
        self.check_state(state)
        with self._lock:
            self._map.load_state(state)

    def _reached(self, what: str, step: int) -> int:
        """Return a step that the log reaches."""
        earliest, now = self._map.earliest, self._map.step
        if not is_int(step) or not earliest <= step <= now:
            refuse(
                what,
                expected=f"a step in [{earliest}, {now}], which the log reaches",
                got=repr(step),
            )
        return int(step)


def _line(numbers: np.ndarray, dtype: type) -> np.ndarray:
    """Return the numbers next to each other in memory."""
    assert numbers.dtype == dtype
    assert numbers.ndim == 1
    return np.ascontiguousarray(numbers)


def _conflict_message(kind: str, number: int) -> str:
    """Return the message of a batch that does not fit the map."""
    what, expected = {
        "row": ("known", "rows of known keys"),
        "key": ("unknown", "keys without a row"),
    }[kind]
    remedy = "find the rows again: another batch was taken in between"
    return message(
        f"VocabularyMap.take: {what}", expected=expected, got=f"the {kind} {number}", remedy=remedy
    )


class GroupedMap:
    """The map of one table on the host, whose rows are in groups: ids get rows of their own group.

    It is a map for each group. Where there is one group, it is that map.

    Args:
      vocabulary: how an id gets a row; nothing waits or expires.
      groups: which rows an id may have.
      lookahead: as for `VocabularyMap`.
    """

    def __init__(self, vocabulary: DynamicVocabulary, groups: RowGroups, lookahead: int) -> None:
        self._groups = groups
        self._maps = [VocabularyMap(vocabulary, rows.size, lookahead) for rows in groups.rows]
        # Of each row its group, and its number in it.
        self._group_of = np.empty(groups.num_rows, np.int32)
        self._number_of = np.empty(groups.num_rows, np.int64)
        for group, rows in enumerate(groups.rows):
            self._group_of[rows], self._number_of[rows] = group, np.arange(rows.size)

    def __len__(self) -> int:
        """Return the number of ids that have a row."""
        return sum(map(len, self._maps))

    @property
    def step(self) -> int:
        """The number of training batches taken so far."""
        return max(one.step for one in self._maps)

    @property
    def steps(self) -> set[int]:
        """The steps that the groups are at: one, but after an interrupt."""
        return {one.step for one in self._maps}

    @property
    def counters(self) -> dict[str, int]:
        """Totals of all groups, see `VocabularyMap.counters`."""
        counts = [one.counters for one in self._maps]
        return {name: sum(one[name] for one in counts) for name in COUNTERS}

    @property
    def nbytes(self) -> int:
        """The bytes of memory that the maps have asked for."""
        own = self._group_of.nbytes + self._number_of.nbytes
        return own + sum(one.nbytes for one in self._maps)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the row of each id, int64 `[n]`; -1 for none."""
        rows, of = np.full(keys.size, -1, np.int64), self._groups.of(keys)
        for group, one in enumerate(self._maps):
            mine = np.flatnonzero(of == group)
            numbers = one.find(keys[mine])
            found = numbers >= 0
            rows[mine[found]] = self._groups.rows[group][numbers[found]]
        return rows

    def take(self, known: np.ndarray, unknown: np.ndarray) -> Taken:
        """Take one training batch; see `VocabularyMap.take`."""
        of_known, of_unknown = self._group_of[known], self._groups.of(unknown)
        rows, parts = np.full(unknown.size, -1, np.int64), []
        for group, one in enumerate(self._maps):
            mine = np.flatnonzero(of_unknown == group)
            taken = one.take(self._number_of[known[of_known == group]], unknown[mine])
            every = np.append(self._groups.rows[group], -1)  # rows in the place of its numbers
            part = taken._replace(
                rows=every[taken.rows],
                new_rows=every[taken.new_rows],
                evicted_rows=every[taken.evicted_rows],
            )
            rows[mine] = part.rows
            parts.append(part)
        # Free rows go first, then those of others, in the order in which these leave.
        ends = [one.new_rows.size - one.evicted_rows.size for one in parts]
        pairs = [*zip(parts, ends, strict=True)]
        return Taken(
            step=self.step,
            rows=rows,
            new_keys=np.concatenate(
                [p.new_keys[:n] for p, n in pairs] + [p.new_keys[n:] for p, n in pairs]
            ),
            new_rows=np.concatenate(
                [p.new_rows[:n] for p, n in pairs] + [p.new_rows[n:] for p, n in pairs]
            ),
            evicted_rows=np.concatenate([p.evicted_rows for p in parts]),
            evicted_keys=np.concatenate([p.evicted_keys for p in parts]),
            unseen=sum(p.unseen for p in parts),
        )

    def rows_needed(self, lost: np.ndarray) -> int:
        """Return how many rows there must be, so that ids that found none, uint64 `[n]`, do."""
        of = self._groups.of(np.unique(lost))
        sizes = np.array([rows.size for rows in self._groups.rows])
        return int((sizes + np.bincount(of, minlength=sizes.size)).max()) * sizes.size

    def rewind(self, step: int) -> None:
        """Undo the batches taken after a step."""
        for one in self._maps:
            one.rewind(min(step, one.step))

    def forget(self, step: int) -> None:
        """Drop the log of the batches up to a step."""
        for one in self._maps:
            one.forget(step)

    def state(self, step: int | None = None) -> MapState:
        """Return which ids had rows after a step, ascending by row; see `VocabularyMap.state`."""
        states = [one.state(step) for one in self._maps]
        rows = np.concatenate(
            [of[one.rows] for of, one in zip(self._groups.rows, states, strict=True)]
        )
        order = np.argsort(rows)
        fields = {"rows": rows[order]}
        for name in ("keys", "last_seen", "batches_seen"):
            fields[name] = np.concatenate([getattr(one, name) for one in states])[order]
        counters = np.sum([one.counters for one in states], axis=0)
        return states[0]._replace(**fields, counters=counters)

    def check_state(self, state: MapState) -> None:
        """Check that a state is that of a map without ids: no other one is ever loaded."""
        for one in self._maps:
            one.check_state(state)

    def load_state(self, state: MapState) -> None:
        """Forget all ids, and go on from the step of a state without ids."""
        assert not state.keys.size, "nothing is on the devices after a restore"
        for one in self._maps:
            one.load_state(state)

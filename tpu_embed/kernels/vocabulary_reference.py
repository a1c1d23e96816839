"""A map from keys to rows that learns new keys and forgets old ones, in NumPy.

The keys of a stream come and go, so the map gives its rows to the keys that matter now. A key that
the map does not know waits until enough training batches had it; then it is admitted into a free
row, or it evicts the key with the lowest score. Every training batch is one step. What a step
changed is kept in a log until it is forgotten, so that steps can be undone.

For example, with two rows, where every key is admitted at once and the one that was seen longest
ago is evicted:

    step 1, keys 7 and 5       7 -> row 0, 5 -> row 1
    step 2, key 7              seen again
    step 3, key 9              5 is evicted, 9 -> row 1

`host_native` does the same in C++. Here a step takes time in proportion to the rows of the
map; there, to the keys of the batch.

Input: NumPy arrays. Output: NumPy arrays, the same numbers from both implementations.
"""

from __future__ import annotations

import copy
import itertools
import sys
import threading
from typing import Literal, NamedTuple

import numpy as np

MAX_STEP = 2**32 - 2
"""A map takes at most this many training batches: it keeps 32 bits of a step for every row."""


class Options(NamedTuple):
    """How a map admits and evicts keys.

    Attributes:
      num_rows: the rows that keys may have: [0, num_rows).
      admit_after: a key is admitted when this many training batches have had it.
      evict: the key that is evicted is the one that was seen longest ago ("lru"), or in the fewest
        batches, then longest ago ("lfu"); or no key is ("none").
      ttl: a row is freed if none of the last `ttl` batches before the present one had its key.
        None: never.
      waiting: how many keys may wait.
      lookahead: rows that one of the `lookahead` batches before the present one had are not taken
        from their keys.
    """

    num_rows: int
    admit_after: int
    evict: Literal["lru", "lfu", "none"]
    ttl: int | None
    waiting: int
    lookahead: int


class Taken(NamedTuple):
    """What a map did with a training batch.

    Attributes:
      step: the step of the map that the batch was.
      rows: int64 `[m]`, the row of each unknown key; -1 if it has none.
      new_keys: uint64 `[a]`, the keys that were admitted, in order.
      new_rows: int64 `[a]`, their rows.
      evicted_rows: int64 `[e]`, the rows that were taken from their keys: those whose ttl had
        passed, then those of evicted keys. Most of them are among `new_rows`.
      evicted_keys: uint64 `[e]`, the keys that they were taken from.
      unseen: the number of distinct keys of this batch that have no row.
    """

    step: int
    rows: np.ndarray
    new_keys: np.ndarray
    new_rows: np.ndarray
    evicted_rows: np.ndarray
    evicted_keys: np.ndarray
    unseen: int


class MapState(NamedTuple):
    """Everything that a map knows after a step, as arrays.

    Attributes:
      keys: uint64 `[n]`, the keys that have a row, by ascending row.
      rows: int64 `[n]`, their rows.
      last_seen: int64 `[n]`, the last step whose batch had the key.
      batches_seen: int64 `[n]`, how many training batches had the key since its admission; the
        batch that admitted it is one of them.
      waiting_keys: uint64 `[w]`, the keys that wait, the one first counted longest ago first.
      waiting_counts: int64 `[w]`, how many training batches had each of them.
      step: int64 `[]`, the training batches taken so far.
      counters: int64 `[5]`, totals of all steps, as `COUNTERS` names them.
    """

    keys: np.ndarray
    rows: np.ndarray
    last_seen: np.ndarray
    batches_seen: np.ndarray
    waiting_keys: np.ndarray
    waiting_counts: np.ndarray
    step: np.ndarray
    counters: np.ndarray


COUNTERS = ("admitted", "evicted", "expired", "unseen", "forgotten")
"""Keys that got a row; that lost it to another key; whose ttl passed; distinct keys that had no
row, summed over the batches; waiting keys that were forgotten, since too many were waiting."""


class ConflictError(Exception):
    """A batch does not fit the map; the arguments are a kind, "row" or "key", and the number."""


class _Changes(NamedTuple):
    """What a step changed, as it was before: apply in reverse order to undo the step."""

    counters: np.ndarray
    rows: list[tuple[np.ndarray, ...]]  # each: rows, keys, last_seen, batches_seen
    waiting: list[tuple[int, tuple[int, int] | None]]  # key, (number, count) or None


class KeyMap:
    """A map from keys to rows; `find` may be called while another thread changes the map.

    Calls that change the map must not overlap.

    Args:
      options: how keys are admitted and evicted.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._lock = threading.Lock()
        self.load_state(empty_state(0))

    @property
    def step(self) -> int:
        """The number of training batches taken so far."""
        return self._step

    @property
    def earliest(self) -> int:
        """The earliest step to which the log reaches."""
        return self._step - len(self._log)

    @property
    def counters(self) -> np.ndarray:
        """Totals of all steps, int64 `[5]`, as `COUNTERS` names them."""
        return self._counters.copy()

    @property
    def nbytes(self) -> int:
        """The bytes of arrays and dictionaries, without the objects in them."""
        arrays = self._keys.nbytes + self._last_seen.nbytes + self._batches_seen.nbytes
        return arrays + sys.getsizeof(self._row_of) + sys.getsizeof(self._waiting)

    def __len__(self) -> int:
        return len(self._row_of)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the row of each key, -1 for unknown ones.

        Args:
          keys: uint64 `[n]`.

        Returns:
          int64 `[n]`.
        """
        with self._lock:
            found = [self._row_of.get(key, -1) for key in keys.tolist()]
        return np.array(found, np.int64)

    def take(
        self, known: np.ndarray, unknown: np.ndarray, *, at_once: bool = False
    ) -> Taken:
        """Take a training batch: move scores, free rows, count and admit keys.

        Args:
          known: int64 `[k]`, rows of the batch's known keys; rows may repeat.
          unknown: uint64 `[m]`, the batch's unknown keys in batch order; keys may repeat.
          at_once: whether unknown keys are admitted whatever `admit_after` says.

        Raises:
          ConflictError: a row has no key, or an unknown key is known. Nothing has changed.
        """
        self._check(known, unknown)
        with self._lock:
            self._log.append(_Changes(self._counters.copy(), [], []))
            self._step += 1
            touched = np.unique(known)
            self._write(
                touched,
                self._keys[touched],
                self._step,
                self._batches_seen[touched] + 1,
            )
            expired, keys_before = self._expired(), self._keys.copy()
            self._clear(expired)
            distinct = list(dict.fromkeys(unknown.tolist()))
            admitted, places, victims = self._admit(
                distinct, 1 if at_once else self._options.admit_after
            )
            evicted = np.concatenate([expired, victims])
            row_of = dict(zip(admitted, places.tolist(), strict=True))
            unseen = [key for key in distinct if key not in row_of]
            for key in unseen:
                self._set_waiting(key, self._count(key) + 1)
            counts = [
                len(admitted),
                victims.size,
                expired.size,
                len(unseen),
                self._forget_keys(),
            ]
            self._counters += counts
        return Taken(
            step=self._step,
            rows=np.array([row_of.get(key, -1) for key in unknown.tolist()], np.int64),
            new_keys=np.array(admitted, np.uint64),
            new_rows=places,
            evicted_rows=evicted,
            evicted_keys=keys_before[evicted],
            unseen=len(unseen),
        )

    def rewind(self, step: int) -> None:
        """Undo the batches after `step`, which the log must reach."""
        with self._lock:
            while self._step > step:
                changes = self._log.pop()
                for rows, keys, last_seen, batches_seen in reversed(changes.rows):
                    self._put(rows, keys, last_seen, batches_seen)
                for key, entry in reversed(changes.waiting):
                    self._waiting.pop(key, None)
                    if entry is not None:
                        self._waiting[key] = entry
                self._counters = changes.counters
                self._step -= 1
            # By their numbers the keys are in the order in which they were first counted.
            self._waiting = dict(
                sorted(self._waiting.items(), key=lambda item: item[1][0])
            )

    def forget(self, step: int) -> None:
        """Drop the log of the batches up to `step`; they can no longer be undone."""
        del self._log[: max(0, step - self.earliest)]

    def state(self, step: int) -> MapState:
        """Return the state after `step`, which the log must reach."""
        past = KeyMap(self._options)
        mine = {name: value for name, value in vars(self).items() if name != "_lock"}
        vars(past).update(copy.deepcopy(mine))
        past.rewind(step)
        rows = np.flatnonzero(past._batches_seen)
        counts = [count for _, count in past._waiting.values()]
        return MapState(
            keys=past._keys[rows],
            rows=rows,
            last_seen=past._last_seen[rows],
            batches_seen=past._batches_seen[rows],
            waiting_keys=np.array(list(past._waiting), np.uint64),
            waiting_counts=np.array(counts, np.int64),
            step=np.array(past._step, np.int64),
            counters=past._counters,
        )

    def load_state(self, state: MapState) -> None:
        """Replace everything by a valid state; the log is empty then."""
        n = self._options.num_rows
        with self._lock:
            self._keys = np.zeros(n, np.uint64)
            self._last_seen = np.zeros(n, np.int64)
            self._batches_seen = np.zeros(n, np.int64)  # 0: the row is free
            self._row_of: dict[int, int] = {}
            self._put(state.rows, state.keys, state.last_seen, state.batches_seen)
            waiting = zip(
                state.waiting_keys.tolist(), state.waiting_counts.tolist(), strict=True
            )
            # Of each key its number, in the order in which keys were first counted, and its count.
            self._waiting = {
                key: (number, count) for number, (key, count) in enumerate(waiting)
            }
            self._next_number = len(self._waiting)
            self._step = int(state.step)
            self._counters = state.counters.copy()
            self._log: list[_Changes] = []

    def _check(self, known: np.ndarray, unknown: np.ndarray) -> None:
        strange = ~np.isin(known, np.flatnonzero(self._batches_seen))
        if strange.any():
            raise ConflictError("row", int(known[strange][0]))
        found = self.find(unknown) >= 0
        if found.any():
            raise ConflictError("key", int(unknown[found][0]))

    def _expired(self) -> np.ndarray:
        """Return the rows whose ttl has passed, the one seen longest ago first."""
        ttl = self._options.ttl
        if ttl is None:
            return np.zeros(0, np.int64)
        oldest = self._step - max(ttl, self._options.lookahead)
        rows = np.flatnonzero((self._batches_seen > 0) & (self._last_seen < oldest))
        return rows[np.argsort(self._last_seen[rows], kind="stable")]

    def _admit(
        self, distinct: list[int], admit_after: int
    ) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Admit the keys that are due, as far as there are rows.

        Returns:
          The keys, the row of each, and those rows among them that were taken from other keys.
        """
        due = [key for key in distinct if self._count(key) + 1 >= admit_after]
        # Keys that are admitted in this step are not evicted in it. So the free rows go first, in
        # ascending order, and then the rows of other keys, in ascending order of their scores.
        free = np.flatnonzero(self._batches_seen == 0)[: len(due)]
        victims = self._victims(len(due) - free.size)
        places = np.concatenate([free, victims])
        admitted = due[: places.size]
        self._clear(victims)
        self._write(places, np.array(admitted, np.uint64), self._step, 1)
        for key in admitted:
            if key in self._waiting:
                self._set_waiting(key, 0)
        return admitted, places, victims

    def _victims(self, most: int) -> np.ndarray:
        """Return up to `most` rows, the one of the lowest score first; none is protected."""
        evict = self._options.evict
        if evict == "none" or most == 0:
            return np.zeros(0, np.int64)
        protected = self._last_seen >= self._step - self._options.lookahead
        rows = np.flatnonzero((self._batches_seen > 0) & ~protected)
        scores = [rows, self._last_seen[rows]]
        if evict == "lfu":
            scores.append(self._batches_seen[rows])
        return rows[np.lexsort(scores)][:most]  # lexsort: the last array matters most

    def _count(self, key: int) -> int:
        return self._waiting[key][1] if key in self._waiting else 0

    def _set_waiting(self, key: int, count: int) -> None:
        """Change the count of a waiting key; 0: it no longer waits."""
        before = self._waiting.get(key)
        self._log[-1].waiting.append((key, before))
        if count == 0:
            del self._waiting[key]
        elif before is None:
            self._waiting[key] = self._next_number, count
            self._next_number += 1
        else:
            self._waiting[key] = before[0], count

    def _forget_keys(self) -> int:
        """Forget the keys that are too many, the one first counted longest ago first."""
        excess = max(0, len(self._waiting) - self._options.waiting)
        for key in list(itertools.islice(self._waiting, excess)):
            self._set_waiting(key, 0)
        return excess

    def _clear(self, rows: np.ndarray) -> None:
        """Take rows from their keys."""
        self._write(rows, self._keys[rows], 0, 0)

    def _write(
        self,
        rows: np.ndarray,
        keys: np.ndarray,
        last_seen: int,
        batches_seen: int | np.ndarray,
    ) -> None:
        """Log the rows as they are, then put numbers into them."""
        before = rows, self._keys[rows], self._last_seen[rows], self._batches_seen[rows]
        self._log[-1].rows.append(before)
        self._put(rows, keys, last_seen, batches_seen)

    def _put(
        self,
        rows: np.ndarray,
        keys: np.ndarray,
        last_seen: int | np.ndarray,
        batches_seen: int | np.ndarray,
    ) -> None:
        """Put keys and numbers into distinct rows; those that no batch has seen become free."""
        taken = np.flatnonzero(self._batches_seen[rows])
        for key in self._keys[rows[taken]].tolist():
            del self._row_of[key]
        self._keys[rows], self._last_seen[rows] = keys, last_seen
        self._batches_seen[rows] = batches_seen
        now = self._batches_seen[rows] > 0
        self._row_of.update(zip(keys[now].tolist(), rows[now].tolist(), strict=True))


def empty_state(step: int) -> MapState:
    """Return the state of a map without keys, after a step."""
    keys, numbers = np.zeros(0, np.uint64), np.zeros(0, np.int64)
    counters = np.zeros(len(COUNTERS), np.int64)
    return MapState(
        keys, numbers, numbers, numbers, keys, numbers, np.array(step), counters
    )

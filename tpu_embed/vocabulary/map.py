"""The map from keys to rows of one table, and what it did with each training batch.

A key is a number of 64 bits: an item, a user, a hashed string. The map gives it a row of the table
while it matters, by the rules of a `DynamicVocabulary`. It runs on the host, in C++ where the
compiled kernels are, else in NumPy, with the same results.

A checkpoint keeps the state of a map as arrays, which are checked here, and fitted to a capacity. A
server has a `FixedVocabulary`, the keys of a table at one moment: no key comes or goes.

Input: keys, NumPy arrays, or a `MapState`. Output: rows, NumPy arrays; the same state or another
one, and which rows of the table move for it.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Any, NamedTuple, NoReturn

import numpy as np

from tpu_embed._checks import is_int, message, refuse, refuse_pickle
from tpu_embed.kernels import dispatch
from tpu_embed.kernels.vocabulary_reference import (
    COUNTERS,
    MAX_STEP,
    ConflictError,
    MapState,
    Options,
    Taken,
)
from tpu_embed.storage import RowGroups
from tpu_embed.vocabulary.config import DynamicVocabulary

# -- states ----------------------------------------------------------------------------------------

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
    _require_field(state, "step", 0 <= step <= MAX_STEP, f"a number in [0, {MAX_STEP}]")
    bounds = state.rows[[0, -1]] if state.rows.size else np.zeros(2)
    ascending = bounds[0] >= 0 and bounds[1] < most and (np.diff(state.rows) > 0).all()
    _require_field(state, "rows", ascending, f"ascending numbers in [0, {most})")
    _require_field(
        state,
        "last_seen",
        ((last >= 1) & (last <= step)).all(),
        f"steps in [1, {step}]",
    )
    for name in ("batches_seen", "waiting_counts"):
        counts = getattr(state, name)
        _require_field(
            state,
            name,
            ((counts >= 1) & (counts <= step)).all(),
            f"counts in [1, {step}]",
        )
    # Sorted: np.unique may use a hash table, which takes ten times as long for millions of keys.
    every = np.sort(np.concatenate([state.keys, state.waiting_keys]))
    distinct = (every[1:] != every[:-1]).all()
    _require_field(state, "keys", distinct, "distinct keys, none of them waiting")


def _require_field(
    state: MapState, name: str, holds: bool | np.bool, expected: str
) -> None:
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
    # Positions in `keys`, whose rows ascend.
    stay = np.sort(np.lexsort(scores)[dropped:])
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


# -- maps ------------------------------------------------------------------------------------------


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

    def __init__(
        self, vocabulary: DynamicVocabulary, capacity: int, lookahead: int = 0
    ) -> None:
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

    def take(
        self, known: np.ndarray, unknown: np.ndarray, *, at_once: bool = False
    ) -> Taken:
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
                refuse(
                    "VocabularyMap.take",
                    expected=f"at most {MAX_STEP} batches",
                    got="one more",
                )
            try:
                return self._map.take(known, unknown, at_once=at_once)
            except ConflictError as conflict:
                kind, number = conflict.args
                what, expected = {
                    "row": ("known", "rows of known keys"),
                    "key": ("unknown", "keys without a row"),
                }[kind]
                raise ValueError(
                    message(
                        f"VocabularyMap.take: {what}",
                        expected=expected,
                        got=f"the {kind} {number}",
                        remedy="find the rows again: another batch was taken in between",
                    )
                ) from None

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
                refuse(
                    "VocabularyMap.forget",
                    expected=f"a step of at most {now}",
                    got=repr(step),
                )
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


class GroupedMap:
    """The map of one table on the host, whose rows are in groups: ids get rows of their own group.

    It is a map for each group. Where there is one group, it is that map.

    Args:
      vocabulary: how an id gets a row; nothing waits or expires.
      groups: which rows an id may have.
      lookahead: as for `VocabularyMap`.
    """

    def __init__(
        self, vocabulary: DynamicVocabulary, groups: RowGroups, lookahead: int
    ) -> None:
        self._groups = groups
        self._maps = [
            VocabularyMap(vocabulary, rows.size, lookahead) for rows in groups.rows
        ]
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
            # Rows in the place of its numbers.
            every = np.append(self._groups.rows[group], -1)
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


@dataclasses.dataclass(frozen=True, eq=False)
class FixedVocabulary:
    """Keys with rows, to be looked up with `serving_lookup`; it can be pickled and copied.

    It is sorted by key, so a lookup of n keys among m takes time in proportion to n log m.

    Args:
      keys: integers `[m]` of 64 bits, all different; signed ones count by their bits.
      rows: integers `[m]`, their rows.

    Raises:
      ValueError: another shape or dtype, a key or a row that occurs twice, or a negative row.

    Example:
      >>> FixedVocabulary([7, 5], [0, 3]).find(np.array([5, 6, 7], np.uint64))
      array([ 3, -1,  0])
    """

    keys: Any
    rows: Any

    def __post_init__(self) -> None:
        keys, rows = np.asarray(self.keys), np.asarray(self.rows)
        for name, array in (("keys", keys), ("rows", rows)):
            if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
                refuse(
                    f"FixedVocabulary.{name}",
                    expected="integers of shape (m,)",
                    got=f"{array.dtype} of shape {array.shape}",
                )
        if keys.shape != rows.shape:
            refuse("FixedVocabulary", expected=f"{keys.size} rows", got=f"{rows.size}")
        signed = keys.dtype.kind == "i"
        keys = (
            keys.astype(np.int64).view(np.uint64) if signed else keys.astype(np.uint64)
        )
        order = np.argsort(keys)
        keys = keys[order]
        if (keys[1:] == keys[:-1]).any():
            twice = int(keys[:-1][keys[1:] == keys[:-1]][0])
            refuse(
                "FixedVocabulary.keys",
                expected="each key once",
                got=f"key {twice} twice",
            )
        rows = rows[order].astype(np.int64)
        if (rows < 0).any():
            refuse("FixedVocabulary.rows", expected="at least 0", got=f"{rows.min()}")
        again = np.sort(rows)
        again = again[:-1][again[1:] == again[:-1]]
        if again.size:
            both = keys[rows == again[0]][:2].tolist()
            refuse(
                "FixedVocabulary.rows",
                expected="each row once",
                got=f"row {again[0]} for the keys {both[0]} and {both[1]}",
            )
        object.__setattr__(self, "keys", keys)
        object.__setattr__(self, "rows", rows)

    def __repr__(self) -> str:
        return f"FixedVocabulary({len(self)} keys, rows below {self.num_rows})"

    def __len__(self) -> int:
        """Return the number of keys."""
        return self.keys.size

    @functools.cached_property
    def num_rows(self) -> int:
        """The least number of rows that a table of these keys has."""
        return int(self.rows.max(initial=-1)) + 1

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the row of each key, int64 `[n]`; -1 for keys without a row.

        Args:
          keys: uint64 `[n]`.
        """
        if not self.keys.size:
            return np.full(keys.shape, -1, np.int64)
        at = np.minimum(np.searchsorted(self.keys, keys), self.keys.size - 1)
        return np.where(self.keys[at] == keys, self.rows[at], -1)

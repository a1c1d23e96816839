"""The maps of all tables of an engine, which move together: a step is one training batch.

A table has a map from its keys to rows on the devices. A table on the host with a dynamic
vocabulary has two, one after the other. The first gives keys ids, as the map of the same table
without storage gives them rows; the second gives ids rows on the devices, as those of a table
with row numbers:

    key 700 003  ->  id 12, in [0, V)  ->  row 5 on the devices, in [0, C); or at home alone

So a key may lose its row on the devices and keep its id. If it loses its id to another key, the row
of this id is made new, wherever it is.

What people ask about the keys of a table is told here, too: how busy they are, and which came and
went.

Input: keys, ids and rows of batches; states of maps. Output: what the maps did; tuples of NumPy
arrays, and the figures of a table in dictionaries, which JSON can hold. Nothing here locks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from tpu_embed._checks import refuse
from tpu_embed.kernels.dispatch import host_kernels
from tpu_embed.kernels.vocabulary_reference import MapState, Taken, empty_state
from tpu_embed.storage import RowGroups
from tpu_embed.vocabulary.batch_keys import MapStates, NewOwners
from tpu_embed.vocabulary.config import LivingTable
from tpu_embed.vocabulary.map import GroupedMap, VocabularyMap


class Moves(NamedTuple):
    """What the maps did with a training batch.

    Attributes:
      taken: by table, what the map to the rows on the devices did.
      owners: by table on the host with a dynamic vocabulary, which ids got new keys.
    """

    taken: dict[str, Taken]
    owners: dict[str, NewOwners]

    def of_keys(self, name: str) -> Taken:
        """Return what the map of the keys of a table did, which knows its unknown keys."""
        return self.owners[name].taken if name in self.owners else self.taken[name]


class Observer(Protocol):
    """Is told what maps do, in order; it must not raise, because tables may be donated by then."""

    def note_admitted(self, step: int, moves: Moves) -> None:
        """The newest state has the rows of this step, after what the maps did for it."""

    def note_undone(self, step: int) -> None:
        """The batches placed after this step are as if they had never been placed."""

    def note_loaded(self) -> None:
        """The maps were replaced."""


class FoundKeys(NamedTuple):
    """What maps know of some keys of a table, int32 `[n]` each.

    Attributes:
      ids: of a table on the host with a dynamic vocabulary, their ids; otherwise their rows; -1:
        none.
      rows: their rows on the devices; -1: none.
    """

    ids: np.ndarray
    rows: np.ndarray


_Map = VocabularyMap | GroupedMap


class TableMaps:
    """The maps of some tables.

    Args:
      tables: the tables.
      lookahead: as for `Vocabularies`.
      groups: of the rows of tables on the host, by table.
    """

    def __init__(
        self,
        tables: Sequence[LivingTable],
        lookahead: int,
        groups: Mapping[str, RowGroups],
    ) -> None:
        self._tables, self._lookahead = (
            {table.name: table for table in tables},
            lookahead,
        )
        self._groups = groups
        self._to_rows: dict[str, _Map] = {}  # on the devices
        self._to_ids: dict[str, VocabularyMap] = {}
        for name, table in self._tables.items():
            assert table.vocabulary is not None
            if name in groups and groups[name].count > 1:
                self._to_rows[name] = GroupedMap(
                    table.vocabulary, groups[name], lookahead
                )
            else:
                own = table.vocabulary, table.vocabulary_size
                self._to_rows[name] = VocabularyMap(*own, lookahead)
            if table.key_table is not None:
                size, rules = table.key_table
                self._to_ids[name] = VocabularyMap(rules, size, lookahead)

    def _every(self) -> list[_Map]:
        return [*self._to_rows.values(), *self._to_ids.values()]

    def _of_keys(self, name: str) -> _Map:
        """Return the map of the keys of a table."""
        return self._to_ids[name] if name in self._to_ids else self._to_rows[name]

    @property
    def step(self) -> int:
        """The number of training batches taken so far."""
        return max(map_.step for map_ in self._to_rows.values())

    @property
    def steps(self) -> set[int]:
        """The steps that maps are at: one, but after an interrupt."""
        return set().union(*(map_.steps for map_ in self._every()))

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """By table, how many keys it has, and how many it can have."""
        tables = self._tables.items()
        return {
            name: (
                len(self._of_keys(name)),
                table.vocabulary_size
                if table.key_table is None
                else table.key_table[0],
            )
            for name, table in tables
        }

    @property
    def counters(self) -> dict[str, dict[str, int]]:
        """Totals by table, see `Vocabularies.counters`."""
        maps = {name: self._of_keys(name) for name in self._tables}
        return {name: {"keys": len(one), **one.counters} for name, one in maps.items()}

    @property
    def nbytes(self) -> int:
        """The bytes of the host's memory that the maps take."""
        return sum(map_.nbytes for map_ in self._every())

    # -- a batch -------------------------------------------------------------------------------

    def find(self, name: str, keys: np.ndarray, after: Sequence[Moves]) -> FoundKeys:
        """Return the ids and rows of keys of a table.

        Args:
          name: the table.
          keys: uint64 `[n]`.
          after: what is not to have happened yet, the latest batch first.
        """
        ids = self._of_keys(name).find(keys).astype(np.int32)
        for one in after:
            _undo(ids, keys, one.of_keys(name))
        return FoundKeys(
            ids, self.rows(name, ids, after) if name in self._to_ids else ids
        )

    def rows(self, name: str, ids: np.ndarray, after: Sequence[Moves]) -> np.ndarray:
        """Return the rows on the devices, int32 `[n]`, of ids that `find` returned; see there."""
        keys = self.shared(name, ids).astype(np.int64).view(np.uint64)
        rows = self._to_rows[name].find(keys).astype(np.int32)
        for one in after:
            _undo(rows, keys, one.taken[name])
        return rows

    def shared(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Return ids, -1 replaced by that of the row that all unseen keys share, if they do."""
        table = self._tables[name].key_table
        if table is None or table.vocabulary.unseen != "shared":
            return ids
        return np.where(ids < 0, table.vocabulary_size - 1, ids).astype(ids.dtype)

    def take(self, batch: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Moves:
        """Take one training batch in all maps; if that fails, `rewind` undoes it.

        Args:
          batch: by table, the ids of the known keys (or rows, see `FoundKeys`), int64 `[k]`, and
            the unknown keys in batch order, uint64 `[m]`.

        Raises:
          ValueError: the rows are of another step, or do not fit on the devices.
        """
        moves = Moves({}, {})
        for name, (known, unknown) in batch.items():
            self._take(name, known, unknown, moves)
        return moves

    def _take(
        self, name: str, known: np.ndarray, unknown: np.ndarray, moves: Moves
    ) -> None:
        take = self._take_ids if name in self._to_ids else self._take_rows
        take(name, known, unknown, moves)

    def _take_rows(
        self, name: str, known: np.ndarray, unknown: np.ndarray, moves: Moves
    ) -> None:
        """Take a batch in the map to the rows on the devices."""
        moves.taken[name] = self._to_rows[name].take(known, unknown)
        table, lost = self._tables[name], moves.taken[name].rows < 0
        if table.is_on_host and lost.any():
            count = self._to_rows[name].rows_needed(unknown[lost])
            batches = (
                "a batch" if not self._lookahead else f"{self._lookahead + 1} batches"
            )
            refuse(
                f"table {name!r}",
                expected=f"at most {table.vocabulary_size} distinct ids in {batches}",
                got=f"{count}",
                remedy=f"give it HostStorage(device_rows={count}) or more, or smaller batches",
            )

    def _take_ids(
        self, name: str, known: np.ndarray, unknown: np.ndarray, moves: Moves
    ) -> None:
        """Take a batch in both maps of a table."""
        taken = self._to_ids[name].take(known, unknown)
        every = self.shared(name, np.concatenate([known, taken.rows]))
        ids = host_kernels().distinct_keys(every[every >= 0].view(np.uint64)).keys
        rows = self._to_rows[name].find(ids)
        here = rows >= 0
        self._take_rows(name, rows[here], ids[~here], moves)
        new = self._to_rows[name].find(taken.new_rows.view(np.uint64))
        moves.owners[name] = NewOwners(taken, new)

    def take_keys(self, name: str, keys: np.ndarray) -> Moves:
        """Take one step in which all keys of one table get rows, whatever `admit_after` says.

        If that fails, `rewind` undoes it. For every other table it is a batch without keys. Of a
        table on the host, the keys get ids, and nothing comes to the devices.

        Args:
          name: the table, with a dynamic vocabulary.
          keys: uint64 `[n]`, all different.

        Raises:
          ValueError: there are not enough rows for all keys.
        """
        moves, nothing = Moves({}, {}), (np.zeros(0, np.int64), np.zeros(0, np.uint64))
        taken = self._admit(name, keys)
        for other in self._tables:
            if other != name:
                self._take(other, *nothing, moves)
        if name in self._to_ids:
            self._take_rows(name, *nothing, moves)
            held = self._to_rows[name].find(taken.new_rows.view(np.uint64))
            moves.owners[name] = NewOwners(taken, held)
        else:
            moves.taken[name] = taken
        return moves

    def _admit(self, name: str, keys: np.ndarray) -> Taken:
        """Let all keys of a table have rows; see `take_keys`."""
        map_ = self._of_keys(name)
        assert isinstance(map_, VocabularyMap), "rows of keys are in no groups"
        known = map_.find(keys)
        taken = map_.take(known[known >= 0], keys[known < 0], at_once=True)
        new, lost = taken.new_rows.size, int((taken.rows < 0).sum())
        if lost:
            expected = f"at most {keys.size - lost} of these keys at a time: "
            expected += f"{keys.size - new - lost} have a row, and {new} can get one"
            remedy = "give fewer keys, or declare a larger capacity; keys of the call and of the "
            remedy += "`lookahead` batches before it keep their rows"
            refuse(
                f"table {name!r}: keys",
                expected=expected,
                got=f"{keys.size}",
                remedy=remedy,
            )
        return taken

    # -- steps ---------------------------------------------------------------------------------

    def rewind(self, step: int) -> None:
        """Undo the batches taken after a step; see `VocabularyMap.rewind`."""
        for map_ in self._every():
            map_.rewind(min(step, map_.step))

    def forget(self, step: int) -> None:
        """Drop what is known of the batches up to a step; see `VocabularyMap.forget`."""
        for map_ in self._every():
            map_.forget(step)

    def held(self, name: str, step: int) -> MapState:
        """Return which keys, or ids, of a table had rows on the devices after a step."""
        return self._to_rows[name].state(step)

    def keys(self, name: str, step: int) -> MapState:
        """Return which keys of a table had ids, or rows, after a step."""
        return self._of_keys(name).state(step)

    def states(self, history: int, step: int) -> MapStates:
        """Return all maps after a step of a history."""
        of_rows, of_ids = (
            {name: one.state(step) for name, one in maps.items()}
            for maps in (self._to_rows, self._to_ids)
        )
        return MapStates(history, of_rows, of_ids)

    def empty_states(self, history: int) -> MapStates:
        """Return the states of maps without keys."""
        made = (
            dict.fromkeys(maps, empty_state(0))
            for maps in (self._to_rows, self._to_ids)
        )
        return MapStates(history, *made)

    def check(self, states: MapStates) -> None:
        """Check that the maps can have these states.

        Raises:
          ValueError: other tables, or a state that a map cannot have.
        """
        given = states.maps if isinstance(states, MapStates) else {}
        if (
            given.keys() != self._to_rows.keys()
            or states.ids.keys() != self._to_ids.keys()
        ):
            refuse(
                "vocabularies.load_state",
                expected=f"what state() returned, with maps of {sorted(self._to_rows)}",
                got=f"maps of {sorted(given)}" if given else type(states).__name__,
            )
        pairs = self._with_states(states)
        steps = {int(state.step) for _, state in pairs}
        if len(steps) > 1:
            refuse(
                "vocabularies.load_state",
                expected="maps of one step",
                got=f"steps {sorted(steps)}",
            )
        for map_, state in pairs:
            map_.check_state(state)

    def loaded(self, states: MapStates) -> TableMaps:
        """Return maps of the same tables that have these states, which were checked."""
        made = TableMaps([*self._tables.values()], self._lookahead, self._groups)
        for map_, state in made._with_states(states):
            map_.load_state(state)
        return made

    def _with_states(self, states: MapStates) -> list[tuple[_Map, MapState]]:
        pairs = [(one, states.maps[name]) for name, one in self._to_rows.items()]
        return [
            *pairs,
            *((one, states.ids[name]) for name, one in self._to_ids.items()),
        ]


def _undo(rows: np.ndarray, keys: np.ndarray, taken: Taken) -> None:
    """Change the rows of keys after a step to those before it."""
    rows[np.isin(keys, taken.new_keys)] = -1
    if taken.evicted_keys.size:
        order = np.argsort(taken.evicted_keys)
        evicted = taken.evicted_keys[order]
        at = np.minimum(np.searchsorted(evicted, keys), evicted.size - 1)
        lost = evicted[at] == keys
        rows[lost] = taken.evicted_rows[order][at[lost]]


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
        return {kind: getattr(self, kind).size for kind in kinds} | {
            "unseen": self.unseen
        }


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
        "per_step": {
            name: int(count) / max(1, scores.step) for name, count in totals.items()
        },
        "most_batches": _listed(
            scores.keys, fields, ("batches_seen", "last_seen"), hottest
        ),
        "seen_last": _listed(
            scores.keys, fields, ("last_seen", "batches_seen"), hottest
        ),
        "waiting_most": _listed(
            scores.waiting_keys, {"count": scores.waiting_counts}, ("count",), hottest
        ),
    }


def _listed(
    keys: np.ndarray,
    fields: Mapping[str, np.ndarray],
    order: tuple[str, ...],
    most: int,
) -> list[dict[str, int]]:
    """Return the first keys by some fields, the largest first; among equals, the first one."""
    # The last array of lexsort matters most, so the place among all comes first.
    places = np.arange(keys.size)
    chosen = np.lexsort([places, *(-fields[name] for name in reversed(order))])[:most]
    return [
        {"key": int(keys[i]), **{name: int(array[i]) for name, array in fields.items()}}
        for i in chosen
    ]

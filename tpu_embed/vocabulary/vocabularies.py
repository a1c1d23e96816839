"""The maps from keys to rows of an engine: as batches leave them, and as its newest state has them.

A map (`tpu_embed/vocabulary/`) moves when a training batch is placed. The tables follow later: when
the batch's turn to be trained on has come, `admit` makes the rows of its new keys new. So there are
two steps, both counted in training batches. With two batches placed ahead:

    placed     the maps' step         12      the batches 11 and 12 can still be undone
    admitted   the state's step       10      the rows of the tables are those of this step

A training batch looks up rows of its own step. A batch that is only looked up has the rows of the
admitted step, whatever was placed ahead.

Input: keys and rows of batches, steps of states. Output: rows; or errors about batches and states
that do not belong together (`timeline.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from tpu_embed._checks import message, refuse_pickle
from tpu_embed._signals import SignalsDeferred
from tpu_embed.kernels.vocabulary_reference import MapState, Taken
from tpu_embed.processes import Turns
from tpu_embed.storage import Homes, HostRows, Incoming, Room
from tpu_embed.vocabulary.batch_keys import BatchKeys, MapStates, ValidSteps, map_version
from tpu_embed.vocabulary.config import LivingTable
from tpu_embed.vocabulary.map import VocabularyMap
from tpu_embed.vocabulary.timeline import FOREVER, SHARE, Timeline


class Vocabularies:
    """The maps from keys to rows of all tables whose vocabularies live.

    Engines share them if one is made with the `vocabularies` of the other. Any thread may call any
    method.

    Args:
      tables: the tables.
      lookahead: how many training batches may be admitted before their turn to be updated: rows of
        the `lookahead` batches before a batch are not taken from their keys for it.
      homes: of the tables on the host; None without them.

    Attributes:
      tables: the tables, by name.
      lookahead, homes: see above.
      turns: the order in which training batches are placed.
    """

    def __init__(
        self, tables: Sequence[LivingTable], lookahead: int, homes: Homes | None = None
    ) -> None:
        self.lookahead, self.homes = lookahead, homes
        self.turns = Turns(with_others=jax.process_count() > 1)
        self.tables = {table.name: table for table in tables}
        self._maps = {table.name: self._new_map(table) for table in tables}
        self._timeline = Timeline(tables, lookahead)
        self._counted = {0: self.counters}  # after the admitted step and each later one
        self._lock = threading.RLock()

    def _new_map(self, table: LivingTable) -> VocabularyMap:
        assert table.vocabulary is not None
        return VocabularyMap(table.vocabulary, table.vocabulary_size, self.lookahead)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied, alone or in a model: then there were two histories."""
        remedy = "share the maps, EmbeddingEngine(…, vocabularies=engine.vocabularies), or give "
        remedy += "load_state of another engine's vocabularies what state() returned"
        refuse_pickle("Vocabularies", remedy=remedy)

    def __repr__(self) -> str:
        """Show a line per table: how many of its rows have keys."""
        lines = [f"Vocabularies, {self.placed} batches placed, {self.admitted} admitted"]
        for name, table in self.tables.items():
            lines.append(f"{name}: {len(self._maps[name])} of {table.vocabulary_size} rows")
        return "\n  ".join(lines)

    def __len__(self) -> int:
        """Return how many keys have a row, in all tables."""
        return sum(map(len, self._maps.values()))

    def __bool__(self) -> bool:
        """Return True: there is a table with a living vocabulary, though it may have no key."""
        return True

    # -- what a user asks ----------------------------------------------------------------------

    @property
    def placed(self) -> int:
        """The number of training batches that were placed."""
        return max(map_.step for map_ in self._maps.values())

    @property
    def admitted(self) -> int:
        """The number of training batches that were admitted into a state."""
        return self._timeline.admitted

    @property
    def now(self) -> tuple[int, int]:
        """Step and history of the newest state."""
        return self._timeline.admitted, self._timeline.history

    def at(self, step: int) -> tuple[int, int]:
        """Return step and history of a state that has, or will have, the rows of a step."""
        with self._lock:
            return step, self._timeline.history_of(step)

    def keys(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys of a table, as of the admitted batches, and their rows.

        Returns:
          The keys, uint64 `[n]`, and their rows, int64 `[n]`, ascending by row.

        Raises:
          ValueError: no such table has a living vocabulary.
        """
        found = self.held(name)
        return found.keys, found.rows

    def held(self, name: str) -> MapState:
        """Return what the map of a table knows, as of the admitted batches; see `keys`."""
        with self._lock:
            return self._maps[self._known(name)].state(self.admitted)

    @property
    def counters(self) -> dict[str, dict[str, int]]:
        """Totals by table, of all batches that were placed.

        `keys`, which have a row now; and those that were "admitted"; "evicted" for another key;
        "expired" by their ttl; "unseen", distinct keys without a row, summed over the batches;
        "forgotten", waiting keys that were too many.
        """
        return {name: {"keys": len(one), **one.counters} for name, one in self._maps.items()}

    @property
    def admitted_counters(self) -> dict[str, dict[str, int]]:
        """The same totals, of the batches that were admitted."""
        with self._lock:
            return self._counted[self.admitted]

    @property
    def nbytes(self) -> int:
        """The bytes of the host's memory that the maps take."""
        with self._lock:
            return self._timeline.nbytes + sum(map_.nbytes for map_ in self._maps.values())

    # -- placing -------------------------------------------------------------------------------

    def find(self, name: str, keys: np.ndarray, step: int | None = None) -> np.ndarray:
        """Return the rows of the keys of one table; see `find_all`."""
        return self.find_all({0: (name, keys)}, step)[1][0]

    def find_all(
        self, keys: Mapping[int, tuple[str, np.ndarray]], step: int | None = None
    ) -> tuple[ValidSteps, dict[int, np.ndarray]]:
        """Return the rows of keys as they were after a step; no map changes.

        Args:
          keys: by any number, a table and keys of it, uint64 `[n]`.
          step: one that is not before `admitted`, or that is pinned. None: the present one.

        Returns:
          The states that a batch with these rows may be looked up in; the first one is `admitted`
          if what came after the given step is not known any more. And by number, int32 `[n]`; -1
          for keys without a row.
        """
        with self._lock:
            step = self.placed if step is None else self._timeline.known(step)
            rows = {}
            for number, (name, some) in keys.items():
                rows[number] = self._maps[name].find(some).astype(np.int32)
                self._timeline.take_back(name, rows[number], some, step)
            # Under the same lock: another thread may load maps at once, which begins a history.
            return self._timeline.steps(step, training=False), rows

    def pin(self, turn: int) -> int:
        """Return the admitted step, whose rows can be found until the turn's pin is taken out."""
        with self._lock:
            return self._timeline.pin(turn)

    def unpin(self, turn: int) -> None:
        """Take out the pin of a turn, if there is one."""
        with self._lock:
            self._timeline.unpin(turn)

    def take(self, batch: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, Taken]:
        """Take one training batch in all maps; see `VocabularyMap.take`.

        Args:
          batch: by table, the rows of the known keys, int64 `[k]`, and the unknown keys in batch
            order, uint64 `[m]`.

        Raises:
          ValueError: the rows are of another step, or there were too many steps; no map changes.
        """
        with self._lock:
            step, taken = self.placed, {}
            if step + 1 + self.lookahead >= FOREVER:
                expected, got = f"fewer than {FOREVER} training batches", f"{step + 1}"
                raise ValueError(message("place", expected=expected, got=got))
            try:
                for name, (known, unknown) in batch.items():
                    taken[name] = self._maps[name].take(known, unknown)
                    self._check_room(name, unknown, taken[name])
            except BaseException:
                for map_ in self._maps.values():
                    map_.rewind(step)
                raise
            self._timeline.note_taken(step + 1, taken)
            self._counted[step + 1] = self.counters
        return taken

    def _check_room(self, name: str, unknown: np.ndarray, taken: Taken) -> None:
        """Check that every row of a table on the host has found a place on the devices."""
        table, lost = self.tables[name], taken.rows < 0
        if table.is_on_host and lost.any():
            count = table.vocabulary_size + np.unique(unknown[lost]).size
            batches = "a batch" if not self.lookahead else f"{self.lookahead + 1} batches"
            expected = f"at most {table.vocabulary_size} distinct ids in {batches}"
            remedy = f"give it HostStorage(device_rows={count}) or more, or smaller batches"
            got = f"{count}"
            text = message(f"table {name!r}", expected=expected, got=got, remedy=remedy)
            raise ValueError(text)

    def incoming(
        self, taken: Mapping[str, Taken], rooms: Mapping[str, Room]
    ) -> dict[str, Incoming]:
        """Return the rows from home that a batch just taken brings, by table: read to the rooms."""
        if self.homes is None:
            return {}
        with self._lock:
            before = self._timeline.leaving(self.placed - 1)
        return {
            name: self.homes.fetch(name, taken[name].new_keys, before[name], rooms[name])
            for name in self.homes.tables
        }

    def undo(self, step: int) -> None:
        """Undo the batches placed after a step, as if they had never been placed.

        Raises:
          ValueError: one of them was admitted, or is not known any more.
        """
        with self._lock:
            if step < self.admitted:
                expected = f"a step of at least {self.admitted}, which is admitted"
                raise ValueError(message("vocabularies", expected=expected, got=f"{step}"))
            for map_ in self._maps.values():
                map_.rewind(step)
            self._timeline.undo(step)
            self._counted = {at: counted for at, counted in self._counted.items() if at <= step}

    def steps(self, first: int, *, training: bool) -> ValidSteps:
        """Return the states that a batch may be looked up in; see `Timeline.steps`."""
        with self._lock:
            return self._timeline.steps(first, training=training)

    # -- states --------------------------------------------------------------------------------

    def check(self, now: tuple[int, int], steps: ValidSteps, keys: BatchKeys) -> None:
        """Check that a batch may be looked up in a state; see `Timeline.check`."""
        with self._lock:
            self._timeline.check(now, steps, keys)

    def check_next(self, now: tuple[int, int], keys: BatchKeys) -> ValidSteps:
        """Check that a training batch is the next one that a state admits; return its steps."""
        with self._lock:
            return self._timeline.check_next(now, keys)

    def check_newest(self, state: Any) -> None:
        """Check that a state has the step and the history of the maps.

        Raises:
          ValueError: it has another one.
        """
        if map_version(state) != self.now:
            expected = f"the newest state, of step {self.admitted} of these maps"
            remedy = f"restore a checkpoint, which has maps and tables of one step; {SHARE}"
            got = f"one of step {map_version(state)[0]}, of other maps, or from before a load"
            raise ValueError(message("state", expected=expected, got=got, remedy=remedy))

    def is_current(self, batch: Any) -> bool:
        """Return whether a placed batch can still be admitted, or looked up, with these maps."""
        with self._lock:
            return self._timeline.is_current(ValidSteps(*batch.valid_steps.tolist()), batch.keys)

    def note_admitted(self, step: int) -> None:
        """Note that a state has the rows of a step; what came before cannot be undone any more."""
        with self._lock:
            self._counted.pop(self.admitted)
            self._timeline.note_admitted(step)
            for map_ in self._maps.values():
                map_.forget(step)

    def rewind(self, state: Any) -> None:
        """Take the maps back to the step of a state: batches placed since are as if never placed.

        Args:
          state: the newest state, or one that `init` made, with which all keys are forgotten.

        Raises:
          ValueError: later batches were admitted into another state.
        """
        self.turns.run_next(lambda: self._rewind(state))

    def _rewind(self, state: Any) -> None:
        step, history = map_version(state)
        with self._lock, SignalsDeferred():
            first = 0, self._timeline.first_history
            if (step, history) == first and self.now != first:
                empty = {name: self._new_map(table).state() for name, table in self.tables.items()}
                self._load(MapStates(history, empty), {})
                return
            self.check_newest(state)
            self.undo(step)

    # -- kept ----------------------------------------------------------------------------------

    def state(self, step: int | None = None) -> MapStates:
        """Return all maps after a step, as arrays that a checkpoint can keep.

        Args:
          step: of the state that is kept beside them; None: the admitted one.

        Raises:
          ValueError: the maps no longer know that step, or there are tables on the host.
        """
        self._refuse_homes("state")
        return self.states(step)

    def states(self, step: int | None = None) -> MapStates:
        """Return what `state` does, for those who keep the rows at home, too."""
        with self._lock:
            at = self.admitted if step is None else step
            history = self._timeline.history_of(at)
            return MapStates(history, {n: m.state(at) for n, m in self._maps.items()})

    def load_state(self, states: MapStates) -> None:
        """Replace all maps; batches placed before are refused from now on.

        The state of the tables that belongs to them has the same step and history.

        Args:
          states: what `state` returned; of other capacities, `tpu_embed.io.restore` fits them.

        Raises:
          ValueError: other tables, or states that maps of these capacities cannot have; nothing
            changes then. There are tables on the host.
        """
        self._refuse_homes("load_state")
        self.load_states(states, None)

    def load_states(self, states: MapStates, rows: Mapping[str, HostRows] | None) -> None:
        """Replace all maps, and the rows at home, by table on the host (None without them)."""
        self.turns.run_next(lambda: self._load(states, rows or {}))

    def _refuse_homes(self, what: str) -> None:
        """Refuse to keep maps without the rows that are at home."""
        if self.homes is not None:
            expected = "living vocabularies alone"
            got = f"tables on the host {[*self.homes.tables]}"
            remedy = "tpu_embed.io.save keeps maps, rows at home and rows on the devices together"
            text = message(f"vocabularies.{what}", expected=expected, got=got, remedy=remedy)
            raise ValueError(text)

    @property
    def first_history(self) -> int:
        """The history of states without keys, as `init` makes them."""
        return self._timeline.first_history

    def _load(self, states: MapStates, rows: Mapping[str, HostRows]) -> None:
        maps = states.maps if isinstance(states, MapStates) else {}
        if maps.keys() != self._maps.keys():
            expected = f"what state() returned, with maps of {sorted(self._maps)}"
            got = f"maps of {sorted(maps)}" if maps else type(states).__name__
            raise ValueError(message("vocabularies.load_state", expected=expected, got=got))
        steps = {int(one.step) for one in states.maps.values()}
        if len(steps) > 1:
            expected, got = "maps of one step", f"steps {sorted(steps)}"
            raise ValueError(message("vocabularies.load_state", expected=expected, got=got))
        for name, map_ in self._maps.items():
            map_.check_state(maps[name])
        with self._lock, SignalsDeferred():
            if self.homes is not None:
                self.homes.replace(rows)
            for name, map_ in self._maps.items():
                map_.load_state(maps[name])
            self._timeline.load(steps.pop(), states.history)
            self._counted = {self.admitted: self.counters}

    def _known(self, name: str) -> str:
        if name not in self._maps:
            expected = f"one of {sorted(self._maps)}, whose vocabularies live"
            raise ValueError(message("table", expected=expected, got=repr(name)))
        return name

"""The living vocabularies of an engine: what its batches have made of them, and what its state has.

A map (`tpu_embed/vocabulary/`) moves when a training batch is placed. The tables follow later: when
the batch's turn to be trained on has come, `admit` makes the rows of its new keys new. So there are
two steps, both counted in training batches. With two batches placed ahead:

    placed     the maps' step         12      the batches 11 and 12 can still be undone
    admitted   the state's step       10      the rows of the tables are those of this step

A training batch looks up rows of its own step. A batch that is only looked up has the rows of the
admitted step, whatever was placed ahead.

Input: keys and rows of batches, steps of states. Output: rows; or errors about batches and states
that do not belong together.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from tpu_embed._checks import message, refuse_pickle
from tpu_embed.core.batch.steps import Admission, MapStates, Steps, steps_of, undo
from tpu_embed.core.batch.turns import Turns
from tpu_embed.core.layout import TableSlice
from tpu_embed.vocabulary import Taken, VocabularyMap

__all__ = ["Vocabularies"]

FOREVER = 2**31 - 1
"""The last step of a batch whose rows are never taken from their keys."""


class Vocabularies:
    """The maps from keys to rows of all tables whose vocabularies live.

    Engines share them if one is made with the `vocabularies` of the other. Any thread may call any
    method.

    Args:
      tables: the tables.
      lookahead: how many training batches may be admitted before their turn to be updated: rows of
        the `lookahead` batches before a batch are not taken from their keys for it.

    Attributes:
      tables: the tables, by name.
      lookahead: see above.
      turns: the order in which training batches are placed.
    """

    def __init__(self, tables: Sequence[TableSlice], lookahead: int) -> None:
        self.lookahead = lookahead
        self.turns = Turns(with_others=jax.process_count() > 1)
        self.tables = {table.name: table for table in tables}
        self._maps = {table.name: self._new_map(table) for table in tables}
        # The step at which each row was last given to a key or taken from one, as of `admitted`.
        self._changed = {t.name: np.zeros(t.vocabulary_size, np.int32) for t in tables}
        self._placed: dict[int, dict[str, Taken]] = {}  # steps after `admitted`
        self._counted = {0: self.counters}  # after `admitted` and each later step
        self._admitted = self._history = self._last_history = 0
        self._lock = threading.RLock()

    def _new_map(self, table: TableSlice) -> VocabularyMap:
        assert table.vocabulary is not None
        return VocabularyMap(table.vocabulary, table.vocabulary_size, self.lookahead)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied, alone or in a model: then there were two histories."""
        remedy = "share the maps, EmbeddingEngine(…, vocabularies=engine.vocabularies), or give "
        remedy += "load_state of another engine's vocabularies what state() returned"
        refuse_pickle("Vocabularies", remedy=remedy)

    def __repr__(self) -> str:
        """Show a line per table: how many of its rows have keys."""
        lines = [f"Vocabularies, {self.placed} batches placed, {self._admitted} admitted"]
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
        return self._admitted

    @property
    def now(self) -> tuple[int, int]:
        """Step and history of the newest state."""
        return self._admitted, self._history

    def keys(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys of a table, as of the admitted batches, and their rows.

        Args:
          name: the table.

        Returns:
          The keys, uint64 `[n]`, and their rows, int64 `[n]`, ascending by row.

        Raises:
          ValueError: no such table has a living vocabulary.
        """
        with self._lock:
            found = self._maps[self._known(name)].state(self._admitted)
        return found.keys, found.rows

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
            return self._counted[self._admitted]

    @property
    def nbytes(self) -> int:
        """The bytes of the host's memory that the maps take."""
        with self._lock:
            changed = sum(array.nbytes for array in self._changed.values())
        return changed + sum(map_.nbytes for map_ in self._maps.values())

    # -- placing -------------------------------------------------------------------------------

    def find(self, name: str, keys: np.ndarray, step: int | None = None) -> np.ndarray:
        """Return the rows of keys as they were after a step; no map changes.

        Args:
          name: the table.
          keys: uint64 `[n]`.
          step: one that is not before `admitted`; None: the present one.

        Returns:
          int32 `[n]`; -1 for keys without a row.
        """
        with self._lock:
            rows = self._maps[name].find(keys).astype(np.int32)
            for after in sorted(self._placed, reverse=True):
                if step is not None and after > step:
                    undo(rows, keys, self._placed[after][name])
        return rows

    def take(self, batch: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, Taken]:
        """Take one training batch in all maps; see `VocabularyMap.take`.

        Args:
          batch: by table, the rows of the known keys and the unknown keys in batch order.
        """
        with self._lock:
            step, taken = self.placed, {}
            try:
                for name, (known, unknown) in batch.items():
                    taken[name] = self._maps[name].take(known, unknown)
            except BaseException:
                for map_ in self._maps.values():
                    map_.rewind(step)
                raise
            self._placed[step + 1], self._counted[step + 1] = taken, self.counters
        return taken

    def undo(self, step: int) -> None:
        """Undo the batches placed after a step, as if they had never been placed.

        Raises:
          ValueError: one of them was admitted, or is not known any more.
        """
        with self._lock:
            if step < self._admitted:
                expected = f"a step of at least {self._admitted}, which is admitted"
                raise ValueError(message("vocabularies", expected=expected, got=f"{step}"))
            for map_ in self._maps.values():
                map_.rewind(step)
            self._placed = {at: taken for at, taken in self._placed.items() if at <= step}
            self._counted = {at: counted for at, counted in self._counted.items() if at <= step}

    def undo_last(self, batch: Any) -> None:
        """Undo a training batch, unless others were placed since: they stay as they are."""
        with self.turns.use(self.turns.draw()), self._lock:
            if batch.steps[0] == self.placed and self.is_current(batch):
                self.undo(self.placed - 1)

    def steps(self, first: int, *, training: bool) -> Steps:
        """Return the states that a batch may be looked up in.

        Args:
          first: the step of the batch.
          training: whether it is one of the batches whose rows are protected.
        """
        options = [table.vocabulary for table in self.tables.values()]
        keep = all(one is not None and one.evict == "none" and one.ttl is None for one in options)
        last = first + self.lookahead if training else first
        return Steps(first, FOREVER if keep else last, self._history)

    # -- states --------------------------------------------------------------------------------

    def check(self, now: tuple[int, int], steps: Steps, admission: Admission) -> None:
        """Check that a batch may be looked up in a state.

        Args:
          now: the step and the history of the state; the step may have been placed only.
          steps: of the batch.
          admission: of the batch.

        Raises:
          ValueError: the batch is not admitted, or was placed before rows of its were given to
            other keys.
        """
        step, history = now
        if history != steps.history:
            _refuse(expected="one placed since the maps were loaded", got="one placed before")
        if step < steps.first:
            expected = f"one of a step up to {step}, which the state has admitted"
            remedy = "give every batch to admit first, in the order in which they were placed"
            _refuse(expected=expected, got=f"one of step {steps.first}", remedy=remedy)
        if step > steps.last and not self._untouched(steps.first, step, admission):
            expected = f"one whose rows still belong to its keys at step {step}"
            got = f"one of step {steps.first}, which has rows that may be other keys' now"
            remedy = "place it again; training batches are updated at most `lookahead` admits later"
            _refuse(expected=expected, got=got, remedy=remedy)

    def check_next(self, now: tuple[int, int], steps: Steps, admission: Admission) -> None:
        """Check that a training batch is the next one that a state admits.

        Raises:
          ValueError: it is another one, or was placed before the maps were rewound or loaded.
        """
        step, history = now
        if steps.first != step + 1 or step != self._admitted:
            expected = f"the batch of step {step + 1}, which the state comes to next"
            got = f"the one of step {steps.first}"
            if step != self._admitted:
                got += f", and a state of step {step} while {self._admitted} was admitted before"
            remedy = "admit each training batch once, in the order in which they were placed; "
            remedy += "engine.vocabularies.rewind(state) forgets batches that were thrown away"
            _refuse(expected=expected, got=got, remedy=remedy)
        # Another batch may have been placed at this step since.
        if history != steps.history or not self._holds(steps.first, admission):
            _refuse(expected="one placed since the maps were rewound or loaded", got="one before")

    def check_newest(self, state: Any) -> None:
        """Check that a state has the step and the history of the maps.

        Raises:
          ValueError: it has another one.
        """
        if steps_of(state) != self.now:
            expected = f"the newest state, of step {self._admitted}"
            remedy = "restore a checkpoint, which has maps and tables of one step"
            got = f"one of step {steps_of(state)[0]}, or from before the maps were loaded"
            raise ValueError(message("state", expected=expected, got=got, remedy=remedy))

    def is_current(self, batch: Any) -> bool:
        """Tell whether a placed batch belongs to what the maps are now."""
        steps, admission = Steps(*batch.steps.tolist()), batch.admission
        known = steps.history == self._history
        return known and (not admission.is_training or self._holds(steps.first, admission))

    def note_admitted(self, step: int) -> None:
        """Note that a state has the rows of a step; what came before cannot be undone any more."""
        with self._lock:
            for name, taken in self._placed.pop(step).items():
                self._changed[name][taken.evicted_rows] = step
                self._changed[name][taken.new_rows] = step
                self._maps[name].forget(step)
            self._counted.pop(self._admitted)
            self._admitted = step

    def rewind(self, state: Any) -> None:
        """Take the maps back to the step of a state: batches placed since are as if never placed.

        Args:
          state: the newest state, or one that `init` made, with which all keys are forgotten.

        Raises:
          ValueError: later batches were admitted into another state.
        """
        step, history = steps_of(state)
        with self.turns.use(self.turns.draw()), self._lock:
            if step == 0 and self._admitted:
                empty = {name: self._new_map(table).state() for name, table in self.tables.items()}
                self._load(MapStates(history, empty))
                return
            self.check_newest(state)
            self.undo(step)

    # -- kept ----------------------------------------------------------------------------------

    def state(self, step: int | None = None) -> MapStates:
        """Return all maps after a step, as arrays that a checkpoint can keep.

        Args:
          step: of the state that is kept beside them; None: the admitted one.

        Raises:
          ValueError: the maps no longer know that step.
        """
        with self._lock:
            at = self._admitted if step is None else step
            return MapStates(self._history, {n: m.state(at) for n, m in self._maps.items()})

    def load_state(self, states: MapStates) -> None:
        """Replace all maps; batches placed before are refused from now on.

        The state of the tables that belongs to them has the same step and history.

        Args:
          states: what `state` returned; of other capacities, `tpu_embed.io.restore` fits them.

        Raises:
          ValueError: other tables, or states that maps of these capacities cannot have; nothing
            changes then.
        """
        with self.turns.use(self.turns.draw()), self._lock:
            self._load(states)

    @property
    def next_history(self) -> int:
        """A number that no history has had."""
        return self._last_history + 1

    def _load(self, states: MapStates) -> None:
        maps = states.maps if isinstance(states, MapStates) else {}
        if maps.keys() != self._maps.keys():
            expected = f"what state() returned, with maps of {sorted(self._maps)}"
            got = f"maps of {sorted(maps)}" if maps else type(states).__name__
            raise ValueError(message("vocabularies.load_state", expected=expected, got=got))
        steps = {int(one.step) for one in states.maps.values()}
        if len(steps) > 1:
            expected, got = "maps of one step", f"steps {sorted(steps)}"
            raise ValueError(message("vocabularies.load_state", expected=expected, got=got))
        before = {name: map_.state() for name, map_ in self._maps.items()}
        try:
            for name, map_ in self._maps.items():
                map_.load_state(states.maps[name])
        except ValueError:
            for name, map_ in self._maps.items():
                map_.load_state(before[name])
            raise
        (self._admitted,), self._history, self._placed = steps, states.history, {}
        self._counted = {self._admitted: self.counters}
        self._last_history = max(self._last_history, self._history)
        for changed in self._changed.values():
            changed.fill(self._admitted)

    def _known(self, name: str) -> str:
        if name not in self._maps:
            expected = f"one of {sorted(self._maps)}, whose vocabularies live"
            raise ValueError(message("table", expected=expected, got=repr(name)))
        return name

    def _holds(self, step: int, admission: Admission) -> bool:
        """Tell whether the maps have taken exactly this batch at a step that is not admitted."""
        with self._lock:
            placed = self._placed.get(step, {})
        taken = admission.taken
        return bool(taken) and all(placed.get(name) is one for name, one in taken.items())

    def _untouched(self, first: int, last: int, admission: Admission) -> bool:
        """Tell whether no row of a batch was given or taken in (first, last], if that is known."""
        if admission.tables is None:
            return False
        with self._lock:
            placed = [taken for step, taken in self._placed.items() if step <= last]
            return all(
                not (self._changed[name][rows[rows >= 0]] > first).any()
                and not any(np.isin(rows, taken[name].evicted_rows).any() for taken in placed)
                for name, one in admission.tables.items()
                for rows in one.rows
            )


def _refuse(*, expected: str, got: str, remedy: str = "") -> NoReturn:
    raise ValueError(message("batch", expected=expected, got=got, remedy=remedy))

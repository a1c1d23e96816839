"""Which batches and which states belong together, while maps from keys to rows move on.

Steps count training batches. Steps are placed, then admitted; placed ones can be undone and placed
anew. When maps are loaded, steps are counted on from another number, and the batches that follow
belong to another history than those from before, whatever their steps. So the states of a training
run, with one load in between, have for example

    step       0  1  2  3     2  3  4
    history    7  7  7  7     7  9  9      the maps of step 2 were loaded after step 3

The maps of another engine have other histories, so that its states and batches are not taken for
those of these maps.

Input: what maps did with batches; steps of batches and states. Output: whether a batch may be
looked up in a state; and the rows of keys as they were at a step. Nothing here locks.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from tpu_embed._checks import refuse
from tpu_embed.vocabulary.batch_keys import BatchKeys, ValidSteps, new_history
from tpu_embed.vocabulary.config import LivingTable
from tpu_embed.vocabulary.table_maps import Moves

SHARE_MAPS = (
    "engines that use each other's states or batches share their maps: EmbeddingEngine(…, "
    "vocabularies=other.vocabularies); a batch from before a load is placed again"
)
FOREVER = 2**31 - 1
"""The last step of a batch whose rows are never taken from their keys."""


class Pin:
    """A step whose rows can be found while this is held.

    Attributes:
      step: see above.
    """

    def __init__(self, step: int) -> None:
        self.step = step


class Timeline:
    """The steps of all maps of an engine.

    Args:
      tables: those with dynamic vocabularies.
      lookahead: as for `Vocabularies`.

    Attributes:
      admitted: the step of the newest state.
      history: the history of that state.
      first_history: the history of states without keys, as `init` makes them.
    """

    def __init__(self, tables: Sequence[LivingTable], lookahead: int) -> None:
        self._lookahead = lookahead
        options = [table.vocabulary for table in tables]
        self._keeps = all(
            x is not None and x.evict == "none" and x.ttl is None for x in options
        )
        # The step at which each row was last given to a key or taken from one, as of `admitted`.
        self._changed = {t.name: np.zeros(t.vocabulary_size, np.int32) for t in tables}
        self._placed: dict[int, Moves] = {}  # after `admitted`
        self._past: dict[int, Moves] = {}  # up to `admitted`, after the first pin
        self._pins: weakref.WeakSet[Pin] = weakref.WeakSet()
        self.admitted = 0
        self.first_history = self.history = self._following = new_history()

    @property
    def nbytes(self) -> int:
        """The bytes of the host's memory that are in proportion to the rows."""
        return sum(array.nbytes for array in self._changed.values())

    @property
    def placed(self) -> int:
        """The step of the batch that was placed last."""
        return max(self._placed, default=self.admitted)

    # -- what happens --------------------------------------------------------------------------

    def note_taken(self, step: int, moves: Moves) -> None:
        """Note what the maps did with the training batch of a step."""
        self._placed[step] = moves

    def leaving(self, step: int) -> dict[str, list[tuple[int, np.ndarray]]]:
        """Return the keys that placed batches up to a step take rows from, by table and step."""
        placed = [(at, moves.taken) for at, moves in self._placed.items() if at <= step]
        return {
            name: [(at, one[name].evicted_keys) for at, one in placed]
            for name in self._changed
        }

    def undo(self, step: int) -> None:
        """Forget the batches placed after a step, none of which is admitted."""
        self._placed = {at: moves for at, moves in self._placed.items() if at <= step}

    def note_admitted(self, step: int) -> Moves:
        """Note that the newest state has the rows of a step, the one after `admitted`.

        Returns:
          What the maps did for it.
        """
        moves = self._placed[step]
        for name, taken in moves.taken.items():
            self._changed[name][taken.evicted_rows] = step
            self._changed[name][taken.new_rows] = step
        for name, owners in moves.owners.items():
            self._changed[name][owners.rows[owners.rows >= 0]] = step
        placed = {at: one for at, one in self._placed.items() if at != step}
        past = {**self._past, step: moves}
        # One call of C, which no interrupt cuts in two; what is above may be done again.
        vars(self).update(
            _placed=placed, _past=past, admitted=step, history=self._following
        )
        first = min((pin.step for pin in self._pins), default=self.admitted)
        self._past = {at: one for at, one in self._past.items() if at > first}
        return moves

    def loaded(self, step: int, history: int) -> Timeline:
        """Return a timeline that goes on from another step; batches placed before are not of it.

        Args:
          step: the step of the newest state then.
          history: its history; what is placed from then on belongs to a new one.
        """
        made = copy.copy(self)  # with the pins, whichever maps they look at
        made._following = new_history()
        made.admitted, made.history = step, history
        made._placed, made._past = {}, {}
        made._changed = {
            name: np.full_like(one, step) for name, one in self._changed.items()
        }
        return made

    # -- rows at a step ------------------------------------------------------------------------

    def pin(self) -> Pin:
        """Return `admitted`, and keep what is needed to find its rows while that is held."""
        pin = Pin(self.admitted)
        self._pins.add(pin)
        return pin

    def known(self, step: int) -> int:
        """Return a step, or `admitted` if what was done after the step is not known any more."""
        reached = all(at in self._past for at in range(step + 1, self.admitted + 1))
        return min(step, self.placed) if reached else self.admitted

    def after(self, step: int) -> list[Moves]:
        """Return what the maps did after a step, the latest first."""
        every = {**self._past, **self._placed}
        return [every[at] for at in sorted(every, reverse=True) if at > step]

    # -- batches and states --------------------------------------------------------------------

    def history_of(self, step: int) -> int:
        """Return the history of `admitted` or a later step."""
        return self.history if step <= self.admitted else self._following

    def steps(self, first: int, *, training: bool) -> ValidSteps:
        """Return the states that a batch may be looked up in.

        Args:
          first: the step of the batch.
          training: whether it is one of the batches whose rows are protected.
        """
        last = first + self._lookahead if training else first
        return ValidSteps(
            first, FOREVER if self._keeps else last, self.history_of(first)
        )

    def check(self, now: tuple[int, int], steps: ValidSteps, keys: BatchKeys) -> None:
        """Check that a batch may be looked up in a state.

        Args:
          now: the step and the history of the state; the step may have been placed only.
          steps: of the batch.
          keys: of the batch.

        Raises:
          ValueError: the batch is not admitted, or was placed before some of its rows were given to
            other keys.
        """
        step, history = now
        remedy = (
            "give every batch to admit first, in the order in which they were placed"
        )
        if keys.is_training:
            _refuse(
                expected="an admitted batch",
                got="one that was only placed",
                remedy=remedy,
            )
        if history != steps.history:
            expected = (
                "one placed since the maps were loaded, by an engine that shares them"
            )
            _refuse(
                expected=expected,
                got="one placed before, or of other maps",
                remedy=SHARE_MAPS,
            )
        if step < steps.first:
            expected = f"one of a step up to {step}, which the state has admitted"
            _refuse(expected=expected, got=f"one of step {steps.first}", remedy=remedy)
        # Whether the state is, was or will be one of these maps, as they are loaded now.
        known = step <= self.placed and history == self.history_of(step)
        if step > steps.last and not (
            known and self._untouched(steps.first, step, keys)
        ):
            expected = f"one whose rows still belong to its keys at step {step}"
            got = (
                f"one of step {steps.first}, which has rows that may be other keys' now"
            )
            remedy = "place it again; training batches are updated at most `lookahead` admits later"
            _refuse(expected=expected, got=got, remedy=remedy)

    def check_next(self, now: tuple[int, int], keys: BatchKeys) -> ValidSteps:
        """Check that a training batch is the next one that a state admits.

        Args:
          now: the step and the history of the state.
          keys: of the batch.

        Returns:
          The steps of the batch.

        Raises:
          ValueError: it is another one, or was placed before the maps were rewound or loaded; or
            the state is not the newest one.
        """
        steps, (step, history) = keys.steps, now
        assert steps is not None, "a training batch has them"
        if history not in (self.history, self._following):
            expected = "a state of these maps, as they are loaded now"
            _refuse(
                expected=expected,
                got="one of other maps, or from before",
                remedy=SHARE_MAPS,
            )
        if steps.first != step + 1 or step != self.admitted:
            expected = f"the batch of step {step + 1}, which the state comes to next"
            got = f"the one of step {steps.first}"
            if step != self.admitted:
                got += f", and a state of step {step} while {self.admitted} was admitted before"
            remedy = "admit each training batch once, in the order in which they were placed; "
            remedy += "engine.vocabularies.rewind(state) forgets batches that were thrown away; "
            remedy += "two Prefetchers of one engine place ahead of each other, so their batches "
            remedy += "cannot be taken in turns: give one Prefetcher both sources, interleaved"
            _refuse(expected=expected, got=got, remedy=remedy)
        # Another batch may have been placed at this step since.
        if history != self.history or not self._holds(keys):
            expected = "one placed since the maps were rewound or loaded, by an engine that shares "
            expected += "them"
            _refuse(
                expected=expected,
                got="one placed before, or of other maps",
                remedy=SHARE_MAPS,
            )
        return steps

    def is_current(self, steps: ValidSteps, keys: BatchKeys) -> bool:
        """Return whether a placed batch can still be admitted, or looked up."""
        if keys.is_training:
            return self._holds(keys)
        return steps.history == self.history_of(steps.first)

    def _holds(self, keys: BatchKeys) -> bool:
        """Return whether the maps have taken exactly this batch at a step that is not admitted."""
        assert keys.steps is not None, "a training batch has them"
        placed = self._placed.get(keys.steps.first)
        return placed is not None and all(
            placed.taken.get(name) is one for name, one in keys.taken.items()
        )

    def _untouched(self, first: int, last: int, keys: BatchKeys) -> bool:
        """Return whether no row of a batch was given or taken in (first, last], if it is known."""
        if keys.tables is None:
            return False
        placed = [moves for step, moves in self._placed.items() if step <= last]
        lost = {
            name: [
                *(moves.taken[name].evicted_rows for moves in placed),
                *(moves.owners[name].rows for moves in placed if name in moves.owners),
            ]
            for name in keys.tables
        }
        return all(
            # A row that came from home with the batch is not followed any further.
            not (one.visits and (rows < 0).any())
            and not (self._changed[name][rows[rows >= 0]] > first).any()
            and not any(np.isin(rows, some).any() for some in lost[name])
            for name, one in keys.tables.items()
            for rows in one.rows
        )


def _refuse(*, expected: str, got: str, remedy: str = "") -> NoReturn:
    refuse("batch", expected=expected, got=got, remedy=remedy)

"""Read a source of batches one by one, place each, and remember how far the source has been read.

Input: turns. Output: placed batches, each with the state of the source after it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

from tpu_embed._checks import message
from tpu_embed.core.place import Turn
from tpu_embed.data.items import ItemRules


@runtime_checkable
class Stateful(Protocol):
    """An iterator that knows its position, as grain's iterators do."""

    def get_state(self) -> Any:
        """Return the position."""

    def set_state(self, state: Any) -> None:
        """Continue from a position."""


class Placed(NamedTuple):
    """A placed batch.

    Attributes:
      item: what the loop gets.
      source_state: the state of the source after the batch; None if it has no states.
      shapes: those that batches get after it, as JSON; None if no feature is jagged.
    """

    item: Any
    source_state: Any
    shapes: Any = None


class Feed:
    """The thread's part: reads items, and places them.

    Args:
      engine: places them.
      source: yields items.
      rules: how they are placed.
      skipped: how many items to read and leave out first.
    """

    def __init__(self, engine: Any, source: Iterator[Any], rules: ItemRules, skipped: int) -> None:
        self._engine, self._source, self._rules = engine, source, rules
        self._number = self._skipped = skipped

    def place_next(self, turn: Turn) -> Placed | None:
        """Return the next batch, placed in its turn; None if there are no more in any process.

        Raises:
          ValueError: there are more in another process.
          Exception: what the source or `place` raises.
        """
        with turn.hold():
            return self._place_next(turn)

    def _place_next(self, turn: Turn) -> Placed | None:
        """Do what `place_next` does, in a thread that holds the turn."""
        self._number += 1
        try:
            item = self._rules.take_apart(self._read())
            source_state = state_of(self._source)
        except StopIteration:
            turn.end()
            return None
        except BaseException as error:
            turn.refuse(error)
            raise
        try:
            batch = turn.place(item.features, item.weights, self._rules.spec)
            placed = item.around(batch, self._engine)
        except Exception as error:
            error.add_note(f"This was batch {self._number} of the source.")
            raise
        return Placed(placed, source_state, turn.shapes)

    def _read(self) -> Any:
        """Return the next item, after those that are left out."""
        wanted, self._skipped = self._skipped, 0
        found = sum(1 for _ in itertools.islice(self._source, wanted))
        if found < wanted:
            expected, remedy = f"{wanted} batches before the next one", "give the same data again"
            raise ValueError(message("the data", expected=expected, got=str(found), remedy=remedy))
        return next(self._source)


def state_of(source: Iterator[Any]) -> Any:
    """Return a copy of the source's state; None if it has no states."""
    # A source may return the object that it will change when it is read again.
    return copy.deepcopy(source.get_state()) if isinstance(source, Stateful) else None

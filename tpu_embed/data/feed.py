"""Read a source of batches one by one, place each, and remember how far the source has been read.

Input: items. Output: placed batches, each with the state of the source after it.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

from tpu_embed._checks import message
from tpu_embed.data.items import ItemRules
from tpu_embed.vocabulary import Pin


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
      number: of the batch, counted from 1; 0 before the first.
      source_state: the state of the source after it; None if it has no states.
      shapes: those that batches get after it, as JSON; None if no feature is jagged.
      item: what the loop gets; None once it has got it.
    """

    number: int
    source_state: Any
    shapes: Any
    item: Any = None


class Feed:
    """The work of a prefetcher's thread: it reads items, and places them.

    Args:
      engine: places them.
      source: yields items.
      rules: how they are placed.
      before: how many batches were taken before.
    """

    def __init__(self, engine: Any, source: Iterator[Any], rules: ItemRules, before: int) -> None:
        self._engine, self._source, self._rules = engine, source, rules
        self._intake = engine.intake
        self._others = self._intake.agreements["update" if rules.training else "lookup"]
        self._number = before
        # Where the source cannot be set to a position, so many items are read and left out first.
        self._skipped = 0 if isinstance(source, Stateful) else before
        # A lookup has the rows of the moment at which the loop asked for it.
        self.pin = (lambda: None) if rules.training else self._intake.pin

    def compute(self, pin: Pin | None) -> Placed | None:
        """Return the next batch, placed; None if there are no more in any process.

        Raises:
          ValueError: there are more in another process.
          Exception: what the source or `place` raises.
        """
        self._number += 1
        try:
            item = self._rules.take_apart(self._read())
            source_state = state_of(self._source)
        except StopIteration:
            self._others.end()
            return None
        except BaseException as error:
            self._others.refuse(error)
            raise
        try:
            batch = self._intake.place_ids(
                item.features,
                item.weights,
                self._rules.spec,
                training=self._rules.training,
                step=pin and pin.step,
            )
            placed = item.around(batch, self._engine)
        except Exception as error:
            error.add_note(f"This was batch {self._number} of the source.")
            raise
        return Placed(self._number, source_state, self._intake.shapes(), placed)

    def leave(self, reason: BaseException | None) -> None:
        """Tell the other processes that there are no more batches, or why."""
        # If they have a batch, or have left, their loops raise it.
        with contextlib.suppress(Exception):
            self._others.end(reason)

    def _read(self) -> Any:
        """Return the next item, after those that are left out."""
        wanted, self._skipped = self._skipped, 0
        found = sum(1 for _ in itertools.islice(self._source, wanted))
        if found < wanted:
            raise ValueError(
                message(
                    "the data",
                    expected=f"{wanted} batches before the next one",
                    got=found,
                    remedy="give the same data again",
                )
            )
        return next(self._source)


def state_of(source: Iterator[Any]) -> Any:
    """Return a copy of the source's state; None if it has no states."""
    # A source may return the object that it will change when it is read again.
    return copy.deepcopy(source.get_state()) if isinstance(source, Stateful) else None

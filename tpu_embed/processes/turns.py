"""The order in which several processes place the batches of one engine.

Placing a batch is a conversation between all processes, so all must place their batches in the
same order. Threads that place ahead cannot promise that by themselves: which of two threads comes
first differs from process to process. So a turn is drawn where the program runs in the same order
everywhere, in the user's loop, and used later in any thread. A turn waits until all turns drawn
before it have ended:

    the user's loop      draws 0     draws 1     places an evaluation batch: draws 2, waits for 1
    a prefetching thread        uses 0     uses 1

Input: a call of `draw` per batch, in the order in which batches are to be placed. Output: numbers,
and the permission to go on, in that order.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax

from tpu_embed._changes import Changes
from tpu_embed._checks import message
from tpu_embed._signals import SignalsDeferred

_T = TypeVar("_T")


class Turns:
    """Gives out numbers, and lets their holders act in the order of the numbers.

    Args:
      with_others: whether the holders talk to other processes: then a wait that was interrupted
        has put this process out of step, and no turn can be used any more.
    """

    def __init__(self, *, with_others: bool = True) -> None:
        self._with_others = with_others
        self._changed = Changes()
        self._drawn = 0
        self._current = 0
        # Turns after the current one that ended early, because their batches will not come.
        self._ended: set[int] = set()
        # By turn, the thread that is about to use it.
        self._held: dict[int, int] = {}
        self._interrupted = False

    def draw(self) -> int:
        """Return the number of the next turn, which must be used or released."""
        with self._changed.lock:
            number, self._drawn = self._drawn, self._drawn + 1
            return number

    @contextlib.contextmanager
    def hold(self, number: int) -> Iterator[None]:
        """Note that this thread will use a turn before the block ends.

        Within the block it can wait for no later turn, which would come only after this one.
        """
        with self._changed.lock:
            self._held[number] = threading.get_ident()
        try:
            yield
        finally:
            with self._changed.lock:
                self._held.pop(number, None)

    @contextlib.contextmanager
    def use(self, number: int) -> Iterator[None]:
        """Wait for this turn; it ends with the block.

        Raises:
          RuntimeError: the turn has ended; or this thread holds an earlier one; or the wait for an
            earlier turn was interrupted, so this process has left out a batch that the others
            place.
        """
        try:
            self._wait(number)
            yield
        finally:
            self.release(number)

    def run_next(self, run: Callable[[], _T]) -> _T:
        """Draw a turn, wait for it and return `run()`; the turn ends with that, or with an error.

        An interrupt, wherever it comes, leaves no turn behind for which later ones would wait. The
        manager of a `with` block can be lost before its block begins; a function cannot.

        Raises:
          RuntimeError: as for `use`.
        """
        number = None
        try:
            with SignalsDeferred():
                number = self.draw()
            self._wait(number)
            return run()
        finally:
            if number is not None:
                try:
                    self.release(number)
                finally:
                    self.give_up(number)  # if an interrupt has come in the middle of it

    def _wait(self, number: int) -> None:
        """Wait until all earlier turns have ended."""
        self._check(number)
        try:
            self._changed.wait_for(lambda: self._current >= number or number in self._ended)
        except BaseException:
            self._interrupted = self._with_others
            raise
        self._check(number)  # another thread may have ended it meanwhile
        if self._interrupted:
            expected, got = "calls one after the other, each to its end", "one that was interrupted"
            remedy = "the processes are out of step: end all, and start again"
            raise RuntimeError(message("place", expected=expected, got=got, remedy=remedy))

    def _check(self, number: int) -> None:
        """Check that a turn has not ended, and that this thread does not wait for itself.

        Raises:
          RuntimeError: it has, or it would.
        """
        with self._changed.lock:
            has_ended = number < self._current or number in self._ended
            waits_for_itself = self._waits_for_itself(number)
        if has_ended:
            expected, got = "a turn for each batch", "one that was used or released before"
            remedy = "call engine.next_turn() again"
            raise RuntimeError(message("turn", expected=expected, got=got, remedy=remedy))
        if waits_for_itself:
            expected = "a thread that is not in the middle of an earlier batch"
            got = "one that holds an earlier turn: it would wait for itself"
            remedy = "a source of a Prefetcher must not place training batches of the same engine, "
            remedy += "nor rewind, load or restore its maps: do that in the loop"
            raise RuntimeError(message("place", expected=expected, got=got, remedy=remedy))

    def _waits_for_itself(self, number: int) -> bool:
        """Tell whether this thread holds an earlier turn, which has not ended."""
        me = threading.get_ident()
        mine = (turn for turn, thread in self._held.items() if thread == me and turn < number)
        return any(turn >= self._current and turn not in self._ended for turn in mine)

    def release(self, number: int) -> None:
        """End a turn, whether it was used or not; one that has ended is left alone.

        An interrupt comes before that or after it: half done, later turns would wait for ever.
        """
        with self._changed.lock, SignalsDeferred():
            if number >= self._current:
                self._ended.add(number)
            while self._current in self._ended:
                self._ended.remove(self._current)
                self._current += 1
            self._changed.notify_all()

    def give_up(self, number: int) -> None:
        """End a turn, unless it has ended, that something has kept from being used."""
        with self._changed.lock:
            if number < self._current:
                return
            if number not in self._ended:
                # The others wait for a batch that will not come.
                self._interrupted = self._interrupted or self._with_others
            self.release(number)  # again, if an interrupt has come in the middle of it


def new_turns() -> Turns:
    """Return turns whose holders talk to the other processes, if there are any."""
    return Turns(with_others=jax.process_count() > 1)


@functools.cache
def turns_of(name: str) -> Turns:
    """Return the turns of a conversation, the same for all who take part in it here.

    Args:
      name: of the conversation, the same in all processes.
    """
    return Turns()

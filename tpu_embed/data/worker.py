"""A thread that computes results ahead of the loop that takes them.

The loop asks for results ahead of time; the thread computes one for each request and keeps them in
order. Requests carry the turns that several processes need (`processes/turns.py`), and are made by
the loop. So what is computed ahead depends on the loop alone, not on the speed of the thread.

Input: requests. Output: their results in order, the last of which may be an error or the end.
"""

from __future__ import annotations

import atexit
import collections
import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from tpu_embed._changes import Changes
from tpu_embed._checks import message
from tpu_embed._signals import SignalsDeferred
from tpu_embed._stop import check_stop
from tpu_embed.core.place import Turn

EXIT_SECONDS = 3
"""How long the end of the program waits for threads that are in the middle of a batch."""

_running: weakref.WeakSet[Worker] = weakref.WeakSet()


class Outcome(NamedTuple):
    """What came of a request.

    Attributes:
      value: what the function returned; None if there is nothing more.
      error: what it raised instead, or None.
    """

    value: Any
    error: BaseException | None


class Worker:
    """A thread with the requests that wait for it and the outcomes that wait for the loop.

    The thread holds the worker, but the worker does not hold the object that made it, so that one
    can be garbage-collected while the thread runs.

    Args:
      draw: draws the turn of a request.
      compute: returns the result of a request, or None if there is nothing more. It uses the turn
        in any case. It is not called again after None or an error.
    """

    def __init__(self, draw: Callable[[], Turn], compute: Callable[[Turn], Any]) -> None:
        self._draw = draw
        self._compute: Callable[[Turn], Any] | None = compute
        self._changed = Changes()
        self._requested = 0
        self._turns: collections.deque[Turn] = collections.deque()
        self._outcomes: dict[int, Outcome] = {}
        self._delivered = 0
        # `_over`: the last outcome is there. `_stopped`: nobody will take those that are there.
        self._over = self._stopped = False
        self._reason: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tpu_embed prefetch", daemon=True)
        _running.add(self)
        _stop_all_at_exit()
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether the caller is this thread."""
        return threading.current_thread() is self._thread

    # -- the loop's side -----------------------------------------------------------------------

    def request(self, number: int) -> None:
        """Ask for results until this many were asked for in all."""
        # Half of it would leave a turn that the thread does not know of, or a request uncounted.
        with self._changed.lock, SignalsDeferred():
            while self._requested < number and not self._over and not self._stopped:
                self._turns.append(self._draw())
                self._requested += 1
            self._changed.notify_all()

    def outcome(self, number: int) -> Outcome | None:
        """Return an outcome, waiting for it, and forget those before it; None once stopped.

        An interrupted call may be made again. In a `Stop`, a signal ends the wait.

        Args:
          number: of the request, counted from 1.
        """
        with self._changed.lock:
            for taken in [other for other in self._outcomes if other < number]:
                self._outcomes.pop(taken, None)
        return self._changed.wait_for(lambda: self._at(number))[0]

    def _at(self, number: int) -> tuple[Outcome | None] | None:
        """Return `(outcome,)`, `(None,)` once stopped, or None while it is not there."""
        check_stop()
        is_there = number in self._outcomes or self._stopped
        return (self._outcomes.get(number),) if is_there else None

    def stop(self, reason: BaseException | None = None) -> None:
        """Let the thread end after what it is computing, and forget the outcomes that wait.

        Args:
          reason: the exception that ends the loop, which the other processes are told; or None.
        """
        with self._changed.lock, SignalsDeferred():
            self._stopped, self._reason = True, reason
            self._outcomes.clear()
            self._changed.notify_all()

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread has ended."""
        if not self.is_here:
            self._thread.join(seconds)

    # -- the thread's side ---------------------------------------------------------------------

    def _run(self) -> None:
        while (turn := self._next_turn()) is not None:
            self._deliver(self._outcome_of(turn))
        # A generator that nobody else holds is closed by this, in the thread that has run it.
        self._compute = None
        self._say_stopped()

    def _next_turn(self) -> Turn | None:
        """Return the turn of the next request, waiting for it; None if there will be none."""
        return self._changed.wait_for(self._take_turn)[0]

    def _take_turn(self) -> tuple[Turn | None] | None:
        """Return `(turn,)`, `(None,)` if there will be none, or None while there is none yet."""
        if self._over or self._stopped:
            return (None,)
        return (self._turns.popleft(),) if self._turns else None

    def _outcome_of(self, turn: Turn) -> Outcome:
        assert self._compute is not None
        try:
            return Outcome(self._compute(turn), None)
        except StopIteration as error:  # it would end the loop as if the data had ended
            expected, got = "a batch, or another exception", "StopIteration"
            remedy = "see the cause of this error for the call that raised it"
            wrapped = RuntimeError(message("place", expected=expected, got=got, remedy=remedy))
            wrapped.__cause__ = error
            return Outcome(None, wrapped)
        except BaseException as error:  # the loop raises it, whatever it is
            return Outcome(None, error)

    def _deliver(self, outcome: Outcome) -> None:
        with self._changed.lock:
            self._over = outcome.value is None
            self._delivered += 1
            if not self._stopped:
                self._outcomes[self._delivered] = outcome
            self._changed.notify_all()

    def _say_stopped(self) -> None:
        """Use the turns of requests that will not be met.

        With several processes, the first turn that any process ends or refuses is the last one that
        they talk about: all of them see it, and release the turns after it.
        """
        with self._changed.lock:
            turns, over = list(self._turns), self._over
            self._turns.clear()
        try:
            if turns and not over:
                first = turns.pop(0)
                first.end() if self._reason is None else first.refuse(self._reason)
        except (ValueError, TypeError, RuntimeError):
            return  # the other processes had a batch or have left: their loops raise it
        finally:
            for turn in turns:
                turn.release()


@functools.cache
def _stop_all_at_exit() -> None:
    """Have all threads end before Python does: JAX must not be called from threads at its end."""
    atexit.register(_stop_all)


def _stop_all() -> None:
    running, end = list(_running), time.monotonic() + EXIT_SECONDS
    for worker in running:
        worker.stop()
    for worker in running:
        worker.join(max(0.0, end - time.monotonic()))

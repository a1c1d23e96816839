"""A thread that computes results ahead of the loop that takes them.

The loop asks for results ahead of time; the thread computes one for each request and keeps them in
order. So what is computed ahead depends on the loop alone, not on the speed of the thread.

Input: requests. Output: their results in order, the last of which may be an error or the end.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from tpu_embed._checks import message
from tpu_embed._stop import check_stop
from tpu_embed.data.feed import Feed

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


class Worker(threading.Thread):
    """A thread with the requests that wait for it and the outcomes that wait for the loop.

    The thread does not hold the object that made it, so that one can be garbage-collected while the
    thread runs. What the loop calls may be interrupted anywhere, and be called again.

    Args:
      feed: what it does.

    Attributes:
      stopped: whether the thread ends after what it is computing.
    """

    def __init__(self, feed: Feed) -> None:
        super().__init__(name="tpu_embed prefetch", daemon=True)
        self.stopped = False
        self._feed: Feed | None = feed
        self._pin = feed.pin
        self._pins: dict[int, Any] = {}  # by request
        self._requested = 0
        self._outcomes: dict[int, Outcome] = {}
        self._reason: BaseException | None = None
        self._for_loop, self._for_thread = _Notes(), _Notes()
        _running.add(self)
        _stop_all_at_exit()

    # -- the loop's side -----------------------------------------------------------------------

    def request(self, number: int) -> None:
        """Ask for results until this many were asked for in all."""
        for each in range(self._requested + 1, number + 1):
            self._pins[each] = self._pin()
            self._requested = each
        self._for_thread.add()

    def outcome(self, number: int) -> Outcome | None:
        """Return an outcome, waiting for it, and forget the one before; None once stopped.

        In a `Stop`, a signal ends the wait.

        Args:
          number: of the request, counted from 1.
        """

        def is_there() -> bool:
            check_stop()
            return number in self._outcomes or self.stopped

        self._outcomes.pop(number - 1, None)
        self._for_loop.wait_for(is_there)
        return self._outcomes.get(number)

    def stop(self, reason: BaseException | None = None) -> None:
        """Let the thread end after what it is computing, and forget the outcomes that wait.

        Args:
          reason: the exception that ends the loop, which the other processes are told; or None.
        """
        self._reason = reason or self._reason  # it is stopped once more at the exit
        self.stopped = True
        self._outcomes.clear()
        self._for_loop.add()
        self._for_thread.add()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended; it does not wait for itself."""
        if self is not threading.current_thread():
            super().join(timeout)

    # -- the thread's side ---------------------------------------------------------------------

    def run(self) -> None:
        """Compute what is requested; at a stop, leave out the first of the other requests.

        With several processes, all have as many requests. The first one that any of them leaves out
        is the last one that they talk about.
        """
        number, feed = 0, self._feed
        assert feed is not None, "a thread runs once"
        outcome: Outcome | None = None
        while outcome is None or outcome.value is not None:
            self._for_thread.wait_for(lambda: self.stopped or self._requested > number)  # noqa: B023
            if self.stopped:
                if self._requested > number:
                    feed.leave(self._reason)
                break
            number += 1
            outcome = self._outcomes[number] = _outcome_of(feed, self._pins.pop(number))
            self._for_loop.add()
        if self.stopped:
            self._outcomes.clear()
        # A generator that nobody else holds is closed by this, in the thread that has run it.
        del feed
        self._feed = None


class _Notes:
    """Notes for one who waits. A finalizer may add one in the middle of a wait of its thread."""

    def __init__(self) -> None:
        self._notes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def add(self) -> None:
        """Let the one who waits look again at once."""
        if self._notes.empty():
            self._notes.put(None)

    def wait_for(self, look: Callable[[], bool]) -> None:
        """Wait until a look returns True; it is called at every note, and every second."""
        while not look():
            with contextlib.suppress(queue.Empty):
                self._notes.get(timeout=1)


def _outcome_of(feed: Feed, pin: Any) -> Outcome:
    try:
        return Outcome(feed.compute(pin), None)
    except StopIteration as error:  # it would end the loop as if the data had ended
        expected, got = "a batch, or another exception", "StopIteration"
        remedy = "see the cause of this error for the call that raised it"
        wrapped = RuntimeError(message("place", expected=expected, got=got, remedy=remedy))
        wrapped.__cause__ = error
        return Outcome(None, wrapped)
    except BaseException as error:  # the loop raises it, whatever it is
        return Outcome(None, error)


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

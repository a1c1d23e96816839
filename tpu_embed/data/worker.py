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
from typing import Any

from tpu_embed._checks import message
from tpu_embed._stop import check_stop
from tpu_embed.data.feed import Feed, Placed

EXIT_SECONDS = 3
"""How long the end of the program waits for threads that are in the middle of a batch."""

_NO_MORE = object()
"""In place of a request, the end of all."""

_running: weakref.WeakSet[Worker] = weakref.WeakSet()


class Worker(threading.Thread):
    """A thread with the requests that wait for it and the outcomes that wait for the loop.

    The thread does not hold the object that made it, so that one can be garbage-collected while the
    thread runs. What the loop calls may be interrupted anywhere, and be called again.

    Args:
      feed: computes the results.
      before: the number of the result before the first one.

    Attributes:
      stopped: whether the thread ends after what it is computing.
    """

    def __init__(self, feed: Feed, before: int) -> None:
        super().__init__(name="tpu_embed prefetch", daemon=True)
        self.stopped = False
        self._feed: Feed | None = feed
        self._pin = feed.pin
        # A finalizer may stop this in the middle of any call, also of one that puts or gets.
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._notes: queue.SimpleQueue[None] = queue.SimpleQueue()  # for a loop that waits
        self._before = self._requested = before
        self._outcomes: dict[int, Placed | BaseException | None] = {}
        self._reason: BaseException | None = None
        _running.add(self)
        _stop_all_at_exit()

    # -- the loop's side -----------------------------------------------------------------------

    def request(self, number: int) -> None:
        """Ask for all results up to that of this number."""
        for each in range(self._requested + 1, number + 1):
            self._requests.put(self._pin())
            self._requested = each

    def outcome(self, number: int) -> Placed | BaseException | None:
        """Return a result, waiting for it, and forget the one before.

        In a `Stop`, a signal ends the wait.

        Returns:
          A batch, or an error in its place; None after the last one, or once stopped.
        """
        self._outcomes.pop(number - 1, None)
        while True:
            check_stop()
            if number in self._outcomes or self.stopped:
                return self._outcomes.get(number)
            with contextlib.suppress(queue.Empty):
                self._notes.get(timeout=1)

    def stop(self, reason: BaseException | None = None) -> None:
        """Let the thread end after what it is computing, and forget the outcomes that wait.

        Args:
          reason: the exception that ends the loop, which the other processes are told; or None.
        """
        self._reason = reason or self._reason  # it is stopped once more at the exit
        self.stopped = True
        self._outcomes.clear()
        self._requests.put(_NO_MORE)
        self._note()

    def _note(self) -> None:
        """Let the loop look again at once if it waits."""
        if self._notes.empty():
            self._notes.put(None)

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
        number, feed, goes_on = self._before, self._feed, True
        assert feed is not None, "a thread runs once"
        while goes_on:
            pin = self._requests.get()
            if self.stopped:
                if pin is not _NO_MORE:
                    feed.leave(self._reason)
                break
            number += 1
            self._outcomes[number] = outcome = _outcome_of(feed, pin)
            goes_on = isinstance(outcome, Placed)
            self._note()
        if self.stopped:
            self._outcomes.clear()
        # A generator that nobody else holds is closed by this, in the thread that has run it.
        del feed
        self._feed = None


def _outcome_of(feed: Feed, pin: Any) -> Placed | BaseException | None:
    try:
        return feed.compute(pin)
    except StopIteration as error:  # it would end the loop as if the data had ended
        wrapped = RuntimeError(
            message(
                "place",
                expected="a batch, or another exception",
                got="StopIteration",
                remedy="see the cause of this error for the call that raised it",
            )
        )
        wrapped.__cause__ = error
        return wrapped
    except BaseException as error:  # the loop raises it, whatever it is
        return error


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

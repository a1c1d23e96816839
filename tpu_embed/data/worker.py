"""A thread that computes results ahead of the loop that takes them.

The loop asks for results ahead of time; the thread computes one for each request and keeps them in
order. So what is computed ahead depends on the loop alone, not on the speed of the thread.

Input: requests. Output: their results in order, the last of which may be an error or the end.
"""

from __future__ import annotations

import atexit
import functools
import threading
import time
import weakref
from typing import Any, NamedTuple, Protocol

from tpu_embed._changes import Changes
from tpu_embed._checks import message
from tpu_embed._stop import check_stop

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


class Work(Protocol):
    """What a worker does."""

    def pin(self) -> Any:
        """Return what a request needs to know of the moment at which it is made, in the loop."""

    def compute(self, pin: Any) -> Any:
        """Return the result of a request, or None if there is nothing more.

        It is not called again after None or an error.
        """

    def leave(self, reason: BaseException | None) -> None:
        """Leave a request out, which is the first of those that are left, because of an error."""


class Worker(threading.Thread):
    """A thread with the requests that wait for it and the outcomes that wait for the loop.

    The thread does not hold the object that made it, so that one can be garbage-collected while the
    thread runs. What the loop calls may be interrupted anywhere, and be called again.

    Args:
      work: what it does.

    Attributes:
      stopped: whether the thread ends after what it is computing.
    """

    def __init__(self, work: Work) -> None:
        super().__init__(name="tpu_embed prefetch", daemon=True)
        self.stopped = False
        self._work: Work | None = work
        self._pin = work.pin
        self._changed = Changes()
        self._pins: dict[int, Any] = {}  # by request
        self._requested = 0
        self._outcomes: dict[int, Outcome] = {}
        self._reason: BaseException | None = None
        _running.add(self)
        _stop_all_at_exit()

    @property
    def is_here(self) -> bool:
        """Whether the caller is this thread."""
        return threading.current_thread() is self

    # -- the loop's side -----------------------------------------------------------------------

    def request(self, number: int) -> None:
        """Ask for results until this many were asked for in all."""
        for each in range(self._requested + 1, number + 1):
            self._pins[each] = self._pin()
            self._requested = each
        self._notify()

    def outcome(self, number: int) -> Outcome | None:
        """Return an outcome, waiting for it, and forget the one before; None once stopped.

        In a `Stop`, a signal ends the wait.

        Args:
          number: of the request, counted from 1.
        """
        self._outcomes.pop(number - 1, None)
        return self._changed.wait_for(lambda: self._at(number))[0]

    def _at(self, number: int) -> tuple[Outcome | None] | None:
        """Return `(outcome,)`, `(None,)` once stopped, or None while it is not there."""
        check_stop()
        is_there = number in self._outcomes or self.stopped
        return (self._outcomes.get(number),) if is_there else None

    def stop(self, reason: BaseException | None = None) -> None:
        """Let the thread end after what it is computing, and forget the outcomes that wait.

        Args:
          reason: the exception that ends the loop, which the other processes are told; or None.
        """
        self._reason = reason
        self.stopped = True
        self._outcomes.clear()
        self._notify()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended; it does not wait for itself."""
        if not self.is_here:
            super().join(timeout)

    def _notify(self) -> None:
        with self._changed.lock:
            self._changed.notify_all()

    # -- the thread's side ---------------------------------------------------------------------

    def run(self) -> None:
        """Compute what is requested; at a stop, leave out the first of the other requests.

        With several processes, all have as many requests. The first one that any of them leaves out
        is the last one that they talk about.
        """
        number, work = 0, self._work
        assert work is not None, "a thread runs once"
        outcome: Outcome | None = None
        while outcome is None or outcome.value is not None:
            self._changed.wait_for(functools.partial(self._is_asked, number))
            if self.stopped:
                if self._requested > number:
                    work.leave(self._reason)
                break
            number += 1
            outcome = self._outcomes[number] = _outcome_of(work, self._pins.pop(number))
            self._notify()
        if self.stopped:
            self._outcomes.clear()
        # A generator that nobody else holds is closed by this, in the thread that has run it.
        del work
        self._work = None

    def _is_asked(self, number: int) -> bool:
        """Tell whether there is more to do after so many requests, or never will be."""
        return self.stopped or self._requested > number


def _outcome_of(work: Work, pin: Any) -> Outcome:
    try:
        return Outcome(work.compute(pin), None)
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
